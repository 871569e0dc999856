"""Attention on a TPU by a Pallas kernel that holds tokens in the lanes and keys before queries.

It computes `S^T = K Q^T` and `O^T = V^T P^T` of arrays with channels before tokens: scores S, weights P and
the output O. So no channels are padded to the 128 lanes of a tile, and the first product gives the scores in
the order in which the second one takes the weights.

A key's weight for a query is 2 ** (factor * (score - maximum)). The kernel computes weights for a chunk of
keys and a strip of queries at a time. Softmax allows any number near the true maximum, so the kernel takes
the maximum over the first chunk of keys alone. The product itself subtracts it: minus the maximum is one more
channel of each query, and each key has a one in this channel. So a score goes straight from the matrix unit
to the exponential. If the first maximum was too far off, the sum of the weights shows it: the kernel then
computes that block of queries again, with the maximum of all keys. A second extra channel lowers the scores
of padding keys.

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
"""Choices for the queries in a block of a long sequence: the number with the least padding is taken."""

KEYS = 2560, 3072, 3584
"""Choices for the number of keys in a block; the body of the kernel's loop attends to one block."""

CHUNK, STRIP = 256, 256
"""The keys of a chunk and the queries of a strip, whose weights are computed at a time."""

STRIPS_AHEAD = 4
"""Pairs of a chunk and a strip whose exponents are computed before the weights of the current pair."""

CHANNELS = 256
"""Most supported channels of a head."""

KEYS_SHARE = 0.5
"""Share of VMEM for the keys and values of a head and of the next head, which are fetched meanwhile."""

LARGEST_SUM = 2.0**100
"""Largest sum of a query's weights that is trusted; the smallest one is its inverse.

With another sum the query's block is computed again.
"""

PADDING_PENALTY = 2.0**125
"""Amount subtracted from the scores of padding keys, which makes their weights zero."""


def is_supported(
    q: Float[Array | jax.ShapeDtypeStruct, "N S H D"], k: Float[Array | jax.ShapeDtypeStruct, "N K H D"]
) -> bool:
    """Return whether the kernel supports these queries and keys.

    It needs float32 or bfloat16, heads of at most 256 channels, and keys and values that fit into VMEM. On a
    v6e, 130,000 keys of 64 channels in bfloat16 fit.
    """
    return (
        q.dtype in DTYPES
        and q.shape[-1] <= CHANNELS
        # Four arrays: the keys and the values of this head and of the next.
        and 4 * k.shape[1] * k.shape[3] * k.dtype.itemsize < KEYS_SHARE * vmem_limit()
    )


