"""Attention as XLA compiles it: on any platform, and by cuDNN on a GPU.

Queries, and the result, are (N, S, H, D), and keys and values (N, K, H, D): N batch, S and K positions, H
heads, D channels of a head.
"""

import jax
import jax.numpy as jnp

from jax_kernels.common.pointwise import precision_for

QUERY_BLOCK = 1024
"""Queries whose scores the plain form holds at a time."""


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, num_keys: int | None = None
) -> jax.Array:
    """Compute attention in XLA, a block of queries at a time: memory holds only one block's scores.

    Keys from `num_keys` on are padding and are left out; None if all keys are real.
    """
    k, v = k[:, :num_keys], v[:, :num_keys]
    length = q.shape[1]
    if length <= QUERY_BLOCK:
        return _plain_block(q, k, v, scale)
    blocks = -(-length // QUERY_BLOCK)  # rounded up
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERY_BLOCK - length), (0, 0), (0, 0)))
    # `map` goes over the first axis: the blocks.
    stacked = jnp.moveaxis(padded.reshape(q.shape[0], blocks, QUERY_BLOCK, *q.shape[2:]), 1, 0)
    y = jnp.moveaxis(jax.lax.map(lambda block: _plain_block(block, k, v, scale), stacked), 0, 1)
    return y.reshape(padded.shape)[:, :length]


def _plain_block(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    scores = jnp.einsum(
        "nshd,nkhd->nhsk", q, k, precision=precision_for(q.dtype), preferred_element_type=jnp.float32
    )
    # Weights stay float32, as do the values that they multiply: only the result is rounded.
    weights = jax.nn.softmax(scores * scale, axis=-1)
    return jnp.einsum(
        "nhsk,nkhd->nshd", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    ).astype(q.dtype)


def cudnn_supports(q: jax.Array) -> bool:
    """Return whether cuDNN's attention supports these queries on JAX's GPU, or the one that is planned for.

    It supports float16 and bfloat16, NVIDIA's GPUs from Ampere on, and heads of a multiple of 8 channels, up
    to 128, or from Hopper on up to 256. A machine without a GPU cannot lower cuDNN's kernel, whose tracing
    queries the GPU, except for a mesh of a simulated one, whose name ends with "compute capability 9.0".
    """
    channels = q.shape[-1]
    # Older JAX has no `abstract_device`.
    planned = str(getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None))
    _, is_planned, capability = planned.partition("compute capability ")
    on_gpu = is_planned or jax.default_backend() == "gpu"
    if not on_gpu or q.dtype not in (jnp.float16, jnp.bfloat16) or channels % 8:
        return False
    # "8.0" of Ampere, "9.0" of Hopper, "gfx942" of an AMD GPU.
    generation, *_ = (capability or getattr(jax.local_devices()[0], "compute_capability", "")).split(".")
    if not generation.isdigit() or int(generation) < 8:
        return False
    return channels <= (256 if int(generation) >= 9 else 128)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, num_keys: int) -> jax.Array:
    """Compute attention by cuDNN's kernel, over the first `num_keys` keys; later keys are padding."""
    length = q.shape[1]
    # cuDNN's kernel for gradients takes only even lengths. So an odd number of queries, or of keys, gets one
    # more.
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
        for x in (q, k[:, :num_keys], v[:, :num_keys])
    )
    # (N,): the number of real keys in each video; None if no key was added above.
    real_keys = None if k.shape[1] == num_keys else jnp.full(k.shape[:1], num_keys, jnp.int32)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, key_value_seq_lengths=real_keys, implementation="cudnn"
    )[:, :length]
