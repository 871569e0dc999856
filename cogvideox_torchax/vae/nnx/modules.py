"""The VAE's layers and networks in Flax NNX, channels last, over `jax_kernels`.

- Every module has the attribute names of its diffusers counterpart. So a parameter's path is its diffusers
  name, except for the last word (`kernel` or `scale` for `weight`).
- A layer casts its parameters to the dtype of its input, and computes in it.
- Each layer, block and network runs one chunk of frames. A causal convolution returns its last input frames,
  its cache, and takes them again with the next chunk. A block's cache is a dict of its modules' caches by
  name. At the start of a video the cache is None.
- `zq`, as in diffusers, are the latents that modulate a spatial norm. Norms without latents get None.
- `first_frame_alone` says whether the first frame stays single where the number of frames is doubled. None
  stands for true if the number of frames is odd, else for false.
- `split` is the sharding of the width over devices.
- A level is the part of a network with one resolution. The next level has half of it in an encoder, and
  twice as much in a decoder.

Axis letters: N videos, T frames, H rows, W columns, C channels; t, h and w are the sizes of the latents; I
and O are the input and output channels of a kernel.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jax_kernels
from cogvideox_torchax.vae.chunks import first_frame_is_alone
from cogvideox_torchax.vae.columns import OnColumns
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from jax_kernels.common.pointwise import Activation

Cache = dict[str, Any]
"""The cache of a block or a network."""


@dataclass(frozen=True)
class LayerConfig:
    """The settings that the layers of one network share.

    `eps` is that of a residual block's GroupNorms; all other norms have diffusers' 1e-6. `latent_channels` is
    the number of channels of `zq`, or None for plain GroupNorms.
    """

    rngs: nnx.Rngs
    num_groups: int = 32
    eps: float = 1e-6
    latent_channels: int | None = None
    param_dtype: DTypeLike = jnp.float32


class Conv(OnColumns, nnx.Module):
    """The parameters of a convolution: `kernel` (*window, I, O) and `bias` (O,)."""

    def __init__(self, in_channels: int, out_channels: int, window: Sequence[int], config: LayerConfig):
        shape = (*window, in_channels, out_channels)
        initialize = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(initialize(config.rngs.params(), shape, config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), config.param_dtype))

    def cast(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Return the kernel and the bias in a dtype."""
        return self.kernel[...].astype(dtype), self.bias[...].astype(dtype)

    def matrix(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Return the kernel of a 1x1x1 convolution as a matrix (I, O), and the bias, in a dtype."""
        kernel, bias = self.cast(dtype)
        return kernel[0, 0, 0], bias


class Conv3d(Conv):
    """A 1x1x1 convolution, which needs no padding and no cache."""

    def __init__(self, in_channels: int, out_channels: int, config: LayerConfig):
        super().__init__(in_channels, out_channels, (1, 1, 1), config)

    def __call__(self, x_NTHWC: jax.Array) -> jax.Array:
        kernel, bias = self.cast(x_NTHWC.dtype)
        y_NTHWC, _no_cache = jax_kernels.conv3d(x_NTHWC, kernel, bias, split=self.split)
        return y_NTHWC


class CausalConv3d(OnColumns, nnx.Module):
    """A convolution that sees no later frame, and pads as diffusers' `pad_mode="first"` does."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, config: LayerConfig):
        self.conv = Conv(in_channels, out_channels, (kernel_size,) * 3, config)

    def __call__(
        self,
        x_NTHWC: jax.Array,
        cache: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Convolve, and add `residual`; return the result and the next cache.

        Without a cache, the first frame is repeated before the chunk. For a `kernel_size` of 1 the next cache
        is None.
        """
        return jax_kernels.conv3d(
            x_NTHWC,
            *self.conv.cast(x_NTHWC.dtype),  # kernel and bias
            cache,
            residual=residual,
            start="replicate",
            split=self.split,
        )


class GroupNorm(OnColumns, nnx.Module):
    """GroupNorm over the last axis with statistics in float32, and the activation after it."""

    def __init__(self, channels: int, config: LayerConfig, *, eps: float = 1e-6):
        self.scale = nnx.Param(jnp.ones((channels,), config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), config.param_dtype))
        self.num_groups = config.num_groups
        self.eps = eps

    def __call__(self, x_NTHWC: jax.Array, *, activation: Activation | None = None) -> jax.Array:
        return jax_kernels.group_norm(
            x_NTHWC,
            self.scale[...],
            self.bias[...],
            num_groups=self.num_groups,
            eps=self.eps,
            channel_axis=-1,
            activation=activation,
            split=self.split,
        )


class SpatialNorm3D(OnColumns, nnx.Module):
    """GroupNorm modulated by the latents, `norm(x) * conv_y(zq) + conv_b(zq)`."""

    def __init__(self, channels: int, latent_channels: int, config: LayerConfig):
        self.norm_layer = GroupNorm(channels, config)
        self.conv_y = CausalConv3d(latent_channels, channels, 1, config)
        self.conv_b = CausalConv3d(latent_channels, channels, 1, config)

    def __call__(
        self, x_NTHWC: jax.Array, zq_NthwC: jax.Array, *, activation: Activation | None = None
    ) -> jax.Array:
        norm = self.norm_layer
        # `matrix` returns (kernel, bias). `conv_y` gives the factors of the norm, `conv_b` its addends.
        return jax_kernels.spatial_norm(
            x_NTHWC,
            zq_NthwC,
            norm.scale[...],
            norm.bias[...],
            *self.conv_y.conv.matrix(x_NTHWC.dtype),
            *self.conv_b.conv.matrix(x_NTHWC.dtype),
            num_groups=norm.num_groups,
            eps=norm.eps,
            activation=activation,
            first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
            split=self.split,
        )


def normed_conv(
    norm: Any,
    causal: Any,
    x_NTHWC: jax.Array,
    zq_NthwC: jax.Array | None,
    cache: jax.Array | None,
    moments: jax_kernels.ColumnMoments | None = None,
    *,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax_kernels.ColumnMoments | None]:
    """Compute conv(silu(norm(x))) + residual, by one call of `jax_kernels.norm_conv3d`.

    A layer of another class, such as one that records its output (`RecordedLayers`), is called by itself.

    Returns:
        The result, the next cache, and the moments of the result's columns, or None if the kernel gives none.
        Passed as `moments` with the result to the next call, they spare it another pass over its input.
    """
    if type(norm) not in (GroupNorm, SpatialNorm3D) or type(causal) is not CausalConv3d:
        inputs = (x_NTHWC,) if zq_NthwC is None else (x_NTHWC, zq_NthwC)  # of the norm
        return *causal(norm(*inputs, activation="silu"), cache, residual=residual), None
    dtype = x_NTHWC.dtype
    group_norm = norm  # the GroupNorm by itself, or, below, the one in a spatial norm
    # For a spatial norm: the latents, then the matrix (I, O) and the bias of their convolution to the norm's
    # factors (y), then of that to its addends (b).
    modulation: tuple[Any, ...] = ()
    if isinstance(norm, SpatialNorm3D):
        group_norm = norm.norm_layer
        modulation = (zq_NthwC, *norm.conv_y.conv.matrix(dtype), *norm.conv_b.conv.matrix(dtype))
    return jax_kernels.norm_conv3d(
        x_NTHWC,
        jax_kernels.NormParams(group_norm.scale[...], group_norm.bias[...], *modulation),
        *causal.conv.cast(dtype),  # kernel and bias
        cache,
        moments,
        num_groups=group_norm.num_groups,
        eps=group_norm.eps,
        first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
        residual=residual,
        split=causal.split,
    )


class ResnetBlock3D(nnx.Module):
    """A residual block, in which a norm, SiLU and a convolution run twice, beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, config: LayerConfig):
        def norm(channels: int) -> GroupNorm | SpatialNorm3D:
            if config.latent_channels is None:
                return GroupNorm(channels, config, eps=config.eps)
            return SpatialNorm3D(channels, config.latent_channels, config)

        self.norm1 = norm(in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels, 3, config)
        self.norm2 = norm(out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels, 3, config)
        self.conv_shortcut = (
            Conv3d(in_channels, out_channels, config) if in_channels != out_channels else None
        )

    def __call__(
        self, x_NTHWC: jax.Array, zq_NthwC: jax.Array | None = None, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache]:
        old_cache = cache or {}
        new_cache: Cache = {}
        shortcut = x_NTHWC if self.conv_shortcut is None else self.conv_shortcut(x_NTHWC)
        # The first convolution's kernel also returns the moments of its result, which the second norm needs.
        y_NTHWC, new_cache["conv1"], column_moments = normed_conv(
            self.norm1, self.conv1, x_NTHWC, zq_NthwC, old_cache.get("conv1")
        )
        y_NTHWC, new_cache["conv2"], _column_moments = normed_conv(
            self.norm2,
            self.conv2,
            y_NTHWC,
            zq_NthwC,
            old_cache.get("conv2"),
            column_moments,
            residual=shortcut,
        )
        return y_NTHWC, new_cache


class Downsample3D(OnColumns, nnx.Module):
    """A layer that halves height, width and, with `compress_time`, the number of frames."""

    def __init__(self, channels: int, config: LayerConfig, *, compress_time: bool):
        self.conv = Conv(channels, channels, (3, 3), config)
        self.compress_time = compress_time

    def __call__(self, x_NTHWC: jax.Array) -> jax.Array:
        return jax_kernels.downsample(
            x_NTHWC,
            *self.conv.cast(x_NTHWC.dtype),  # kernel and bias
            compress_time=self.compress_time,
            first_frame_alone=first_frame_is_alone(x_NTHWC.shape[1]),
            split=self.split,
        )


class Upsample3D(OnColumns, nnx.Module):
    """A layer that doubles height, width and, with `expand_time`, the number of frames; then it convolves."""

    def __init__(self, channels: int, config: LayerConfig, *, expand_time: bool):
        self.conv = Conv(channels, channels, (3, 3), config)
        self.expand_time = expand_time

    def __call__(self, x_NTHWC: jax.Array, *, first_frame_alone: bool | None = None) -> jax.Array:
        if first_frame_alone is None:
            first_frame_alone = first_frame_is_alone(x_NTHWC.shape[1])
        return jax_kernels.upsample(
            x_NTHWC,
            *self.conv.cast(x_NTHWC.dtype),  # kernel and bias
            expand_time=self.expand_time,
            first_frame_alone=first_frame_alone,
            split=self.split,
        )


class Block3D(nnx.Module):
    """Several residual blocks, which a downsampler or an upsampler may follow; a mid block has neither.

    If `rematerialize` is set, the forward pass does not keep the activations inside of a residual block, and
    a backward pass computes them again.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        config: LayerConfig,
        *,
        num_layers: int,
        downsampler: Downsample3D | None = None,
        upsampler: Upsample3D | None = None,
    ):
        self.resnets = nnx.List(
            ResnetBlock3D(in_channels if i == 0 else out_channels, out_channels, config)
            for i in range(num_layers)
        )
        # Lists of one or no module, because diffusers has such lists in its parameter names.
        self.downsamplers = nnx.List([] if downsampler is None else [downsampler])
        self.upsamplers = nnx.List([] if upsampler is None else [upsampler])
        self.rematerialize = False

    def __call__(
        self,
        x_NTHWC: jax.Array,
        zq_NthwC: jax.Array | None = None,
        cache: Cache | None = None,
        *,
        first_frame_alone: bool | None = None,
    ) -> tuple[jax.Array, Cache]:
        old_cache = cache or {}
        new_cache: Cache = {}
        for i, resnet in enumerate(self.resnets):
            name = f"resnet_{i}"
            run_resnet = _rematerialized(resnet) if self.rematerialize else resnet
            x_NTHWC, new_cache[name] = run_resnet(x_NTHWC, zq_NthwC, old_cache.get(name))
        for downsampler in self.downsamplers:
            x_NTHWC = downsampler(x_NTHWC)
        for upsampler in self.upsamplers:
            x_NTHWC = upsampler(x_NTHWC, first_frame_alone=first_frame_alone)
        return x_NTHWC, new_cache


def _rematerialized(module: nnx.Module) -> Callable[..., Any]:
    """Return a function that calls a module, and whose backward pass recomputes the module's activations."""
    # `nnx.remat` takes a function that has the module as an argument, not in its closure.
    return functools.partial(nnx.remat(type(module).__call__), module)


class Encoder3D(nnx.Module):
    """The network from frames (N, T, H, W, C) to means and log-variances of latents (N, t, h, w, 2 * C)."""

    def __init__(self, config: FlaxAutoencoderKLCogVideoXConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        level_channels = config.block_out_channels  # a level's input has the channels of the level before
        layers = LayerConfig(
            rngs, num_groups=config.norm_num_groups, eps=config.norm_eps, param_dtype=param_dtype
        )
        self.conv_in = CausalConv3d(config.in_channels, level_channels[0], 3, layers)
        # Every level but the last halves height and width, and the first ones also the number of frames.
        self.down_blocks = nnx.List(
            Block3D(
                level_channels[max(i - 1, 0)],
                channels,
                layers,
                num_layers=config.layers_per_block,
                downsampler=Downsample3D(channels, layers, compress_time=i < config.time_doublings)
                if i < len(level_channels) - 1
                else None,
            )
            for i, channels in enumerate(level_channels)
        )
        # A mid block always has two layers, as in diffusers.
        self.mid_block = Block3D(level_channels[-1], level_channels[-1], layers, num_layers=2)
        self.norm_out = GroupNorm(level_channels[-1], layers)
        # For each channel of the latents a mean and a log-variance.
        self.conv_out = CausalConv3d(level_channels[-1], 2 * config.latent_channels, 3, layers)

    def __call__(self, x_NTHWC: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
        old_cache = cache or {}
        new_cache: Cache = {}
        x_NTHWC, new_cache["conv_in"] = self.conv_in(x_NTHWC, old_cache.get("conv_in"))
        blocks = {f"down_block_{i}": block for i, block in enumerate(self.down_blocks)}
        for name, block in {**blocks, "mid_block": self.mid_block}.items():
            # None in place of latents, which only a decoder's norms take.
            x_NTHWC, new_cache[name] = block(x_NTHWC, None, old_cache.get(name))
        # The norm and SiLU are two calls, as in diffusers, so that the output of `norm_out` can be recorded
        # without the activation.
        x_NTHWC = jax_kernels.silu(self.norm_out(x_NTHWC), time_axis=1)
        x_NTHWC, new_cache["conv_out"] = self.conv_out(x_NTHWC, old_cache.get("conv_out"))
        return x_NTHWC, new_cache


class Decoder3D(nnx.Module):
    """The network from latents (N, t, h, w, C) to frames (N, T, H, W, C)."""

    def __init__(self, config: FlaxAutoencoderKLCogVideoXConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        level_channels = config.block_out_channels[::-1]  # the config has them in the encoder's order
        latents = config.latent_channels
        # The config's `norm_eps` is left out, because diffusers' spatial norms do not take it.
        layers = LayerConfig(
            rngs, num_groups=config.norm_num_groups, latent_channels=latents, param_dtype=param_dtype
        )
        self.conv_in = CausalConv3d(latents, level_channels[0], 3, layers)
        self.mid_block = Block3D(level_channels[0], level_channels[0], layers, num_layers=2)
        # Every level but the last doubles height and width, and the first ones also the number of frames.
        self.up_blocks = nnx.List(
            Block3D(
                level_channels[max(i - 1, 0)],  # of the level before; before the first level is `mid_block`
                channels,
                layers,
                num_layers=config.layers_per_block + 1,  # one more than the encoder's, as in diffusers
                upsampler=Upsample3D(channels, layers, expand_time=i < config.time_doublings)
                if i < len(level_channels) - 1
                else None,
            )
            for i, channels in enumerate(level_channels)
        )
        self.norm_out = SpatialNorm3D(level_channels[-1], latents, layers)
        self.conv_out = CausalConv3d(level_channels[-1], config.out_channels, 3, layers)

    def __call__(
        self, z_NthwC: jax.Array, cache: Cache | None = None, *, first_frame_alone: bool | None = None
    ) -> tuple[jax.Array, Cache]:
        old_cache = cache or {}
        new_cache: Cache = {}
        x_NTHWC, new_cache["conv_in"] = self.conv_in(z_NthwC, old_cache.get("conv_in"))
        blocks = {f"up_block_{i}": block for i, block in enumerate(self.up_blocks)}
        for name, block in {"mid_block": self.mid_block, **blocks}.items():
            x_NTHWC, new_cache[name] = block(
                x_NTHWC, z_NthwC, old_cache.get(name), first_frame_alone=first_frame_alone
            )
        x_NTHWC, new_cache["conv_out"], _column_moments = normed_conv(
            self.norm_out, self.conv_out, x_NTHWC, z_NthwC, old_cache.get("conv_out")
        )
        return x_NTHWC, new_cache
