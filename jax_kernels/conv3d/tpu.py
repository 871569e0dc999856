"""The form of a causal 3-D convolution for TPUs: what it needs of the frames is written by a Pallas kernel.

Frames lie in the sublanes of a TPU's tiles, so the copies of them that lie under the earlier taps of a causal
convolution, and the frames that the next call will have in its past, are moved sublanes: XLA takes two
passes for them, at a third of the memory's speed (v6e, 8 x 768 x 176 x 128: 1.8 ms, where the bytes that this
kernel moves take 0.6).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.columns import add_from_neighbours
from jax_kernels.common.layout import frames_first, pixels_first
from jax_kernels.common.tiles import BLOCK_BYTES, LANES, fills_tiles, pixel_bytes
from jax_kernels.conv3d.xla import finished, folded, same_columns, stacked


def takes(x: Float[Array, "N T H W C"], past: int) -> bool:
    """Whether the kernel takes these frames, with so many of the past: float32 or bfloat16, whole tiles of
    channels, enough frames to be the next past, and no more of them than a step can hold.
    """
    if not fills_tiles(x) or not x.shape[1] >= past > 0:
        return False
    return _pixel_bytes(x, past) <= BLOCK_BYTES


def _pixel_bytes(x: Array, past: int) -> int:
    """What a step holds of one pixel: the cache, the frames, their copies, the next cache."""
    return pixel_bytes(x, past, x.shape[1], *[x.shape[1]] * past, past)


def copied(
    x: Array, cache: Array, residual: Array | None, kernel: Array, bias: Array | None
) -> tuple[Array, Array]:
    # One array for the kernel and for the products, which would else each have their own made.
    x = frames_first(lax.optimization_barrier(pixels_first(x)))
    # Where a decoder's channels narrow its memory peaks.
    copies, latest = shifted_copies(cache, x, kernel.shape[3] > kernel.shape[4] >= LANES)
    sums = stacked([*copies, x], kernel, same_columns(kernel))
    frames = jnp.concatenate([cache, x], axis=1)  # of which a shard makes the columns that it sends
    return finished(add_from_neighbours(sums, frames, kernel, folded), bias, residual, like=x), latest


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def shifted_copies(
    cache: Float[Array, "N P H W C"], x: Float[Array, "N T H W C"], sparing: bool = False
) -> tuple[list[Float[Array, "N T H W C"]], Float[Array, "N P H W C"]]:
    """Of `frames`, the P of the cache and the T of `x` after them: `frames[p : p + T]` for each p < P, and
    the last P, which become the next cache.

    Args:
        cache: donated by a program that wants no second one: the next cache takes its memory.
        x: frames that the kernel `takes`.
        sparing: write the first copy alone. XLA can then shift the others by itself inside the convolution
            that reads them, which costs a little time, and a copy less of memory.
    """
    past, length = cache.shape[1], x.shape[1]
    videos, _, height, width, channels = x.shape
    pixels = height * width
    fit = BLOCK_BYTES // _pixel_bytes(x, past)
    # Of whole blocks: JAX's interpreter runs no others where a result takes an argument's memory.
    step = next(step for step in range(min(fit, pixels), 0, -1) if pixels % step == 0)

    def block(frames: int) -> pl.BlockSpec:
        return pl.BlockSpec((step, videos, frames, channels), lambda pixel: (pixel, 0, 0, 0))

    def result(frames: int) -> Any:
        # Said to be in HBM: XLA else brings caches into VMEM and back.
        return pltpu.HBM((pixels, videos, frames, channels), x.dtype)

    def flat(array: Array) -> Array:
        return array.transpose(2, 3, 0, 1, 4).reshape(pixels, videos, array.shape[1], channels)

    def unflat(array: Array) -> Array:
        return array.reshape(height, width, *array.shape[1:]).transpose(2, 3, 0, 1, 4)

    # The first frame of each result among `frames`, and how many there are.
    sparing = sparing and past > 1
    written = [(0, length), (1, past - 1)] if sparing else [(tap, length) for tap in range(past)]
    spans = [*written, (length, past)]
    *copies, latest = pl.pallas_call(
        functools.partial(_copy, spans=spans),
        grid=(pixels // step,),
        in_specs=[block(past), block(length)],
        out_specs=[block(frames) for _, frames in spans],
        out_shape=[result(frames) for _, frames in spans],
        input_output_aliases={0: len(spans) - 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="shifted_copies",
    )(flat(cache), flat(x))
    copies, latest = [unflat(copy) for copy in copies], unflat(latest)
    if sparing:
        first, between = copies  # which are of the old cache, whose memory is the next one's by now
        later = [(between[:, tap - 1 :], x[:, : length - past + tap]) for tap in range(1, past)]
        copies = [first, *(jnp.concatenate(parts, axis=1) for parts in later)]
    return copies, latest


def _copy(cache_ref, x_ref, *result_refs, spans: list[tuple[int, int]]) -> None:
    frames = jnp.concatenate([cache_ref[...], x_ref[...]], axis=-2)
    for result_ref, (first, length) in zip(result_refs, spans, strict=True):
        result_ref[...] = frames[..., first : first + length, :]


@shifted_copies.defjvp
def _(sparing: bool, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    cache, x = tangents  # of a function that is linear
    past, length = cache.shape[1], x.shape[1]
    frames = jnp.concatenate([cache, x], axis=1)
    copies = [frames[:, tap : tap + length] for tap in range(past)]
    return shifted_copies(*primals, sparing), (copies, frames[:, length:])
