"""Nearest 2x upsampling on a TPU, in one pass by a Pallas kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.layout import frames_first, pixels_first
from jax_kernels.common.tiles import BLOCK_BYTES, fills_tiles, pixel_bytes


def takes(x: Float[Array, "N T H W C"]) -> bool:
    """Whether the kernel takes these activations: float32 or bfloat16, whole tiles of channels, and no more
    frames than a step can hold.
    """
    return fills_tiles(x) and _pixel_bytes(x) <= BLOCK_BYTES


def _pixel_bytes(x: Array) -> int:
    """What a step holds of one pixel, and of the four that it becomes."""
    return pixel_bytes(x, *[x.shape[1]] * 5)


@jax.custom_jvp
def doubled_pixels(x: Float[Array, "N T H W C"]) -> Float[Array, "N T 2*H 2*W C"]:
    """Each pixel four times, in two rows and two columns.

    Args:
        x: activations that the kernel `takes`.
    """
    videos, length, height, width, channels = x.shape
    steps = -(-width // (BLOCK_BYTES // _pixel_bytes(x)))
    step = -(-width // steps)
    result = pl.pallas_call(
        _double,
        grid=(height, steps),
        in_specs=[
            pl.BlockSpec((None, step, videos, length, channels), lambda row, column: (row, column, 0, 0, 0))
        ],
        out_specs=pl.BlockSpec(
            (None, 2, step, 2, videos, length, channels), lambda row, column: (row, 0, column, 0, 0, 0, 0)
        ),
        # Said to be in HBM: XLA else brings small ones into VMEM and back.
        out_shape=pltpu.HBM((height, 2, width, 2, videos, length, channels), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="doubled_pixels",
    )(pixels_first(x))
    return frames_first(result.reshape(2 * height, 2 * width, videos, length, channels))


def _double(x_ref, result_ref) -> None:
    for row in range(2):
        for column in range(2):
            result_ref[row, :, column] = x_ref[...]


@doubled_pixels.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> Any:
    (tangent,) = tangents
    return doubled_pixels(*primals), jnp.repeat(jnp.repeat(tangent, 2, axis=2), 2, axis=3)
