"""Runs a kernel over a mesh, of arrays whose columns are split over it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels.common.columns import Split
from tests.reference import largest_error


def on_mesh(kernel: Callable[..., Any], real: int, padded: int, dp: int, tp: int) -> Callable[..., Any]:
    """Run `kernel` over dp x tp devices; every `padded` columns hold `real` of the frame, and padding.

    The padding is added here. Arrays of five axes are activations, but for kernels of 3 frames or 1 pixel.
    """
    devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    videos = "dp" if dp > 1 else None
    split = Split(real, padded, videos=videos, columns=("tp",))

    def put(array):
        if array.ndim != 5 or array.shape[0] == 3 or array.shape[:3] == (1, 1, 1):
            return array
        more = array.shape[3] * padded // real - array.shape[3]
        array = jnp.pad(array, [(0, 0)] * 3 + [(0, more), (0, 0)])
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(videos, None, None, "tp")))

    @jax.jit
    def traced(operands, named):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return kernel(*operands, **named, split=split)

    return lambda *operands, **named: traced(*jax.tree.map(put, (operands, named)))


def check_gradients(alone: Callable[..., Any], sharded: Callable[..., Any], operands: Any, real: int) -> None:
    """Check that a kernel over a mesh has the gradients of one device, for results of `real` columns."""

    def loss(operands, kernel):
        y = kernel(*operands)[:, :, :, :real].astype(jnp.float32)
        return jnp.sum(y * np.random.default_rng(1).normal(size=y.shape))

    want, got = (jax.tree.leaves(jax.grad(loss)(operands, kernel)) for kernel in (alone, sharded))
    for mine, plain in zip(got, want, strict=True):
        assert mine.shape == plain.shape
        assert largest_error(mine, plain) < 0.02
