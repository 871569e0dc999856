"""Nearest 2x upsampling on a TPU, in one pass by a Pallas kernel: of frames, and of an image."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.layout import frames_first, pixels_first
from jax_kernels.common.tiles import BLOCK_BYTES, LANES, fills_tiles, pixel_bytes, words_of_twice

WIDTHS = 16
"""Columns of an image come in multiples of it, as whole tiles of bfloat16."""


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


def takes_image(x: Float[Array, "N T H W C"]) -> bool:
    """Whether the kernel takes it: one frame of bfloat16, whole tiles of channels, rows that a step can
    hold."""
    width = -(-x.shape[3] // WIDTHS) * WIDTHS
    fits = 5 * width * x.shape[4] * 2 <= BLOCK_BYTES
    return fills_tiles(x) and x.dtype == jnp.bfloat16 and x.shape[1] == 1 and fits


@jax.custom_jvp
def doubled_image(x: Float[Array, "N 1 H W C"]) -> Float[Array, "N 1 2*H 2*W C"]:
    """Each pixel four times, in two rows and two columns.

    Args:
        x: an image that the kernel takes (`takes_image`).
    """
    videos, _, height, width, channels = x.shape
    step = -(-width // WIDTHS) * WIDTHS
    result = pl.pallas_call(
        _double_image,
        grid=(videos, height),
        in_specs=[pl.BlockSpec((None, None, step, channels), lambda video, row: (video, row, 0, 0))],
        out_specs=pl.BlockSpec((None, None, 2, 2 * step, channels), lambda video, row: (video, row, 0, 0, 0)),
        out_shape=pltpu.HBM((videos, height, 2, 2 * width, channels), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="doubled_image",
    )(x[:, 0])
    return result.reshape(videos, 1, 2 * height, 2 * width, channels)


def _double_image(x_ref, result_ref) -> None:
    for lane in range(0, x_ref.shape[-1], LANES):
        lanes = slice(lane, lane + LANES)
        twice = pltpu.bitcast(words_of_twice(x_ref[:, lanes]), result_ref.dtype)
        for row in range(2):
            result_ref[row, :, lanes] = twice


@doubled_image.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> Any:
    (tangent,) = tangents
    return doubled_image(*primals), jnp.repeat(jnp.repeat(tangent, 2, axis=2), 2, axis=3)