def transposed(
    q: Float[Array, "N S H D"],
    k: Float[Array, "N K H D"],
    v: Float[Array, "N K H D"],
    *,
    scale: float,
    num_keys: int,
) -> Float[Array, "N S H D"]:
    """Transpose and pad queries, keys and values, attend by the kernel, and transpose its result back.

    The arrays must be such that `is_supported` accepts them, with at least one real key. Within
    `attention_transposed`, which transposes the other way around this call, XLA drops all transpositions.
    """
    videos, queries, heads, channels = q.shape
    padded_channels = tiled_sublanes(channels, q.dtype)  # zeros fill whole tiles
    padding = [(0, 0), (0, 0), (0, padded_channels - channels), (0, 0)]
    # B: heads of all videos; D: padded channels; S queries, K keys.
    q_BDS, k_BDK, v_BDK = (
        jnp.pad(x.transpose(0, 2, 3, 1), padding).reshape(videos * heads, padded_channels, x.shape[1])
        for x in (q, k, v)
    )
    if scale == 0:
        # The kernel subtracts a penalty from the scores of padding keys, and then multiplies by the scale: a
        # scale of 0 would undo the penalty. Queries of 0, with a scale of 1, give the same weights.
        q_BDS, scale = jnp.zeros_like(q_BDS), 1.0
    # Of the choices QUERIES and KEYS, those blocks are taken that pad the sequences least.
    query_block, key_block = _block_length(queries, QUERIES), _block_length(num_keys, KEYS)
    query_spec = pl.BlockSpec((None, padded_channels, query_block), lambda head, block: (head, 0, block))
    # A grid step has the real keys, and padding up to whole blocks. Where the block reaches beyond the array
    # `k_BDK`, the padding may hold anything.
    key_spec = pl.BlockSpec(
        (None, padded_channels, pl.cdiv(num_keys, key_block) * key_block), lambda head, block: (head, 0, 0)
    )
    y_BDS = pl.pallas_call(
        functools.partial(
            _attend_block,
            num_queries=queries,
            num_keys=num_keys,
            key_block=key_block,
            factor=scale * math.log2(math.e),  # exp(scale * score) is 2 ** (factor * score)
        ),
        # A grid step (head, block) computes one block of queries of one video's head.
        grid=(videos * heads, pl.cdiv(queries, query_block)),
        in_specs=[query_spec, key_spec, key_spec],
        out_specs=query_spec,
        out_shape=jax.ShapeDtypeStruct(q_BDS.shape, q.dtype),
        scratch_shapes=[
            # Queries, and below them the extra channels that lower scores (`_subtracted_rows`).
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
    """Return the one of `sizes` that pads a sequence of this length least; of several, the largest.

    A sequence that is no longer than the smallest of `sizes` is one block, of whole chunks or of one tile's
    lanes.
    """
    if length <= min(sizes):
        unit = LANES if length <= LANES else CHUNK
        return pl.cdiv(length, unit) * unit
    # The least pair wins: of (padded length, minus the block). So the largest of equally good blocks wins.
    return min(sizes, key=lambda block: (pl.cdiv(length, block) * block, -block))


def _attend_block(
    q_ref,
    k_ref,
    v_ref,
    y_ref,
    extended_q_ref,
    value_sums_ref,
    weight_sums_ref,
    *,
    num_queries,
    num_keys,
    key_block,
    factor,
) -> None:
    """Attend from a block of queries to all keys and values of a head, `key_block` keys at a time.

    `q_ref` and the result `y_ref` are (D, S), `k_ref` and `v_ref` (D, K). The other refs are memory to work
    in: `extended_q_ref` for the queries and the `_subtracted_rows` below them, `value_sums_ref` (D, S) for
    sums of weighted values, and `weight_sums_ref` (8, S) for eight partial sums of the weights. Padding
    follows the real queries and keys. A weight is 2 ** (`factor` * (score - maximum)).
    """
    channels, query_block = q_ref.shape
    chunk = min(CHUNK, key_block)  # a number of keys; a strip is a slice of the block's queries
    strips = [slice(at, min(at + STRIP, query_block)) for at in range(0, query_block, STRIP)]
    value_sums_ref[...] = jnp.zeros_like(value_sums_ref)
    weight_sums_ref[...] = jnp.zeros_like(weight_sums_ref)
    # The first chunk of keys, whose maximum is subtracted from all scores. The first key, put in place of
    # padding keys, leaves this maximum as it is.
    first_keys = _replace_padding(k_ref[:, :chunk], 0, num_keys, k_ref[:, :1])
    for strip in strips:
        extended_q_ref[:channels, strip] = q_ref[:, strip]
        extended_q_ref[channels:, strip] = _subtracted_rows(first_keys, q_ref[:, strip], factor)

    @pl.loop(0, pl.cdiv(num_keys, key_block))
    def _(block: Array) -> None:
        # Adds what one block of keys contributes to the sums.

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

        def exponents_of(start: int, strip_index: int) -> Array:
            """Return the exponents (keys, queries) of the weights for a chunk's start and a strip's index."""
            # Differences: score - maximum.
            differences = _product(keys_of(start), extended_q_ref[:, strips[strip_index]], over=0)
            # The multiplication would take another pass over the scores. Queries that `qk_norm_rope` has
            # scaled do without it.
            return differences if factor == 1.0 else differences * factor

        # Each strip's sums over the earlier blocks of keys. The sums over this block are added to them.
        value_sums = [value_sums_ref[:, strip] for strip in strips]
        weight_sums = [weight_sums_ref[:, strip] for strip in strips]
        # Pairs of a chunk's start and a strip's index. The exponents of a pair are computed `STRIPS_AHEAD`
        # pairs before its weights, and wait in a queue. So the matrix unit does not wait for weights.
        pairs = list(itertools.product(range(0, key_block, chunk), range(len(strips))))
        waiting = [exponents_of(*pair) for pair in pairs[:STRIPS_AHEAD]]
        for (start, strip_index), later_pair in itertools.zip_longest(pairs, pairs[STRIPS_AHEAD:]):
            if later_pair:
                waiting.append(exponents_of(*later_pair))
            weights, v = jnp.exp2(waiting.pop(0)), values_of(start)
            value_sums[strip_index] += _product(v, weights.astype(v.dtype), over=1)
            # Eight partial sums of the weights of each query: whole registers are added.
            weight_sums[strip_index] += weights.reshape(-1, SUBLANES, weights.shape[1]).sum(0)
        for strip, value_sum, weight_sum in zip(strips, value_sums, weight_sums, strict=True):
            value_sums_ref[:, strip] = value_sum
            weight_sums_ref[:, strip] = weight_sum

    weight_sum = weight_sums_ref[...].sum(0, keepdims=True)
    value_sum = value_sums_ref[...]
    y_ref[...] = (value_sum / weight_sum).astype(y_ref.dtype)
    # Whether the result of a query can be trusted. Padding queries, after the last real one, may hold
    # anything: their sums are not checked.
    is_query = (
        pl.program_id(1) * query_block + jax.lax.broadcasted_iota(jnp.int32, weight_sum.shape, 1)
        < num_queries
    )
    # All comparisons with NaN are false, so a sum of NaN is not trusted either.
    is_weight_trusted = (weight_sum > 1 / LARGEST_SUM) & (weight_sum < LARGEST_SUM)
    is_correct = is_weight_trusted & (jnp.abs(value_sum) < jnp.inf) | ~is_query

    # In the minimum a wrong result is a 0, a correct one a 1.
    @pl.when(jnp.min(is_correct.astype(jnp.float32)) == 0)
    def _() -> None:
        _attend_again(q_ref, k_ref, v_ref, y_ref, value_sums_ref, weight_sums_ref, num_keys, factor)


def _attend_again(q_ref, k_ref, v_ref, y_ref, value_sums_ref, weight_sums_ref, num_keys, factor) -> None:
    """Attend from a block of queries with the maximum of `factor * score` over all keys, in two passes.

    The first pass finds the maximum and the sum of weights, and keeps both in the memory `weight_sums_ref`.
    The second pass divides the weights by that sum before it adds up the weighted values, so that no sum
    overflows.
    """
    # References, `num_keys` and `factor` are those of `_attend_block`.
    query_block = q_ref.shape[1]
    strip, chunk = min(STRIP, query_block), min(CHUNK, k_ref.shape[1])
    maximum_ref, total_ref = weight_sums_ref.at[:1], weight_sums_ref.at[1:2]  # one row each
    # A finite number: minus infinity would give NaN below where all scores so far are minus infinity too.
    maximum_ref[...] = jnp.full_like(maximum_ref, jnp.finfo(jnp.float32).min)
    total_ref[...] = jnp.zeros_like(total_ref)
    value_sums_ref[...] = jnp.zeros_like(value_sums_ref)

    def for_each_chunk_of_scores(visit: Callable[[Any, Any, Array], None]) -> None:
        """Call `visit(queries_at, keys_at, scaled)` for each chunk of keys and each strip of queries.

        `queries_at` and `keys_at` are the slices of their positions. `scaled` (keys, queries) holds the
        scores times `factor`, and minus infinity for padding keys.
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
        old_maximum = maximum_ref[:, queries_at]
        maximum = jnp.maximum(old_maximum, scaled.max(0, keepdims=True))
        maximum_ref[:, queries_at] = maximum
        chunk_total = jnp.exp2(scaled - maximum).sum(0, keepdims=True)
        # The sum over the earlier chunks was relative to the old maximum.
        total_ref[:, queries_at] = total_ref[:, queries_at] * jnp.exp2(old_maximum - maximum) + chunk_total

    def add_values(queries_at: Any, keys_at: Any, scaled: Array) -> None:
        weights = jnp.exp2(scaled - maximum_ref[:, queries_at]) / total_ref[:, queries_at]
        v = _replace_padding(v_ref[:, keys_at], keys_at.start, num_keys, 0)
        value_sums_ref[:, queries_at] = value_sums_ref[:, queries_at] + _product(
            v, weights.astype(v.dtype), over=1
        )

    for_each_chunk_of_scores(update_maximum_and_total)
    for_each_chunk_of_scores(add_values)
    y_ref[...] = value_sums_ref[...].astype(y_ref.dtype)


def _subtracted_rows(keys: Array, q: Array, factor: float) -> Array:
    """Return a tile of extra channels to put below the queries `q` (D, S), which lower their scores.

    Row 0 is minus each query's maximum score with `keys`, in the dtype of `q`: every key has a one in this
    channel. Row 1 is minus `PADDING_PENALTY`: only padding keys have a one in it. The other rows are zero. If
    `factor`, by which the scores are multiplied later, is negative, the smallest score is subtracted and the
    penalty is added.
    """
    scores = _product(keys, q, over=0)
    extreme = scores.max(0, keepdims=True) if factor > 0 else scores.min(0, keepdims=True)
    row = jax.lax.broadcasted_iota(jnp.int32, (tile_rows(q.dtype), q.shape[1]), 0)
    penalty = math.copysign(PADDING_PENALTY, factor)
    return jnp.where(row == 0, -extreme, jnp.where(row == 1, -penalty, 0.0)).astype(q.dtype)


def _positions(at: Any, count: int) -> Array:
    """Return the `count` positions from `at` on, as a row."""
    return at + jax.lax.broadcasted_iota(jnp.int32, (1, count), 1)


def _replace_padding(x: Array, at: Any, num_keys: int, replacement: Array | int) -> Array:
    """Return keys or values (D, K), the first of which is at position `at`, with padding replaced.

    Padding is from position `num_keys` on. It may hold NaNs, which a weight of zero would not remove.
    """
    return jnp.where(_positions(at, x.shape[1]) < num_keys, x, replacement)


def _product(a: Array, b: Array, *, over: int) -> Array:
    """Contract axis `over` of the matrix `a` with the first axis of the matrix `b`; sum in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((over,), (0,)), ((), ())),
        precision=precision_for(a.dtype),
        preferred_element_type=jnp.float32,
    )
