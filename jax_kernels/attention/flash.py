"""Attention on a TPU by JAX's own Pallas kernel, which pads heads to 128 channels."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_flash
from jaxtyping import Array

QUERY_BLOCK, KEY_BLOCK = 1024, 1024
"""Positions a block in the TPU's kernel, for sequences as long as a video's."""


LANES = 128
"""Positions in the smallest block that the TPU's kernel takes."""


def flash(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """JAX's flash attention for TPU: whole blocks of positions, those that only fill up a block masked out.

    Padded keys belong to another segment than every query, so no query attends to them; padded queries are
    cut off.
    """
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    query_block, queries = _blocks(q.shape[1], QUERY_BLOCK)
    key_block, keys = _blocks(k.shape[1], KEY_BLOCK)
    q_NHSD, k_NHKD, v_NHKD = (
        jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))
        for x, length in zip(heads_first, (queries, keys, keys), strict=True)
    )
    segments = None
    if keys != k.shape[1]:
        segments = tpu_flash.SegmentIds(
            q=jnp.ones((q.shape[0], queries), jnp.int32),
            kv=jnp.broadcast_to(_real(k.shape[1], keys), (k.shape[0], keys)),
        )
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        y_NHSD = tpu_flash.flash_attention(
            q_NHSD,
            k_NHKD,
            v_NHKD,
            segment_ids=segments,
            sm_scale=scale,
            block_sizes=tpu_flash.BlockSizes(
                block_q=query_block, block_k_major=key_block, block_k=key_block, block_b=1
            ),
        )
    return jnp.swapaxes(y_NHSD[:, :, : q.shape[1]], 1, 2)


def _blocks(length: int, largest: int) -> tuple[int, int]:
    """The block for a sequence, and the sequence's length in whole blocks."""
    block = min(largest, -(-length // LANES) * LANES)
    return block, -(-length // block) * block


def _real(length: int, padded: int) -> Array:
    """1 for each position that holds something, 0 for each that only fills up."""
    return (jnp.arange(padded) < length).astype(jnp.int32)
