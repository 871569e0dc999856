"""What a convolution over frames needs of them on a TPU, written in one pass by a Pallas kernel.

Frames lie in the sublanes of a TPU's tiles, so the copies of them that lie under the earlier taps of a causal
convolution, and the frames that the next call will have in its past, are moved sublanes: XLA takes two
passes for them, at a third of the memory's speed (v6e, 8 x 768 x 176 x 128: 1.8 ms, where the bytes that this
kernel moves take 0.6).
"""

import functools
import math
import os

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SWITCH = "JAX_KERNELS_PALLAS"
"""The environment variable that, set to "off", leaves the work of this kernel to XLA."""

BLOCK_BYTES = 4 * 2**20
"""What one step may hold, twice: in the 16 MiB that a kernel gets on a v5e."""

LANES = 128


def takes(x_NTHWC: jax.Array, past: int) -> bool:
    """Whether the kernel takes these frames: whole tiles of channels, and enough frames to be the next past.

    It runs on one device, or on one shard: nothing can partition it.
    """
    whole = x_NTHWC.shape[-1] % LANES == 0 and x_NTHWC.shape[1] >= past > 0
    return whole and os.environ.get(SWITCH, "on") != "off"


def shifted_copies(cache_NPHWC: jax.Array, x_NTHWC: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Of `frames`, the P frames of the cache and the T of `x` after them: `frames[p : p + T]` for each p < P,
    and the last P, which become the next cache."""
    past, length = cache_NPHWC.shape[1], x_NTHWC.shape[1]
    cache, x = (array.transpose(2, 3, 0, 1, 4) for array in (cache_NPHWC, x_NTHWC))
    height, width, videos, _, channels = x.shape
    sublanes = -(-length // 16) * 16
    pixel = math.prod((videos, sublanes, channels)) * x.dtype.itemsize * (2 * past + 1)
    fit = min(width, max(1, BLOCK_BYTES // pixel))
    columns = next(columns for columns in range(fit, 0, -1) if width % columns == 0)

    def block(frames: int) -> pl.BlockSpec:
        shape = (1, columns, videos, frames, channels)
        return pl.BlockSpec(shape, lambda row, column: (row, column, 0, 0, 0))

    def struct(frames: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((height, width, videos, frames, channels), x.dtype)

    *copies, latest = pl.pallas_call(
        functools.partial(_copy, past=past, length=length),
        grid=(height, width // columns),
        in_specs=[block(past), block(length)],
        out_specs=[*[block(length)] * past, block(past)],
        out_shape=[*[struct(length)] * past, struct(past)],
        input_output_aliases={0: past},  # the old cache's memory, which a program donates
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="shifted_copies",
    )(cache, x)
    return [copy.transpose(2, 3, 0, 1, 4) for copy in copies], latest.transpose(2, 3, 0, 1, 4)


def _copy(cache_ref, x_ref, *result_refs, past: int, length: int) -> None:
    frames = jnp.concatenate([cache_ref[...], x_ref[...]], axis=-2)
    *copies, latest = result_refs
    for shift, copy in enumerate(copies):
        copy[...] = frames[..., shift : shift + length, :]
    latest[...] = frames[..., length : length + past, :]
