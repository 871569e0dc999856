"""What the latents do to a norm's result, on a TPU in one pass by a Pallas kernel.

The factors and offsets that come of the latents are computed where they are used, in VMEM. XLA writes them
out first, in float32 and at the full width: two arrays of 0.14 GB for 8 x 768 x 176 x 256, which live while
the memory of a decoder peaks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.activation import Activation
from jax_kernels.common.columns import with_clear_padding
from jax_kernels.common.layout import frames_first, laid_for_kernels, pixels_first, precision_for
from jax_kernels.common.tiles import BLOCK_BYTES, DTYPES, LANES, fills_tiles, in_sublanes, pixel_bytes
from jax_kernels.spatial_norm.latents import match_frames_and_columns

UNROLLED = 4
"""Pixels of a step of the kernel's loop: the bundles that the compiler schedules for 15 tiles are 82, 121,
214 and 407 of 1, 2, 4 and 8 pixels."""


def takes(x: Float[Array, "N T H W C"], zq: Float[Array, "N t h w Z"]) -> bool:
    """Whether the kernel takes these activations under these latents: both float32 or bfloat16, whole tiles
    of channels, and no more pixels under one latent than a step can hold.
    """
    return fills_tiles(x) and zq.dtype in DTYPES and _cell_bytes(x, zq) <= BLOCK_BYTES


def _cell_bytes(x: Array, zq: Array) -> int:
    """What a step holds for one latent pixel: the latents, what comes of them, the activations under it, and
    their results."""
    videos, length, height, width, channels = x.shape
    pixels = (height // zq.shape[2]) * (width // zq.shape[3])
    of_latents = videos * in_sublanes(length, jnp.dtype(jnp.float32)) * (LANES + 2 * channels) * 4
    return of_latents + pixels * pixel_bytes(x, *[length] * 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def modulated(
    x: Float[Array, "N T H W C"],
    scale: Float[Array, "N C"],
    shift: Float[Array, "N C"],
    zq: Float[Array, "N T h w Z"],
    kernel: Float[Array, "Z 2*C"],
    silu: bool,
) -> Float[Array, "N T H W C"]:
    """`(x * scale + shift) * y + b`, then SiLU or not, where `y` and `b` are the halves of `zq @ kernel`, the
    same for all H / h x W / w pixels under a latent one.

    Args:
        x: activations that the kernel `takes`.
        scale, shift: of each video and channel, float32.
        zq: latents at the activations' frames.
        kernel: of `zq`'s dtype; a bias goes with a channel of ones.
        silu: whether SiLU follows.
    """
    videos, length, height, width, channels = x.shape
    rows, columns, latent = zq.shape[2:]
    tall, wide = height // rows, width // columns
    steps = -(-columns // max(1, BLOCK_BYTES // _cell_bytes(x, zq)))
    step = -(-columns // steps)
    # Whole float32 tiles: the product's result is frames again without moving any.
    frames = in_sublanes(length, jnp.dtype(jnp.float32))
    zq_HWNTZ = pixels_first(zq)
    zq_HWNTZ = jnp.pad(zq_HWNTZ.astype(jnp.float32), [(0, 0)] * 3 + [(0, frames - length), (0, 0)])
    cells = pixels_first(laid_for_kernels(x)).reshape(rows, tall, columns, wide, videos, length, channels)
    block = pl.BlockSpec(
        (None, tall, step, wide, videos, length, channels), lambda row, column: (row, 0, column, 0, 0, 0, 0)
    )
    latents = pl.BlockSpec((None, step, videos, frames, latent), lambda row, column: (row, column, 0, 0, 0))
    of_videos = pl.BlockSpec((videos, 1, channels), lambda row, column: (0, 0, 0))
    result = pl.pallas_call(
        functools.partial(_modulate, silu=silu),
        grid=(rows, steps),
        in_specs=[
            block,
            latents,
            of_videos,
            of_videos,
            pl.BlockSpec(kernel.shape, lambda row, column: (0, 0)),
        ],
        out_specs=block,
        # Said to be in HBM: XLA else brings small ones into VMEM and back.
        out_shape=pltpu.HBM(cells.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="modulated",
    )(cells, zq_HWNTZ, scale[:, None], shift[:, None], kernel)
    return frames_first(result.reshape(height, width, videos, length, channels))


def _modulate(x_ref, zq_ref, scale_ref, shift_ref, kernel_ref, result_ref, *, silu: bool) -> None:
    tall, step, wide, videos, length, channels = x_ref.shape
    frames, latent = zq_ref.shape[-2:]
    zq = zq_ref[...].reshape(-1, latent).astype(kernel_ref.dtype)
    both = jnp.dot(zq, kernel_ref[...], precision=precision_for(zq.dtype), preferred_element_type=jnp.float32)
    both = both.reshape(step, videos, frames, 2 * channels)[:, :, :length]
    y, b = both[..., :channels], both[..., channels:]
    scale, shift = scale_ref[...], shift_ref[...]

    def modulate_pixel(pixel: Array, carry: None) -> None:
        at = lax.div(pixel, wide), slice(None), lax.rem(pixel, wide)
        modulated = (x_ref[at].astype(jnp.float32) * scale + shift) * y + b
        result_ref[at] = (jax.nn.silu(modulated) if silu else modulated).astype(result_ref.dtype)

    lax.fori_loop(0, tall * wide, modulate_pixel, None, unroll=UNROLLED)


@modulated.defjvp
def _(silu: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
    tangent = jax.jvp(functools.partial(_plainly_modulated, silu), primals, tangents)[1]
    return modulated(*primals, silu), tangent


def _plainly_modulated(
    silu: bool, x_NTHWC: Array, scale_NC: Array, shift_NC: Array, zq: Array, kernel: Array
) -> Array:
    videos, length, height, width, channels = x_NTHWC.shape
    rows, columns = zq.shape[2:4]
    both = jnp.einsum(
        "nthwz,zc->nthwc", zq, kernel, precision=precision_for(zq.dtype), preferred_element_type=jnp.float32
    )
    y, b = jnp.split(both[:, :, :, None, :, None], 2, axis=-1)
    scale, shift = (part.reshape(videos, 1, 1, 1, 1, 1, channels) for part in (scale_NC, shift_NC))
    cells = x_NTHWC.reshape(videos, length, rows, height // rows, columns, width // columns, channels)
    result = (cells.astype(jnp.float32) * scale + shift) * y + b
    return (jax.nn.silu(result) if silu else result).astype(x_NTHWC.dtype).reshape(x_NTHWC.shape)


def by_kernel(
    activation: Activation | None,
    lone_first: bool,
    x: Array,
    scale_NC: Array,
    shift_NC: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
) -> Array:
    """`xla.by_rows` by the Pallas kernel."""
    kernel = jnp.concatenate([jnp.vstack(conv) for conv in (to_y, to_b)], axis=1)
    target = (*x.shape[:3], zq.shape[3], x.shape[4])
    zq = match_frames_and_columns(zq, target, lone_first=lone_first)
    ones = jnp.ones((*zq.shape[:-1], 1), zq.dtype)
    # Where latents only pad a width, so does the result: factors and offsets of zero clear it.
    # They are arguments of what has a rule for derivatives: that is traced where nobody says what is padding.
    zq = with_clear_padding(jnp.concatenate([zq, ones], axis=-1))
    dtype = jnp.promote_types(zq.dtype, kernel.dtype)
    zq, kernel = zq.astype(dtype), kernel.astype(dtype)
    return modulated(x, scale_NC, shift_NC, zq, kernel, activation == "silu")
