"""Attention on a TPU by a Pallas kernel that holds tokens in the lanes and keys before queries.

It computes `S^T = K Q^T` and `O^T = V^T P^T` of arrays with channels before tokens. So no channels are padded
to the 128 lanes of a tile, and one product returns the weights `P^T` in the order in which the other takes
them.

A key's weight for a query is 2 ** (factor * (score - maximum)). The kernel computes weights for a chunk of
keys and a strip of queries at a time. It takes the maximum over the first chunk of keys alone, since softmax
allows any number near the true maximum, and subtracts it inside the product, as more channels of the queries
that meet ones in the keys: a score goes straight from the matrix unit to the exponential. If the first
maximum was too far off, the sum of the weights shows it: the kernel then computes that block of queries
again, with the maximum of all keys.

Axis letters here: B videos and heads, D channels of a head, S and K positions of the queries and of the keys.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.pointwise import precision_for
from jax_kernels.common.tiles import DTYPES, LANES, SUBLANES, tile_rows, tiled_sublanes, vmem_limit

QUERIES = 2048, 2304, 2560, 2816
"""Choices for the queries of a block, in a long sequence: the one with the least padding is taken."""

KEYS = 2560, 3072, 3584
"""Choices for the keys of a block, which a loop's body attends to."""

CHUNK, STRIP = 256, 256
"""Keys (a chunk) and queries (a strip) whose weights are computed at a time."""

STRIPS_AHEAD = 4
"""Pairs of a chunk and a strip whose exponents are computed before the weights of the current pair."""

CHANNELS = 256
"""Most supported channels of a head."""

KEYS_SHARE = 0.5
"""Share of VMEM that the keys and values of a head, and of the next one, fetched meanwhile, may take."""

LARGEST_SUM = 2.0**100
"""Largest sum of a query's weights that is trusted, its inverse the smallest; else it is computed again."""

PADDING_PENALTY = 2.0**125
"""Amount subtracted from the scores of padding keys, which makes their weights zero."""


def is_supported(
    q: Float[Array | jax.ShapeDtypeStruct, "N S H D"], k: Float[Array | jax.ShapeDtypeStruct, "N K H D"]
) -> bool:
    """Return whether the kernel supports such queries and keys.

    It needs float32 or bfloat16, heads of at most 256 channels, and keys that fit into VMEM: 130,000 of 64
    bfloat16 channels on a v6e.
    """
    # Keys and values, of this head and of the next.
    fits = 4 * k.shape[1] * k.shape[3] * k.dtype.itemsize < KEYS_SHARE * vmem_limit()
    return q.dtype in DTYPES and q.shape[-1] <= CHANNELS and fits


def transposed(
    q: Float[Array, "N S H D"],
    k: Float[Array, "N K H D"],
    v: Float[Array, "N K H D"],
    *,
    scale: float,
    num_keys: int,
) -> Float[Array, "N S H D"]:
    """Transpose and pad queries, keys and values, attend by the kernel, and transpose its result back.

    `is_supported` accepts the arrays, and there is at least one real key. XLA drops a transpose after its
    opposite.
    """
    videos, queries, heads, channels = q.shape
    padded_channels = tiled_sublanes(channels, q.dtype)  # zeros fill whole tiles
    padding = [(0, 0), (0, 0), (0, padded_channels - channels), (0, 0)]
    # B: heads of all videos; D: padded channels; S queries, K keys.
    q_BDS, k_BDK, v_BDK = (
        jnp.pad(x.transpose(0, 2, 3, 1), padding).reshape(videos * heads, padded_channels, x.shape[1])
        for x in (q, k, v)
    )
    if scale == 0:  # it would make the penalty of padding keys 0 too; queries of 0 give the same scores
        q_BDS, scale = jnp.zeros_like(q_BDS), 1.0
    query_block, key_block = _block_length(queries, QUERIES), _block_length(num_keys, KEYS)
    all_keys = pl.cdiv(num_keys, key_block) * key_block  # the keys that a grid step has, in whole blocks
    query_spec = pl.BlockSpec((None, padded_channels, query_block), lambda head, block: (head, 0, block))
    key_spec = pl.BlockSpec((None, padded_channels, all_keys), lambda head, block: (head, 0, 0))
    y_BDS = pl.pallas_call(
        functools.partial(
            _attend_block,
            num_queries=queries,
            num_keys=num_keys,
            key_block=key_block,
            factor=scale * math.log2(math.e),  # exp(scale * score) is 2 ** (factor * score)
        ),
        grid=(videos * heads, pl.cdiv(queries, query_block)),
        in_specs=[query_spec, key_spec, key_spec],
        out_specs=query_spec,
        out_shape=jax.ShapeDtypeStruct(q_BDS.shape, q.dtype),
        scratch_shapes=[
            # Queries, and below them rows that subtract from their scores (`_subtracted_rows`).
            pltpu.VMEM((padded_channels + tile_rows(q.dtype), query_block), q.dtype),
            pltpu.VMEM((padded_channels, query_block), jnp.float32),  # sums of weighted values
            pltpu.VMEM((SUBLANES, query_block), jnp.float32),  # sums of weights
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_limit()
        ),
        name="attention",
    )(q_BDS, k_BDK, v_BDK)
    return y_BDS.reshape(videos, heads, padded_channels, queries)[:, :, :channels].transpose(0, 3, 1, 2)


