"""The conversion of weights between diffusers' state dict and the NNX state, bit for bit.

The attribute names are diffusers' own, so a path in the NNX state and a name in the state dict differ only in
the last word. A kernel is (*window, I, O) here, and (O, I, *window) in torch.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import save as serialized

from cogvideox_torchax import runtime
from cogvideox_torchax.arrays.forks import check_not_forked
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.vae import checkpoint
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.versions import TESTED, installed

Keys = tuple[Any, ...]
"""The path of a parameter in the NNX state: names and list indices from the root down."""

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
"""The last word of diffusers' name, by the last word of the path."""


def diffusers_name(path: Keys) -> str:
    """Return the name in diffusers' state dict of the parameter at `path`."""
    *modules, leaf = path
    return ".".join(map(str, [*modules, _LEAVES[leaf]]))


def to_nnx(path: Keys, tensor: np.ndarray) -> np.ndarray:
    """Return a torch tensor's array, rearranged to the layout of the parameter at `path`."""
    return np.ascontiguousarray(np.moveaxis(tensor, (1, 0), (-2, -1))) if path[-1] == "kernel" else tensor


def to_torch(path: Keys, array: np.ndarray) -> np.ndarray:
    """Return the array of the parameter at `path`, rearranged to torch's layout."""
    return np.ascontiguousarray(np.moveaxis(array, (-1, -2), (0, 1))) if path[-1] == "kernel" else array


# A user may have turned on JAX's checks of transfers, which would refuse the copies to a device here.
def read_state(
    abstract: nnx.State, tensors: Iterable[tuple[str, np.ndarray]], *, source: object, param_dtype: DTypeLike
) -> nnx.State:
    """Return an NNX state like `abstract` with the values of diffusers' tensors, which are read one by one.

    Of `abstract` only the paths and the shapes count. An error calls the weights by `source`.

    Raises:
        ModelError: a tensor is missing, left over or of another shape.
    """
    check_not_forked()  # raises an error in a forked process, where JAX would hang
    parameters = {diffusers_name(path): (path, variable) for path, variable in nnx.to_flat_state(abstract)}
    loaded: dict[str, tuple[Keys, nnx.Variable]] = {}
    unexpected: list[str] = []
    for name, tensor in tensors:
        if name not in parameters:
            unexpected.append(name)
            continue
        path, variable = parameters[name]
        array = to_nnx(path, tensor)
        if array.shape != variable.shape:
            checkpoint.check_loading_info({"mismatched_keys": [f"{name} {tensor.shape}"]}, source)
        # Copies to a device run asynchronously. Without the wait, many tensors would be in the host's memory
        # at once.
        loaded[name] = path, variable.replace(jnp.array(array, dtype=param_dtype).block_until_ready())
    info = {"missing_keys": parameters.keys() - loaded.keys(), "unexpected_keys": unexpected}
    checkpoint.check_loading_info(info, source)
    return nnx.from_flat_state([loaded[name] for name in parameters])


def state_dict(state: nnx.State) -> dict[str, np.ndarray]:
    """Return an NNX state as a state dict of NumPy arrays; bfloat16 is that of `ml_dtypes`."""
    return {
        diffusers_name(path): to_torch(path, np.asarray(variable[...]))
        for path, variable in nnx.to_flat_state(state)
    }


def from_torch(tensors: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a torch state dict, plain or on JAX, as NumPy arrays."""
    for name, tensor in tensors.items():
        yield name, runtime.host_array(runtime.to_torch(tensor).cpu())


def save(state: nnx.State, config: FlaxAutoencoderKLCogVideoXConfig, directory: str | Path) -> None:
    """Write config.json, and the weights in one file, as diffusers' `save_pretrained` does."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    fields = {
        "_class_name": checkpoint.CLASS_NAME,
        "_diffusers_version": installed("diffusers") or TESTED["diffusers"].newest,  # may not be installed
        **config.to_dict(),
    }
    with whole_file(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    with whole_file(directory / f"{checkpoint.WEIGHTS_STEM}.safetensors") as temporary:
        temporary.write_bytes(serialized(state_dict(state), metadata={"format": "pt"}))
