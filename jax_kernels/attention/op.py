"""Scaled dot-product attention for any sequence length, by each platform's own kernel.

Axis letters here: N batch, S and K positions of the queries and of the keys, H heads, D channels of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_kernels.attention import gpu, tpu, xla


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


def _check(q: Array, k: Array, v: Array) -> None:
    fits = q.ndim == k.ndim == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or k.shape != v.shape:
        raise ValueError(
            f"attention got q {q.shape}, k {k.shape}, v {v.shape}: it takes (N, S, H, D), (N, K, H, D) twice"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention got q {q.dtype}, k {k.dtype}, v {v.dtype}: all of one dtype are wanted")


def _attend(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    kernels = {
        "tpu": functools.partial(tpu.flash, scale=scale),
        "default": functools.partial(xla.plain, scale=scale),
    }
    # Tracing cuDNN's kernel asks for the library, so only where there is a GPU.
    if q.dtype != jnp.float32 and jax.default_backend() == "gpu":
        kernels["cuda"] = functools.partial(gpu.cudnn, scale=scale)
    return lax.platform_dependent(q, k, v, **kernels)


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