def _block_length(length: int, sizes: tuple[int, ...]) -> int:
    """Return the one of `sizes` that pads a sequence least, and the largest of equals.

    A sequence no longer than any of `sizes` is one block, of whole chunks or of a tile's lanes.
    """
    if length <= min(sizes):
        unit = LANES if length <= LANES else CHUNK
        return pl.cdiv(length, unit) * unit
    # By the padded length; by minus the block, where that is equal.
    return min(sizes, key=lambda block: (pl.cdiv(length, block) * block, -block))


def _attend_block(
    q_ref,
    k_ref,
    v_ref,
    y_ref,
    extended_ref,
    sums_ref,
    totals_ref,
    *,
    num_queries,
    num_keys,
    key_block,
    factor,
) -> None:
    """Attend from a block of queries (D, S) to all keys and values (D, K) of a head, `key_block` at a time.

    The result `y_ref` is (D, S). `extended_ref` is memory for the queries and the `_subtracted_rows` below
    them, `sums_ref` for sums of weighted values, and `totals_ref` (8, S) for eight partial sums of the
    weights. Padding follows the real queries and keys. `factor` multiplies the scores.
    """
    channels, query_block = q_ref.shape
    chunk = min(CHUNK, key_block)
    strips = [slice(at, min(at + STRIP, query_block)) for at in range(0, query_block, STRIP)]
    sums_ref[...] = jnp.zeros_like(sums_ref)
    totals_ref[...] = jnp.zeros_like(totals_ref)
    first_keys = _replace_padding(k_ref[:, :chunk], 0, num_keys, k_ref[:, :1])
    for strip in strips:
        extended_ref[:channels, strip] = q_ref[:, strip]
        extended_ref[channels:, strip] = _subtracted_rows(first_keys, q_ref[:, strip], factor)

    @pl.loop(0, pl.cdiv(num_keys, key_block))
    def _(block: Array) -> None:

        @functools.cache  # loaded once for all strips of queries
        def keys_of(start: int) -> Array:
            """Return a chunk of keys, and below them the tile that meets the queries' `_subtracted_rows`.

            The tile's first row is all ones; its second row has ones at padding keys alone.
            """
            at = pl.multiple_of(block * key_block + start, LANES)
            k = k_ref[:, pl.ds(at, chunk)]
            row = jax.lax.broadcasted_iota(jnp.int32, (tile_rows(k.dtype), chunk), 0)
            is_one = row == 0
            if num_keys % key_block:  # else no block has padding
                is_one |= (row == 1) & (_positions(at, chunk) >= num_keys)
                k = _replace_padding(k, at, num_keys, k_ref[:, :1])
            return jnp.concatenate([k, is_one.astype(k.dtype)])

        @functools.cache
        def values_of(start: int) -> Array:
            at = pl.multiple_of(block * key_block + start, LANES)
            v = v_ref[:, pl.ds(at, chunk)]
            return _replace_padding(v, at, num_keys, 0) if num_keys % key_block else v

        def exponents_of(start: int, n: int) -> Array:
            differences = _product(keys_of(start), extended_ref[:, strips[n]], over=0)  # score - maximum
            # Queries that are scaled already (`attention`) need no pass.
            return differences if factor == 1.0 else differences * factor

        sums = [sums_ref[:, strip] for strip in strips]
        totals = [totals_ref[:, strip] for strip in strips]
        # Each chunk's start with each strip's index. The exponents of `STRIPS_AHEAD` pairs wait in a queue,
        # multiplied before the weights of earlier pairs: so the matrix unit does not wait for weights.
        pairs = list(itertools.product(range(0, key_block, chunk), range(len(strips))))
        waiting = [exponents_of(*pair) for pair in pairs[:STRIPS_AHEAD]]
        for (start, n), later_pair in itertools.zip_longest(pairs, pairs[STRIPS_AHEAD:]):
            if later_pair:
                waiting.append(exponents_of(*later_pair))
            weights, v = jnp.exp2(waiting.pop(0)), values_of(start)
            sums[n] = sums[n] + _product(v, weights.astype(v.dtype), over=1)
            # Eight partial sums of the weights of each query: whole registers are added.
            totals[n] = totals[n] + weights.reshape(-1, SUBLANES, weights.shape[1]).sum(0)
        for n, strip in enumerate(strips):
            sums_ref[:, strip], totals_ref[:, strip] = sums[n], totals[n]

    total, weighted = totals_ref[...].sum(0, keepdims=True), sums_ref[...]
    y_ref[...] = (weighted / total).astype(y_ref.dtype)
    # Padding queries, after the last real one, may hold anything: their sums are not checked.
    first_query = pl.program_id(1) * query_block
    is_query = first_query + jax.lax.broadcasted_iota(jnp.int32, total.shape, 1) < num_queries
    is_trusted = (total > 1 / LARGEST_SUM) & (total < LARGEST_SUM) & (jnp.abs(weighted) < jnp.inf)
    is_correct = is_trusted | ~is_query

    attend_again = functools.partial(
        _attend_again, q_ref, k_ref, v_ref, y_ref, sums_ref, totals_ref, num_keys, factor
    )
    pl.when(jnp.min(is_correct.astype(jnp.float32)) == 0)(attend_again)


