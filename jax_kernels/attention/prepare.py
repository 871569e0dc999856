"""Queries, keys and values as attention takes them: by heads, normalized, turned to positions, tokens last.

Axis letters here: N batch, S positions, C channels of all heads, H heads, D channels of a head.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.tiles import DTYPES, LANES

TOKENS, CHANNELS = 512, 768
"""Of a block of the TPU's kernel, at most."""


@functools.partial(jax.jit, static_argnames=("heads", "factor", "eps", "implementation"))
def prepare(
    x: Float[Array, "N S C"],
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    cos: Float[Array, "D S"] | None = None,
    sin: Float[Array, "D S"] | None = None,
    *,
    heads: int,
    factor: float = 1.0,
    eps: float = 1e-6,
    implementation: Literal["plain", "transposed"] | None = None,
) -> Float[Array, "N H D S"]:
    """LayerNorm of each head's channels, and rotary positions (Su et al. 2021), in one pass.

    Neighbouring channels are a pair: (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        x: any float dtype.
        weight, bias: of the norm, whose two go together; None for no norm.
        cos, sin: float32, each angle once for either channel of its pair; None for no positions.
        heads: into which the channels are cut; D is even where there are positions.
        factor: of the result, such as attention's scale.
        eps: added to the variance.
        implementation: "plain" is XLA's, which it can split over a mesh; "transposed" a Pallas kernel for TPUs.
            None takes the kernel on a TPU, for whole tiles of channels.

    Returns:
        The dtype of `x`; all arithmetic is float32, and rounded once.

    Raises:
        ValueError: channels that the heads do not divide, tables of another length.
    """
    tokens, channels = x.shape[1:]
    fits = channels % heads == 0 and (cos is None or cos.shape == (channels // heads, tokens))
    if not fits:
        raise ValueError(
            f"prepare got x {x.shape} for {heads} heads, cos {None if cos is None else cos.shape}: it takes "
            "(N, S, H * D), (D, S)"
        )
    given = {"weight": weight, "bias": bias, "cos": cos, "sin": sin}
    vectors = {name: value for name, value in given.items() if value is not None}
    return _prepare((heads, factor, eps), implementation, x, vectors)


Settings = tuple[int, float, float]
"""Heads, factor and eps."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _prepare(settings: Settings, implementation: str | None, x: Array, vectors: dict[str, Array]) -> Array:
    plain, kernel = functools.partial(_plain, settings), functools.partial(_transposed, settings)
    if implementation is not None:
        return {"plain": plain, "transposed": kernel}[implementation](x, vectors)
    if x.dtype not in DTYPES or _block_channels(x.shape[-1], settings[0]) is None:
        return plain(x, vectors)
    return lax.platform_dependent(x, vectors, tpu=kernel, default=plain)


@_prepare.defjvp
def _prepare_jvp(settings: Settings, _: str | None, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(_plain, settings), primals, tangents)


def _plain(settings: Settings, x: Array, vectors: dict[str, Array]) -> Array:
    heads, factor, eps = settings
    y = x.transpose(0, 2, 1).reshape(x.shape[0], heads, -1, x.shape[1])
    if not vectors and factor == 1:
        return y
    in_columns = {name: v[:, None] if v.ndim == 1 else v for name, v in vectors.items()}
    turn = functools.partial(jnp.roll, axis=-2)
    return _arithmetic(y.astype(jnp.float32), in_columns, factor, eps, turn).astype(x.dtype)


def _arithmetic(y: Array, vectors: dict[str, Array], factor: float, eps: float, roll) -> Array:
    """What is done to (..., D, S) in float32, with a way to roll D."""
    if "weight" in vectors:
        y = y - y.mean(-2, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-2, keepdims=True) + eps)
        y = y * vectors["weight"].astype(jnp.float32) + vectors["bias"].astype(jnp.float32)
    if "cos" in vectors:
        first = lax.broadcasted_iota(jnp.int32, y.shape, y.ndim - 2) % 2 == 0
        # The ends that are rolled around are of pairs that lie apart: none takes them.
        turned = jnp.where(first, -roll(y, -1), roll(y, 1))
        y = y * vectors["cos"] + turned * vectors["sin"]
    return y * factor if factor != 1 else y


def _block_channels(channels: int, heads: int) -> int | None:
    """Channels of a block: whole heads in whole tiles of lanes; None where there are no such."""
    unit = math.lcm(channels // heads, LANES)
    sizes = [size for size in range(unit, max(unit, CHANNELS) + 1, unit) if channels % size == 0]
    return sizes[-1] if sizes and channels // heads % 8 == 0 else None


def _transposed(settings: Settings, x: Float[Array, "N S C"], vectors: dict[str, Array]) -> Array:
    """`prepare` by a Pallas kernel: while a block is transposed, what is done to it costs nothing."""
    heads, factor, eps = settings
    videos, length, channels = x.shape
    head = channels // heads
    block = _block_channels(channels, heads)
    assert block is not None
    tokens = min(TOKENS, -(-length // LANES) * LANES)
    names = list(vectors)

    def kernel(x_ref, *refs):
        *in_refs, out_ref = refs
        for start in range(0, block, math.lcm(head, LANES)):
            size = min(math.lcm(head, LANES), block - start)
            y = x_ref[:, start : start + size].astype(jnp.float32).T.reshape(size // head, head, tokens)
            found = {name: ref[...] for name, ref in zip(names, in_refs, strict=True)}
            y = _arithmetic(y, found, factor, eps, _roll)
            out_ref[start // head : (start + size) // head] = y.astype(out_ref.dtype)

    specs = [
        pl.BlockSpec((head, 1), lambda n, i, c: (0, 0))
        if vectors[name].ndim == 1
        else pl.BlockSpec((head, tokens), lambda n, i, c: (0, i))
        for name in names
    ]
    columns = [vectors[name][:, None] if vectors[name].ndim == 1 else vectors[name] for name in names]
    return pl.pallas_call(
        kernel,
        grid=(videos, pl.cdiv(length, tokens), channels // block),
        in_specs=[pl.BlockSpec((None, tokens, block), lambda n, i, c: (n, i, c)), *specs],
        out_specs=pl.BlockSpec((None, block // head, head, tokens), lambda n, i, c: (n, c, 0, i)),
        out_shape=jax.ShapeDtypeStruct((videos, heads, head, length), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        name="prepare",
    )(x, *columns)


def _roll(y: Array, shift: int) -> Array:
    """The channels of all heads as one axis, rolled."""
    channels = math.prod(y.shape[:-1])
    return pltpu.roll(y.reshape(channels, -1), shift % channels, 0).reshape(y.shape)
