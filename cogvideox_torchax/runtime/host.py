"""Plain tensors of torch and NumPy arrays, which share their memory."""

import numpy as np
import torch


def plain_tensor(host: np.ndarray) -> torch.Tensor:
    """Return a NumPy array as a plain torch tensor, without a copy: the inverse of `host_array`."""
    if host.dtype.name == "bfloat16":  # the dtype of ml_dtypes, which `from_numpy` refuses
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a plain torch tensor as a NumPy array, without a copy if it is contiguous."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        # torch cannot convert bfloat16 to NumPy, which has no such dtype: the bits are taken as int16.
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
