"""The tolerated errors of a backend against diffusers in float32 on the CPU, for tests and `verify`."""

import torch

FLOAT32_RELATIVE = 1e-5
"""The bound of `relative_error` in float32."""

BFLOAT16_RMS_RATIO = 1.1
"""The bound of `rms_error` in bfloat16, as a multiple of PyTorch's own error in bfloat16."""

BFLOAT16_LAYER_RMS_RATIO = 1.5
"""The bound of the same ratio for one layer in one chunk, where fewer roundings average out.

A report finds the layer at fault by it. No check fails by it.
"""


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference over the reference's largest absolute value; NaN if there is a NaN."""
    reference = reference.double()
    return ((got.double() - reference).abs().max() / reference.abs().max()).item()


def rms_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return (got.double() - reference.double()).square().mean().sqrt().item()


def contract(dtype: torch.dtype, relative: float, rms: float, torch_rms: float) -> tuple[str, float, float]:
    """Return (name, value, largest allowed value) of the error that decides whether a result is accepted.

    In float32 the result's `relative_error` decides. In another dtype its `rms_error` decides, as a multiple
    of `torch_rms`, the error of PyTorch's own run in this dtype.
    """
    if dtype == torch.float32:
        return "relative error", relative, FLOAT32_RELATIVE
    return "RMS error over PyTorch's own", ratio(rms, torch_rms), BFLOAT16_RMS_RATIO


def ratio(error: float, scale: float) -> float:
    """Return `error / scale`; if `scale` is zero, return 0 for no error, else infinity."""
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def psnr(got: torch.Tensor, reference: torch.Tensor, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio in decibels; infinite for equal tensors."""
    error = (got.double() - reference.double()).square().mean().item()
    return float("inf") if error == 0 else 10 * torch.log10(torch.tensor(peak**2 / error)).item()
