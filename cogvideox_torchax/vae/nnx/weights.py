"""Weights between diffusers' state dict and the NNX state, both ways, bit for bit, one tensor at a time.

The attribute names are diffusers' own, so a path maps to a name word by word; only the last word differs, and
only kernels are stored the other way round: torch (O, I, *window), here (*window, I, O).
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
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.vae import checkpoint
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.versions import TESTED, installed

Keys = tuple[Any, ...]
"""Path of a parameter in the NNX state: names and list indices from the root down."""

COMPILED_PREFIX = "_orig_mod."
"""Prefix that `torch.compile` adds to the names of a compiled module's tensors."""

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
"""Last word of diffusers' name for the last word of an NNX path."""


def diffusers_name(path: Keys) -> str:
    """Return the name in diffusers' state dict of the parameter at a path of the NNX state."""
    *modules, leaf = path
    return ".".join(map(str, [*modules, _LEAVES[leaf]]))


def to_nnx(path: Keys, tensor: np.ndarray) -> np.ndarray:
    """Return a torch tensor's array as the parameter at `path` holds it.

    A kernel is transposed from torch's (O, I, ...) to (..., I, O).
    """
    return np.ascontiguousarray(np.moveaxis(tensor, (1, 0), (-2, -1))) if path[-1] == "kernel" else tensor


def to_torch(path: Keys, parameter: np.ndarray) -> np.ndarray:
    """Return the parameter at `path` as a torch tensor's array: the inverse of `to_nnx`.

    A kernel is transposed from (..., I, O) to torch's (O, I, ...).
    """
    is_kernel = path[-1] == "kernel"
    return np.ascontiguousarray(np.moveaxis(parameter, (-1, -2), (0, 1))) if is_kernel else parameter


@runtime.runs_unchecked
def read_state(
    abstract: nnx.State, tensors: Iterable[tuple[str, np.ndarray]], *, source: object, param_dtype: DTypeLike
) -> nnx.State:
    """Build an NNX state of concrete arrays from diffusers' tensors, read one by one.

    Args:
        abstract: the state with shapes in place of arrays (`nnx.eval_shape`), or a state to replace.
        tensors: (name, array) pairs; a name may have the `COMPILED_PREFIX` of `torch.compile` in it.
        source: name of the weights in an error.
        param_dtype: dtype of the result.

    Raises:
        ModelError: a tensor of another shape, missing, left over, or given twice, by name.
    """
    runtime.check_not_forked()
    wanted = {diffusers_name(path): (path, variable) for path, variable in nnx.to_flat_state(abstract)}
    loaded: dict[str, tuple[Keys, nnx.Variable]] = {}
    unexpected: list[str] = []
    for given_name, tensor in tensors:
        name = given_name.replace(COMPILED_PREFIX, "")
        if name not in wanted:
            unexpected.append(given_name)
            continue
        if name in loaded:
            raise checkpoint.ModelError(f"{source} gives {name} twice: the second time as {given_name}")
        path, variable = wanted[name]
        expected = torch_shape(path, variable.shape)
        if tensor.shape != expected:
            raise checkpoint.ModelError(
                f"{name} of {source} has the shape {tensor.shape}: the config asks for {expected}; give the "
                "config.json that belongs to these weights"
            )
        # Wait: copies to a device run asynchronously, and would keep many host tensors alive at once.
        array = jnp.array(to_nnx(path, tensor), dtype=param_dtype).block_until_ready()
        loaded[name] = path, variable.replace(array)
    info = {"missing_keys": wanted.keys() - loaded.keys(), "unexpected_keys": unexpected}
    checkpoint.check_loading_info(info, source)
    return nnx.from_flat_state([loaded[name] for name in wanted])


def torch_shape(path: Keys, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that diffusers gives the parameter at `path`: a kernel (..., I, O) is (O, I, ...)."""
    return shape if path[-1] != "kernel" else (shape[-1], shape[-2], *shape[:-2])


def state_dict(state: nnx.State) -> dict[str, np.ndarray]:
    """Return an NNX state as diffusers' state dict of NumPy arrays (bfloat16 as `ml_dtypes` has it)."""
    return {
        diffusers_name(path): to_torch(path, np.asarray(variable[...]))
        for path, variable in nnx.to_flat_state(state)
    }


def from_torch(tensors: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a torch state dict's tensors, plain or on JAX, as NumPy arrays, one at a time."""
    for name, tensor in tensors.items():
        yield name, runtime.host_array(runtime.to_torch(tensor).cpu())


def save(state: nnx.State, config: FlaxAutoencoderKLCogVideoXConfig, directory: str | Path) -> None:
    """Write config.json and the weights as diffusers' `save_pretrained` does, in one file."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    diffusers_version = installed("diffusers") or TESTED["diffusers"].newest
    fields = {
        "_class_name": checkpoint.CLASS_NAME,
        "_diffusers_version": diffusers_version,
        **config.to_dict(),
    }
    with whole_file(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    with whole_file(directory / f"{checkpoint.WEIGHTS_STEM}.safetensors") as temporary:
        temporary.write_bytes(serialized(state_dict(state), metadata={"format": "pt"}))
