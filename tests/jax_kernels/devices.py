"""Kernels on other devices: compiled for a TPU that is not there, or run over a mesh with split columns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.plan import chips
from cogvideox_torchax import make_mesh
from jax_kernels.common.columns import Split
from tests.reference import largest_error

A_UNIT = 2.0**-7
"""Relative unit of bfloat16's last place."""


def check_rounded_once(got: jax.Array, sums: jax.Array) -> None:
    """Check bfloat16 against float32 sums, which may have been added in another order."""
    assert got.dtype == jnp.bfloat16
    half_a_unit = np.exp2(np.floor(np.log2(np.abs(sums))) - 8)
    assert np.all(np.abs(np.array(got, np.float32) - np.array(sums)) <= half_a_unit + 1e-5)


def check_rounding(got: jax.Array, want: jax.Array, share: float = 0.05) -> None:
    """Check bfloat16 against results whose sums are added in another order: few of them round otherwise."""
    assert got.dtype == want.dtype == jnp.bfloat16
    assert largest_error(got, want) <= A_UNIT
    assert float(jnp.mean(got != want)) < share


def drawn(*shapes: tuple[int, ...] | None, dtype: Any = jnp.bfloat16) -> list[Any]:
    """Return an array of normal values for each shape, and None for None."""
    rng = np.random.default_rng(0)
    return [None if shape is None else jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def answer(function: Callable[..., Any], *structs: Any) -> Any:
    """Return what a function says of arrays that are being traced, which have a shape and no values."""
    found: list[Any] = []
    jax.eval_shape(lambda *arrays: found.append(function(*arrays)), *structs)
    return found[0]


def compiled_for(topology: str, function: Callable[..., Any], *structs: Any, donate: Any = ()) -> Any:
    """Compile a function for one device of a topology."""
    device = chips.topology_devices(topology)[0]
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)), structs
    )
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):  # lowering a kernel asks for the chip's kind
        return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def pixels_first(x: jax.Array) -> jax.Array:
    """Frames in the order that a TPU keeps them in, or back."""
    return x.transpose(2, 3, 0, 1, 4)


def on_mesh(kernel: Callable[..., Any], real: int, padded: int, dp: int, tp: int) -> Callable[..., Any]:
    """Run `kernel` over dp x tp devices; every `padded` columns hold `real` of the frame, and padding.

    The padding is added here. Arrays of five axes are activations, but for kernels of 3 frames or 1 pixel.
    """
    mesh = make_mesh(dp, tp, devices=jax.devices()[: dp * tp])
    videos = "dp" if dp > 1 else None

    def put(array):
        if array.ndim != 5 or array.shape[0] == 3 or array.shape[:3] == (1, 1, 1):
            return array
        more = array.shape[3] * padded // real - array.shape[3]
        array = jnp.pad(array, [(0, 0)] * 3 + [(0, more), (0, 0)])
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(videos, None, None, "tp")))

    @jax.jit
    def traced(operands, named):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return kernel(*operands, **named, split=Split(real, padded, videos=videos, columns=("tp",)))

    return lambda *operands, **named: traced(*jax.tree.map(put, (operands, named)))
