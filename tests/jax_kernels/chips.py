"""Compiles a kernel for a TPU that is not there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from cogvideox_torchax.plan import chips


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def answer(function: Callable[..., Any], *structs: Any) -> Any:
    """Return what a function says of arrays that are being traced, which have a shape and no values."""
    found: list[Any] = []
    jax.eval_shape(lambda *arrays: found.append(function(*arrays)), *structs)
    return found[0]


def compiled_for(topology: str, function: Callable[..., Any], *structs: Any, donate: Any = ()) -> Any:
    """Compile a function for one device of a topology."""
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    device = chips.topology_devices(topology)[0]
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), structs)
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):  # lowering a kernel asks for the chip's kind
        return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def pixels_first(x: jax.Array) -> jax.Array:
    """Frames in the order that a TPU keeps them in, or back."""
    return x.transpose(2, 3, 0, 1, 4)
