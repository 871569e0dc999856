"""Rotary positions, and scaled dot-product attention of any length, by each platform's own kernel.

Axis letters here: N batch, S and K positions of the queries and of the keys, H heads, D channels of a head.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_kernels.attention import tpu, xla
from jax_kernels.common.dispatch import Target, dispatch, jitted, with_derivatives_of
from jax_kernels.common.pointwise import check_choice, precision_for

Implementation = Literal["plain", "transposed", "cudnn"]


def attention(
    q: Float[Array, "N S H D"],
    k: Float[Array, "N K H D"],
    v: Float[Array, "N K H D"],
    *,
    scale: float | None = None,
    num_keys: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "N S H D"]:
    """Return `softmax(q k^T * scale) v` for each head: torch's `scaled_dot_product_attention` without a mask.

    On a mesh (`jax.sharding.use_abstract_mesh`) the first mesh axis splits the batch, and the other axes
    split the heads. An axis whose size does not divide its dimension splits the queries instead. Inside
    `jax.shard_map`, with `check_vma=False`, each device attends from its own queries to its own keys.

    Args:
        q, k, v: any float dtype, the same for all three.
        scale: factor of the scores before the softmax; None for 1 / sqrt(D), as in torch. The TPU's kernel
            computes powers of two, so it multiplies the scores by `scale` times log2(e). With ln 2 this
            product is 1, and the kernel leaves the multiplication out: pass ln 2 for queries that
            `qk_norm_rope` has multiplied by log2(e) / sqrt(D).
        num_keys: number of real keys, which come first; the keys after them are padding and may hold
            anything. None if all are real.
        implementation: "plain" is XLA's, a block of queries at a time; "transposed" is a Pallas kernel for
            TPUs, for float32 and bfloat16; "cudnn" is cuDNN's, for 16 bits and a multiple of 8 channels. None
            takes the fastest that supports `q` and `k` on the platform that the program is compiled for.

    Returns:
        The shape and dtype of `q`. Scores and softmax are float32 whatever the dtype.

    Raises:
        ValueError: shapes that do not fit each other, dtypes that differ, fewer keys than `num_keys`, or an
            unknown implementation.
    """
    _check_arguments(q, k, v, num_keys, implementation)
    return dispatch(
        attention_on,
        q,
        k,
        v,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        num_keys=k.shape[1] if num_keys is None else num_keys,
        implementation=implementation,
        platforms=("tpu", "cuda"),  # those with an implementation of their own
    )


def attention_transposed(
    q: Float[Array, "N H D S"],
    k: Float[Array, "N H D K"],
    v: Float[Array, "N H D K"],
    *,
    scale: float | None = None,
    num_keys: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "N H D S"]:
    """Compute `attention` of arrays with positions last, the order in which the TPU's kernel computes.

    The options and errors are those of `attention`.
    """
    # On a TPU `attention` transposes the arrays back for its kernel, and XLA drops all transpositions.
    return attention(
        *(x.transpose(0, 3, 1, 2) for x in (q, k, v)),
        scale=scale,
        num_keys=num_keys,
        implementation=implementation,
    ).transpose(0, 2, 3, 1)


@jitted()
def apply_rotary(
    x: Float[Array, "N S H D"], cos: Float[Array, "P D"], sin: Float[Array, "P D"]
) -> Float[Array, "N S H D"]:
    """Apply rotary positions (Su et al. 2021) to the last P of S positions; copy the positions before them.

    Neighbouring channels form a pair: (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        x: any float dtype, D even.
        cos, sin: float32, each angle twice, for both channels of its pair.

    Returns:
        The shape and dtype of `x`; the arithmetic is float32.

    Raises:
        ValueError: tables that do not fit `x`.
    """
    positions, channels = cos.shape
    if cos.shape != sin.shape or x.ndim != 4 or channels != x.shape[-1] or positions > x.shape[1]:
        raise ValueError(
            f"apply_rotary got x {x.shape}, cos {cos.shape}, sin {sin.shape}: it takes (N, S, H, D), (P, D)"
        )
    padding = ((x.shape[1] - positions, 0), (0, 0))  # positions without a rotation: cos is 1 and sin 0
    # (S, 1, D): the same for all heads.
    cos_SHD = jnp.pad(cos, padding, constant_values=1.0)[:, None]
    sin_SHD = jnp.pad(sin, padding)[:, None]
    # The product of `x` with this matrix, 2 x 2 blocks on the diagonal, has channels (-b, a) for each pair
    # (a, b), exactly. To swap a and b without a product, `x` would need an axis of two channels, which would
    # fill a TPU's lanes with padding.
    rotation_DD = jnp.asarray(np.kron(np.eye(channels // 2), [[0, 1], [-1, 0]]), x.dtype)
    partners = jnp.einsum("nshd,de->nshe", x, rotation_DD, precision=precision_for(x.dtype))
    return (x.astype(jnp.float32) * cos_SHD + partners.astype(jnp.float32) * sin_SHD).astype(x.dtype)


def _check_arguments(q: Array, k: Array, v: Array, num_keys: int | None, implementation: str | None) -> None:
    # Queries may have another number of positions (axis 1) than keys.
    fits = q.ndim == k.ndim == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or k.shape != v.shape:
        raise ValueError(
            f"attention got q {q.shape}, k {k.shape}, v {v.shape}: it takes (N, S, H, D), (N, K, H, D) twice"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention got q {q.dtype}, k {k.dtype}, v {v.dtype}: all of one dtype are wanted")
    if num_keys is not None and not 1 <= num_keys <= k.shape[1]:
        raise ValueError(
            f"attention got {k.shape[1]} keys, {num_keys} of them real: it takes 1 to all of them"
        )
    check_choice("implementation", implementation, None, *get_args(Implementation))


def attention_on(
    target: Target,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    num_keys: int,
    implementation: Implementation | None,
) -> Array:
    """Compute `attention` on `target`, split over the mesh if there is one; checks are done."""
    plain, transposed, cudnn = (
        functools.partial(form, scale=scale, num_keys=num_keys)
        for form in (xla.plain, tpu.transposed, xla.cudnn)
    )
    # JAX cannot differentiate the Pallas kernel of `transposed`, which gets the derivatives of `plain`.
    forms = {"plain": plain, "transposed": with_derivatives_of(plain, transposed), "cudnn": cudnn}
    attend = forms[implementation or _fastest(target, q, k)]
    mesh = jax.sharding.get_abstract_mesh()
    # Without a mesh, or inside a `jax.shard_map` over all of its axes, the arrays are one device's.
    is_local = mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names)
    return attend(q, k, v) if is_local else _over_mesh(attend, mesh, q, k, v)


def _fastest(target: Target, q: Array, k: Array) -> Implementation:
    if target.uses_pallas and tpu.is_supported(q, k):  # `uses_pallas` is true on a TPU only
        return "transposed"
    # `target.pallas` also says whether cuDNN's kernels may be used.
    return "cudnn" if target.platform == "cuda" and target.pallas and xla.cudnn_supports(q) else "plain"


def _over_mesh(
    attend: Callable[..., Array], mesh: jax.sharding.AbstractMesh, q: Array, k: Array, v: Array
) -> Array:
    """Run `attend(q, k, v)` on every device for its share of videos, heads and queries, with all keys.

    XLA cannot split a kernel, and would gather its inputs. The mesh's first axis splits the videos, and its
    other axes split the heads. An axis whose size does not divide the videos, or the heads, splits the
    queries instead, which are padded to equal shares.
    """
    videos, queries, heads, _ = q.shape
    first_axis, *other_axes = mesh.axis_names
    video_axis = first_axis if videos % mesh.shape[first_axis] == 0 else None
    query_axes = [] if video_axis else [first_axis]
    head_axes: list[str] = []
    for axis in other_axes:
        # The number of parts of the heads if this axis splits them, after the axes that do already.
        head_parts = math.prod(mesh.shape[name] for name in (*head_axes, axis))
        (head_axes if heads % head_parts == 0 else query_axes).append(axis)
    query_spec = PartitionSpec(video_axis, tuple(query_axes) or None, tuple(head_axes) or None, None)
    key_spec = PartitionSpec(video_axis, None, tuple(head_axes) or None, None)
    # Number of queries that are added for equal shares; their results are cut off.
    padding = -queries % math.prod(mesh.shape[axis] for axis in query_axes)
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(query_spec, key_spec, key_spec),
        out_specs=query_spec,
        check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
    )(jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))), k, v)[:, :queries]