def _attend_again(q_ref, k_ref, v_ref, y_ref, sums_ref, totals_ref, num_keys, factor) -> None:
    """Attend from a block of queries with the maximum of `factor * score` over all keys, in two passes.

    The first pass finds the maximum and the sum of weights, and keeps them in `totals_ref`. The second adds
    the values with weights that are divided by that sum already, so that no sum overflows.
    """
    query_block = q_ref.shape[1]
    strip, chunk = min(STRIP, query_block), min(CHUNK, k_ref.shape[1])
    maximum_ref, total_ref = totals_ref.at[:1], totals_ref.at[1:2]  # one row each
    maximum_ref[...] = jnp.full_like(maximum_ref, jnp.finfo(jnp.float32).min)
    total_ref[...] = jnp.zeros_like(total_ref)
    sums_ref[...] = jnp.zeros_like(sums_ref)

    def over_scores(visit: Callable[[Any, Any, Array], None]) -> None:
        """Call `visit(queries_at, keys_at, scaled)` for each chunk of keys and each strip of queries.

        `scaled` holds the scores times `factor`, and minus infinity for padding keys.
        """

        @pl.loop(0, pl.cdiv(num_keys, chunk))
        def _(chunk_index: Array) -> None:
            keys_at = pl.ds(pl.multiple_of(chunk_index * chunk, LANES), chunk)
            is_key = chunk_index * chunk + jax.lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < num_keys

            @pl.loop(0, query_block // strip)
            def _(strip_index: Array) -> None:
                queries_at = pl.ds(pl.multiple_of(strip_index * strip, LANES), strip)
                scaled = _product(k_ref[:, keys_at], q_ref[:, queries_at], over=0) * factor
                visit(queries_at, keys_at, jnp.where(is_key, scaled, -jnp.inf))

    def update_maximum_and_total(queries_at: Any, _: Any, scaled: Array) -> None:
        before = maximum_ref[:, queries_at]
        maximum = jnp.maximum(before, scaled.max(0, keepdims=True))
        maximum_ref[:, queries_at] = maximum
        chunk_total = jnp.exp2(scaled - maximum).sum(0, keepdims=True)
        total_ref[:, queries_at] = total_ref[:, queries_at] * jnp.exp2(before - maximum) + chunk_total

    def add_values(queries_at: Any, keys_at: Any, scaled: Array) -> None:
        weights = jnp.exp2(scaled - maximum_ref[:, queries_at]) / total_ref[:, queries_at]
        v = _replace_padding(v_ref[:, keys_at], keys_at.start, num_keys, 0)
        sums_ref[:, queries_at] = sums_ref[:, queries_at] + _product(v, weights.astype(v.dtype), over=1)

    over_scores(update_maximum_and_total)
    over_scores(add_values)
    y_ref[...] = sums_ref[...].astype(y_ref.dtype)


def _subtracted_rows(keys: Array, q: Array, factor: float) -> Array:
    """Return a tile of rows to put below `q` (channels, queries): they subtract from its scores with keys.

    Row 0 is minus each query's maximum score with `keys`, rounded; row 1 is minus `PADDING_PENALTY`. If
    `factor`, by which scores are multiplied later, is negative, the smallest score is subtracted and the
    penalty is added.
    """
    scores = _product(keys, q, over=0)
    extreme = scores.max(0, keepdims=True) if factor > 0 else scores.min(0, keepdims=True)
    row = jax.lax.broadcasted_iota(jnp.int32, (tile_rows(q.dtype), q.shape[1]), 0)
    penalty = math.copysign(PADDING_PENALTY, factor)
    return jnp.where(row == 0, -extreme, jnp.where(row == 1, -penalty, 0.0)).astype(q.dtype)


def _positions(at: Any, count: int) -> Array:
    return at + jax.lax.broadcasted_iota(jnp.int32, (1, count), 1)


def _replace_padding(x: Array, at: Any, num_keys: int, other: Array | int) -> Array:
    """Return a chunk (D, K) from position `at` on, with `other` in place of padding, which may hold NaNs."""
    return jnp.where(_positions(at, x.shape[1]) < num_keys, x, other)


def _product(a: Array, b: Array, *, over: int) -> Array:
    """Contract axis `over` of the matrix `a` with the first axis of the matrix `b`; sum in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((over,), (0,)), ((), ())),
        precision=precision_for(a.dtype),
        preferred_element_type=jnp.float32,
    )
