"""The VAE's blocks as functions of JAX arrays, which the modules of both builds call.

- The first argument, `params`, has a module's parameters by diffusers' names relative to the module, such as
  `conv1.conv.weight`. A kernel is (*window, I, O). A convolution's parameters are cast to the dtype of `x`,
  which the result has too. A norm computes its statistics in float32.
- Each function takes one chunk of frames. A causal convolution's cache is its last input frames, which the
  next chunk takes. A block's cache has its convolutions' caches by name. At the start of a video it is None.
- `zq`, as in diffusers, are the latents that modulate a spatial norm. A chunk of an odd number of frames
  begins with a frame that has a latent frame to itself (`chunks.first_frame_is_alone`).
- *Moments* are the mean and the sum of squared deviations of each column of pixels (along H). A convolution
  returns those of its result, which spare the next norm a pass over its input.
- `split` is the sharding of the width over devices. Padding columns are zero, in arguments and in results.

Everything but numbers and strings is an array, None, or a tree of them, so `runtime.torch_view` makes
functions of tensors of these.

Axis letters: N videos, T frames, H rows, W columns, C channels; t, h and w are the sizes of the latents; I
and O are the input and output channels of a kernel.
"""

from collections.abc import Mapping
from typing import Any

import jax

import jax_kernels
from cogvideox_torchax.vae.chunks import first_frame_is_alone
from jax_kernels import ColumnMoments, NormParams
from jax_kernels.common.columns import WHOLE, Split

Params = Mapping[str, Any]
"""A module's parameters, by diffusers' names relative to the module."""

Cache = dict[str, Any]
"""The cache of a block or a network: the caches of its parts, by name."""


def part(params: Params, name: str) -> dict[str, Any]:
    """Return the parameters of the submodule `name`, by their names relative to it."""
    prefix = f"{name}."
    return {full.removeprefix(prefix): array for full, array in params.items() if full.startswith(prefix)}


