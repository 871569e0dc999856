"""Attention on a TPU by a Pallas kernel that holds tokens in the lanes and keys before queries.

`S^T = K Q^T` and `O^T = V^T P^T`, of arrays with channels before tokens: no channels are padded to the 128
lanes of a tile, and the weights `P^T` come out of one product as the other takes them. A row of ones below
`V^T` has the matrix unit sum the weights too, of the very values that it multiplies.

Axis letters here: B videos and heads, D channels of a head, S and K positions of the queries and of the keys.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.layout import precision_for
from jax_kernels.common.tiles import DTYPES, LANES

BLOCKS = 2048, 2304, 2560, 2816
"""Positions a block of a long sequence: that is taken which fills it up least."""

CHUNK, STRIP = 256, 256
"""Keys and queries of a block whose weights are computed at a time."""

CHANNELS = 256
"""Those that a head may have."""

VMEM = 100 * 2**20
"""What the kernel may take of it."""


def takes(q: Float[Array, "N S H D"]) -> bool:
    """Whether the kernel takes such queries: float32 or bfloat16, heads of at most 256 channels."""
    return q.dtype in DTYPES and q.shape[-1] <= CHANNELS


def transposed(
    q: Float[Array, "N S H D"],
    k: Float[Array, "N K H D"],
    v: Float[Array, "N K H D"],
    *,
    scale: float,
    valid: int,
    bounded: bool,
) -> Float[Array, "N S H D"]:
    """Attention by the kernel, of arrays that it `takes`.

    Args:
        q, k, v: as `attention` takes them. XLA transposes them, unless it finds them transposed.
        scale: of the scores.
        valid: how many keys are real, at least one; the others may hold anything.
        bounded: whether scores are known to be within `LARGEST_BOUND`. Else the running maximum is
            taken off.
    """
    videos, queries, heads, channels = q.shape
    # Whole tiles of channels: the row of ones begins where a tile does.
    tile = 32 // q.dtype.itemsize
    filled = -channels % tile
    q_BDS, k_BDK, v_BDK = (
        jnp.pad(x.transpose(0, 2, 3, 1), [(0, 0), (0, 0), (0, filled), (0, 0)]).reshape(
            videos * heads, channels + filled, x.shape[1]
        )
        for x in (q, k, v)
    )
    y_BDS = attend(q_BDS, k_BDK, v_BDK, scale=scale, valid=valid, bounded=bounded)
    return y_BDS.reshape(videos, heads, channels + filled, queries)[:, :, :channels].transpose(0, 3, 1, 2)


def attend(
    q: Float[Array, "B D S"],
    k: Float[Array, "B D K"],
    v: Float[Array, "B D K"],
    *,
    scale: float,
    valid: int,
    bounded: bool,
) -> Float[Array, "B D S"]:
    """The kernel itself, for channels in whole tiles."""
    batch, channels, queries = q.shape
    tile = 32 // q.dtype.itemsize
    query_block, key_block = _block(queries), _block(valid)
    of_queries = pl.BlockSpec((None, channels, query_block), lambda b, i, j: (b, 0, i))
    of_keys = pl.BlockSpec((None, channels, key_block), lambda b, i, j: (b, 0, j))
    running = [] if bounded else [pltpu.VMEM((1, query_block), jnp.float32)]
    return pl.pallas_call(
        functools.partial(_attend, valid=valid, factor=scale * math.log2(math.e)),
        grid=(batch, pl.cdiv(queries, query_block), pl.cdiv(valid, key_block)),
        in_specs=[of_queries, of_keys, of_keys],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((channels + tile, query_block), jnp.float32), *running],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name="attention_bounded" if bounded else "attention_transposed",
    )(q, k, v)


def _block(length: int) -> int:
    """Positions a block. The last one may reach beyond the sequence."""
    if length <= min(BLOCKS):
        unit = LANES if length <= LANES else CHUNK
        return -(-length // unit) * unit
    return min(BLOCKS, key=lambda block: (-(-length // block) * block, -block))


def _attend(q_ref, k_ref, v_ref, y_ref, sums_ref, *maximum_ref, valid: int, factor: float) -> None:
    """A block of queries and a block of keys: sums of weights times values, and below them of weights.

    A strip of queries has its scores for the next chunk of keys multiplied before its weights of this one are
    computed, so that the matrix unit need not wait for them.
    """
    channels, keys = k_ref.shape
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        for ref in maximum_ref:
            ref[...] = jnp.full_like(ref, -jnp.inf)

    def keys_of(chunk: slice) -> Array:
        # Another key of the block in place of one that only pads: a score like any, of weight zero.
        return _where_real(k_ref[:, chunk], k_ref[:, :1], chunk, block, keys, valid)

    def values_of(chunk: slice) -> Array:
        v = v_ref[:, chunk]
        with_ones = jnp.concatenate([v, jnp.ones((sums_ref.shape[0] - channels, v.shape[1]), v.dtype)])
        return _where_real(with_ones, 0, chunk, block, keys, valid)

    def scores_of(strip: slice, k: Array) -> Array:
        scores = _product(k, q_ref[:, strip], over=0)
        return scores if factor == 1.0 else scores * factor  # queries that hold their scale need no pass

    strips, chunks = _slices(q_ref.shape[1], STRIP), _slices(keys, CHUNK)
    sums = [sums_ref[:, strip] for strip in strips]
    maxima = [[ref[:, strip] for ref in maximum_ref] for strip in strips]
    k = keys_of(chunks[0])
    scores = [scores_of(strip, k) for strip in strips]
    for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
        v, k = values_of(chunk), keys_of(following) if following else None
        for n, strip in enumerate(strips):
            ahead = k if k is None else scores_of(strip, k)
            sums[n], maxima[n] = _with_chunk(sums[n], maxima[n], scores[n], v)
            scores[n] = ahead
    for strip, total, maximum in zip(strips, sums, maxima, strict=True):
        sums_ref[:, strip] = total
        for ref, value in zip(maximum_ref, maximum, strict=True):
            ref[:, strip] = value

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        y_ref[...] = (sums_ref[:channels] / sums_ref[channels : channels + 1]).astype(y_ref.dtype)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, length)) for at in range(0, length, step)]


def _where_real(
    x: Array, other: Array | int, chunk: slice, block: Array, block_keys: int, valid: int
) -> Array:
    """`x`, of a chunk of keys in its last axis, and `other` for those that only pad."""
    if valid % block_keys == 0:
        return x
    positions = block * block_keys + chunk.start + lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
    return jnp.where(positions < valid, x, other)


def _with_chunk(sums: Array, maximum: list[Array], scores: Array, v: Array) -> tuple[Array, list[Array]]:
    """Sums with the weights of a chunk added, and the running maximum that was taken off, if there is one."""
    if maximum:
        before, maximum = maximum[0], [jnp.maximum(maximum[0], scores.max(0, keepdims=True))]
        scores, sums = scores - maximum[0], sums * jnp.exp2(before - maximum[0])
    return sums + _product(v, jnp.exp2(scores).astype(v.dtype), over=1), maximum


def _product(a: Array, b: Array, *, over: int) -> Array:
    """`a` and `b` multiplied over one axis of `a` and the first of `b`, summed in float32."""
    return lax.dot_general(
        a,
        b,
        (((over,), (0,)), ((), ())),
        precision=precision_for(a.dtype),
        preferred_element_type=jnp.float32,
    )
