"""Scaled dot-product attention for any sequence length, by each platform's own kernel.

Axis letters here: N batch, S and K positions of the queries and of the keys, H heads, D channels of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_flash
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_kernels.layout import precision_for

QUERY_BLOCK = 1024
"""Queries that the plain form holds scores for at a time."""

TPU_QUERY_BLOCK, TPU_KEY_BLOCK = 1024, 1024
"""Positions a block in the TPU's kernel, for sequences as long as a video's."""

LANES = 128
"""Positions in the smallest block that the TPU's kernel takes."""


@functools.partial(jax.jit, static_argnames="scale")
def attention(
    q: Float[Array, "N S H D"],
    k: Float[Array, "N K H D"],
    v: Float[Array, "N K H D"],
    *,
    scale: float | None = None,
) -> Float[Array, "N S H D"]:
    """`softmax(q k^T * scale) v`, a head at a time: torch's `scaled_dot_product_attention` without a mask.

    On TPU JAX's flash attention, on GPU cuDNN's for 16-bit inputs, elsewhere plain XLA over blocks of
    queries. On a mesh (`jax.sharding.use_abstract_mesh`) the batch is split over the first axis and the heads
    over the others; the queries over those axes whose size divides neither.

    Args:
        q, k, v: any float dtype, all of one.
        scale: of the scores before the softmax; 1 / sqrt(D) where None, as in torch.

    Returns:
        The shape and dtype of `q`. Scores and softmax are float32 whatever the dtype.

    Raises:
        ValueError: shapes that do not fit each other, or dtypes that differ.
    """
    _check(q, k, v)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    mesh = jax.sharding.get_abstract_mesh()
    attend = functools.partial(_attend, scale=scale)
    return attend(q, k, v) if mesh.empty else _over_mesh(attend, mesh, q, k, v)


@jax.jit
def rotate(
    x: Float[Array, "N S H D"], cos: Float[Array, "P D"], sin: Float[Array, "P D"]
) -> Float[Array, "N S H D"]:
    """Rotary positions (Su et al. 2021) for the last P of S positions; the ones before them have none.

    Neighbouring channels are a pair: (a, b) becomes (a cos - b sin, b cos + a sin). The pairs are swapped by
    a matrix of zeros and ones, exactly: an axis of two channels would fill a TPU's lanes with padding.

    Args:
        x: any float dtype, D even.
        cos, sin: float32, each angle once for either channel of its pair.

    Returns:
        The shape and dtype of `x`; the arithmetic is float32.

    Raises:
        ValueError: tables that do not fit `x`.
    """
    positions, channels = cos.shape
    if cos.shape != sin.shape or x.ndim != 4 or channels != x.shape[-1] or positions > x.shape[1]:
        raise ValueError(
            f"rotate got x {x.shape}, cos {cos.shape}, sin {sin.shape}: it takes (N, S, H, D), (P, D)"
        )
    before = ((x.shape[1] - positions, 0), (0, 0))
    cos_SHD = jnp.pad(cos, before, constant_values=1.0)[:, None]
    sin_SHD = jnp.pad(sin, before)[:, None]
    turned = jnp.einsum("nshd,de->nshe", x, _turn(channels, x.dtype), precision=precision_for(x.dtype))
    return (x.astype(jnp.float32) * cos_SHD + turned.astype(jnp.float32) * sin_SHD).astype(x.dtype)


def _turn(channels: int, dtype: jnp.dtype) -> Array:
    """The matrix that takes every pair (a, b) to (-b, a)."""
    return jnp.asarray(np.kron(np.eye(channels // 2), [[0, 1], [-1, 0]]), dtype)


def _check(q: Array, k: Array, v: Array) -> None:
    fits = q.ndim == k.ndim == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or k.shape != v.shape:
        raise ValueError(
            f"attention got q {q.shape}, k {k.shape}, v {v.shape}: it takes (N, S, H, D), (N, K, H, D) twice"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention got q {q.dtype}, k {k.dtype}, v {v.dtype}: all of one dtype are wanted")


def _attend(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    kernels = {"tpu": functools.partial(flash, scale=scale), "default": functools.partial(plain, scale=scale)}
    # Tracing cuDNN's kernel asks for the library, so only where there is a GPU.
    if q.dtype != jnp.float32 and jax.default_backend() == "gpu":
        kernels["cuda"] = functools.partial(cudnn, scale=scale)
    return lax.platform_dependent(q, k, v, **kernels)


def plain(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """Plain XLA, a block of queries after the other: memory grows with the keys, not with their square."""
    length = q.shape[1]
    if length <= QUERY_BLOCK:
        return _plain_block(q, k, v, scale)
    blocks = -(-length // QUERY_BLOCK)
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERY_BLOCK - length), (0, 0), (0, 0)))
    stacked = jnp.moveaxis(padded.reshape(q.shape[0], blocks, QUERY_BLOCK, *q.shape[2:]), 1, 0)
    y = lax.map(lambda block: _plain_block(block, k, v, scale), stacked)
    return jnp.moveaxis(y, 0, 1).reshape(padded.shape)[:, :length]


def _plain_block(q: Array, k: Array, v: Array, scale: float) -> Array:
    precision = precision_for(q.dtype)
    scores = jnp.einsum("nshd,nkhd->nhsk", q, k, precision=precision, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * scale, axis=-1)
    y = jnp.einsum("nhsk,nkhd->nshd", weights, v.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return y.astype(q.dtype)


def cudnn(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """cuDNN's fused attention, which takes any length."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")


def flash(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """JAX's flash attention for TPU: whole blocks of positions, those that only fill up a block masked out.

    Padded keys belong to another segment than every query, so no query attends to them; padded queries are
    cut off.
    """
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    query_block, queries = _blocks(q.shape[1], TPU_QUERY_BLOCK)
    key_block, keys = _blocks(k.shape[1], TPU_KEY_BLOCK)
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


def _over_mesh(attend, mesh: jax.sharding.AbstractMesh, q: Array, k: Array, v: Array) -> Array:
    """`attend` on every device for its own batch, heads and queries: they need nothing of each other.

    XLA cannot split a kernel of its own accord, and would gather what goes in.
    """
    batch_axis, *head_axes = mesh.axis_names
    left: list[str] = []
    batch = batch_axis if q.shape[0] % mesh.shape[batch_axis] == 0 else left.append(batch_axis)
    heads = []
    for axis in head_axes:
        size = math.prod(mesh.shape[name] for name in (*heads, axis))
        (heads if q.shape[2] % size == 0 else left).append(axis)
    parts = math.prod(mesh.shape[axis] for axis in left)
    queries = PartitionSpec(batch, tuple(left) or None, tuple(heads) or None, None)
    keys = PartitionSpec(batch, None, tuple(heads) or None, None)
    padded = jnp.pad(q, ((0, 0), (0, -q.shape[1] % parts), (0, 0), (0, 0)))
    split = jax.shard_map(
        attend, mesh=mesh, in_specs=(queries, keys, keys), out_specs=queries, check_vma=False
    )
    return split(padded, k, v)[:, : q.shape[1]]