def _kernel_and_bias(conv: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    bias = conv.get("bias")  # a convolution of a LoRA has none
    return conv["weight"].astype(x.dtype), None if bias is None else bias.astype(x.dtype)


def _norm_params(norm: Params, x: jax.Array, zq_NthwC: jax.Array | None) -> NormParams:
    if zq_NthwC is None:
        return NormParams(norm["weight"], norm["bias"])
    (kernel_y, bias_y), (kernel_b, bias_b) = (
        _kernel_and_bias(part(norm, conv), x) for conv in ("conv_y.conv", "conv_b.conv")
    )
    # `conv_y` gives the norm's factors, `conv_b` its addends. Their kernels of 1x1x1 become matrices (I, O).
    convolutions = kernel_y[0, 0, 0], bias_y, kernel_b[0, 0, 0], bias_b
    return NormParams(norm["norm_layer.weight"], norm["norm_layer.bias"], zq_NthwC, *convolutions)


def pointwise_conv(params: Params, x_NTHWC: jax.Array, *, split: Split = WHOLE) -> jax.Array:
    """Return a convolution of 1x1x1, which needs no cache; `params` are `weight` and `bias`."""
    y_NTHWC, _no_cache = jax_kernels.conv3d(x_NTHWC, *_kernel_and_bias(params, x_NTHWC), split=split)
    return y_NTHWC


def causal_conv(
    params: Params,
    x_NTHWC: jax.Array,
    cache: jax.Array | None = None,
    *,
    split: Split = WHOLE,
) -> tuple[jax.Array, jax.Array | None]:
    """Convolve without later frames, and pad as diffusers' `pad_mode="first"` does.

    `params` are `conv.weight` and `conv.bias`. Without a cache, the first frame is repeated before the chunk.

    Returns:
        The result (N, T, H, W, O), and the next cache (N, kt - 1, H, W, I), or None if the kernel has one tap
        of time (kt = 1).
    """
    kernel, bias = _kernel_and_bias(part(params, "conv"), x_NTHWC)
    # Unlike diffusers' `pad_mode` of this name, `start` repeats no rows and columns: beyond the frame are
    # zeros.
    return jax_kernels.conv3d(x_NTHWC, kernel, bias, cache, split=split)


def spatial_norm(
    params: Params,
    x_NTHWC: jax.Array,
    zq_NthwC: jax.Array,
    *,
    num_groups: int,
    eps: float,
    split: Split = WHOLE,
) -> jax.Array:
    """Return GroupNorm modulated by the latents, `norm_layer(x) * conv_y(zq) + conv_b(zq)`.

    `params` are those of `norm_layer`, `conv_y.conv` and `conv_b.conv`.
    """
    weight, bias, zq_NthwC, *convolutions = _norm_params(params, x_NTHWC, zq_NthwC)
    return jax_kernels.spatial_norm(
        x_NTHWC,
        zq_NthwC,
        weight,
        bias,
        *convolutions,
        num_groups=num_groups,
        eps=eps,
        first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
        split=split,
    )


def normed_conv(
    norm: Params,
    conv: Params,
    x_NTHWC: jax.Array,
    zq_NthwC: jax.Array | None = None,
    cache: jax.Array | None = None,
    moments: ColumnMoments | None = None,
    residual: jax.Array | None = None,
    *,
    num_groups: int,
    eps: float,
    split: Split = WHOLE,
    in_place: bool = True,
) -> tuple[jax.Array, jax.Array | None, ColumnMoments | None]:
    """Return `conv(silu(norm(x))) + residual`, by one kernel on a TPU.

    Args:
        norm: `weight` and `bias` of a GroupNorm or, with latents, the parameters of a `spatial_norm`.
        conv: the parameters of a `causal_conv`.
        x_NTHWC: frames.
        zq_NthwC: the latents of a spatial norm; None for a GroupNorm.
        cache: the second result for the chunk before.
        moments: those of `x`, if the function that computed `x` returned them.
        residual: (N, T, H, W, O), added to the convolution's sums before they are rounded.
        num_groups: number of groups of channels that are normed together.
        eps: added to the variance.
        split: the sharding of the width.
        in_place: whether a TPU writes the next cache into the memory of `cache`, which has to be donated.

    Returns:
        The result (N, T, H, W, O), the next cache, and the moments of the result, or None if no kernel has
        computed them.
    """
    return jax_kernels.norm_conv3d(
        x_NTHWC,
        _norm_params(norm, x_NTHWC, zq_NthwC),
        *_kernel_and_bias(part(conv, "conv"), x_NTHWC),
        cache,
        moments,
        num_groups=num_groups,
        eps=eps,
        first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
        residual=residual,
        split=split,
        in_place=in_place,
    )


def residual_block(
    params: Params,
    x_NTHWC: jax.Array,
    zq_NthwC: jax.Array | None = None,
    cache: Cache | None = None,
    *,
    num_groups: int,
    eps: float,
    split: Split = WHOLE,
    in_place: bool = True,
) -> tuple[jax.Array, Cache]:
    """Run norm, SiLU and convolution twice beside a shortcut; return the result and the next cache.

    `params` are those of `norm1`, `conv1`, `norm2` and `conv2`, and, where the number of channels changes, of
    `conv_shortcut`, a convolution of 1x1x1. With latents `zq` the norms are spatial norms. `in_place` is that
    of `normed_conv`.
    """
    cache = cache or {}
    options: dict[str, Any] = {"num_groups": num_groups, "eps": eps, "split": split, "in_place": in_place}
    norm1, conv1, norm2, conv2, shortcut = (
        part(params, name) for name in ("norm1", "conv1", "norm2", "conv2", "conv_shortcut")
    )
    residual = pointwise_conv(shortcut, x_NTHWC, split=split) if shortcut else x_NTHWC
    # The first convolution also returns the moments of its result, which the second norm needs.
    y_NTHWC, cache1, moments = normed_conv(norm1, conv1, x_NTHWC, zq_NthwC, cache.get("conv1"), **options)
    y_NTHWC, cache2, _moments = normed_conv(
        norm2, conv2, y_NTHWC, zq_NthwC, cache.get("conv2"), moments, residual, **options
    )
    return y_NTHWC, {"conv1": cache1, "conv2": cache2}


def downsample(params: Params, x_NTHWC: jax.Array, *, compress_time: bool, split: Split = WHOLE) -> jax.Array:
    """Halve height, width and, with `compress_time`, the number of frames.

    `params` are `conv.weight` (kh, kw, I, O) and `conv.bias`. A first frame that is alone stays.
    """
    return jax_kernels.downsample(
        x_NTHWC,
        *_kernel_and_bias(part(params, "conv"), x_NTHWC),
        compress_time=compress_time,
        first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
        split=split,
    )


def upsample(params: Params, x_NTHWC: jax.Array, *, expand_time: bool, split: Split = WHOLE) -> jax.Array:
    """Double height, width and, with `expand_time`, the number of frames; then convolve each frame.

    `params` are `conv.weight` (kh, kw, I, O) and `conv.bias`. A first frame that is alone stays single.
    """
    return jax_kernels.upsample(
        x_NTHWC,
        *_kernel_and_bias(part(params, "conv"), x_NTHWC),
        expand_time=expand_time,
        first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
        split=split,
    )
