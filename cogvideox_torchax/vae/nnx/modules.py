"""The VAE's modules in Flax NNX, which hold parameters and call `vae.blocks`.

- Every module has the attribute names of its diffusers counterpart. So a parameter's path is its diffusers
  name, except for the last word (`kernel` or `scale` for `weight`).
- A module that is called, a *layer*, runs one chunk of frames: (frames, cache, context) -> (result, next
  cache). `blocks` explains caches. A block or a network has the caches of its layers by their names. The
  cache is None at the start of a video, and for a layer that has none.
- A level is the part of a network with one resolution. The next level has half of it in an encoder, and
  twice as much in a decoder.

Axis letters: N videos, T frames, H rows, W columns, C channels; t, h and w are the sizes of the latents.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jax_kernels
from cogvideox_torchax.vae import blocks
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.weights import diffusers_name
from jax_kernels.common.columns import Split

EPS = 1e-6
"""Added to the variance by diffusers' norms, unless the config says another number."""


@dataclass(frozen=True)
class LayerConfig:
    """The settings that the layers of one network share.

    `eps` is that of the residual blocks' norms. `latent_channels` is the number of channels of the latents
    that modulate the norms, or None for plain GroupNorms.
    """

    rngs: nnx.Rngs
    num_groups: int = 32
    eps: float = EPS
    latent_channels: Any = None
    param_dtype: DTypeLike = jnp.float32


class Context(NamedTuple):
    """What the layers of a network share while it runs a chunk.

    Attributes:
        outputs: the results of the layers by diffusers' names, to which each layer's is added.
        split: the sharding of the width over devices.
        zq: the latents that modulate spatial norms; None in an encoder.
        path: the name of the module that runs, with a dot behind it; empty for the network of a direction.
    """

    outputs: dict[str, jax.Array]
    split: Split
    zq: jax.Array | None = None
    path: str = ""


Layer = Callable[[jax.Array, Any, Context], tuple[jax.Array, Any]]
"""A module, or a function, (frames NTHWC, cache, context) -> (result, next cache)."""


def run_layers(
    layers: Mapping[str, Layer], x_NTHWC: jax.Array, cache: blocks.Cache | None, context: Context
) -> tuple[jax.Array, blocks.Cache]:
    """Run layers one after the other; return the last one's result, and the next caches by name."""
    old_cache = cache or {}
    new_cache: blocks.Cache = {}
    for name, layer in layers.items():
        path = context.path + name
        x_NTHWC, new_cache[name] = layer(x_NTHWC, old_cache.get(name), context._replace(path=f"{path}."))
        context.outputs[path] = x_NTHWC
    return x_NTHWC, new_cache


class Module(nnx.Module):
    """A module with parameters that functions take by name."""

    def params(self) -> blocks.Params:
        """Return all parameters, by diffusers' names relative to this module."""
        return {diffusers_name(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(self))}


class Conv(Module):
    """The parameters of a convolution: `kernel` (*window, I, O) and `bias` (O,); a call takes 1x1x1 alone."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        config: LayerConfig,
        window: tuple[int, ...] = (1, 1, 1),
    ):
        shape = (*window, in_channels, out_channels)
        initialize = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(initialize(config.rngs.params(), shape, config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), config.param_dtype))

    def __call__(self, x_NTHWC: jax.Array, _cache: None, context: Context) -> tuple[jax.Array, None]:
        return blocks.pointwise_conv(self.params(), x_NTHWC, split=context.split), None


class CausalConv3d(Module):
    """A convolution that sees no later frame."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, config: LayerConfig):
        self.conv = Conv(in_channels, out_channels, config, (kernel_size,) * 3)

    def __call__(
        self, x_NTHWC: jax.Array, cache: jax.Array | None, context: Context
    ) -> tuple[jax.Array, jax.Array | None]:
        return blocks.causal_conv(self.params(), x_NTHWC, cache, split=context.split)


class GroupNorm(Module):
    """GroupNorm over the channels."""

    def __init__(self, channels: int, config: LayerConfig):
        self.scale = nnx.Param(jnp.ones((channels,), config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), config.param_dtype))
        self.num_groups = config.num_groups

    def __call__(self, x_NTHWC: jax.Array, _cache: None, context: Context) -> tuple[jax.Array, None]:
        return jax_kernels.group_norm(
            x_NTHWC,
            self.scale[...],
            self.bias[...],
            num_groups=self.num_groups,
            eps=EPS,
            channel_axis=-1,
            split=context.split,
        ), None


class SpatialNorm3D(Module):
    """The parameters of a GroupNorm modulated by the latents, `norm_layer(x) * conv_y(zq) + conv_b(zq)`."""

    def __init__(self, channels: int, config: LayerConfig):
        self.norm_layer = GroupNorm(channels, config)
        self.conv_y = CausalConv3d(config.latent_channels, channels, 1, config)
        self.conv_b = CausalConv3d(config.latent_channels, channels, 1, config)


class ResnetBlock3D(Module):
    """A residual block, in which a norm, SiLU and a convolution run twice, beside a shortcut.

    If `rematerialize` is set, the forward pass does not keep the activations inside of the block, and a
    backward pass computes them again.
    """

    def __init__(self, in_channels: int, out_channels: int, config: LayerConfig):
        norm = GroupNorm if config.latent_channels is None else SpatialNorm3D
        self.norm1 = norm(in_channels, config)
        self.conv1 = CausalConv3d(in_channels, out_channels, 3, config)
        self.norm2 = norm(out_channels, config)
        self.conv2 = CausalConv3d(out_channels, out_channels, 3, config)
        self.conv_shortcut = Conv(in_channels, out_channels, config) if in_channels != out_channels else None
        self.num_groups, self.eps = config.num_groups, config.eps
        self.rematerialize = False

    def __call__(
        self, x_NTHWC: jax.Array, cache: blocks.Cache | None, context: Context
    ) -> tuple[jax.Array, blocks.Cache]:
        run = functools.partial(
            blocks.residual_block, num_groups=self.num_groups, eps=self.eps, split=context.split
        )
        run = jax.checkpoint(run) if self.rematerialize else run
        return run(self.params(), x_NTHWC, context.zq, cache)


class Resampler(Module):
    """A layer that changes height, width and, with `in_time`, the number of frames by a factor of two."""

    def __init__(self, channels: int, config: LayerConfig, *, in_time: bool):
        self.conv = Conv(channels, channels, config, (3, 3))
        self.in_time = in_time


class Downsample3D(Resampler):
    """A layer that halves height, width and maybe the number of frames."""

    def __call__(self, x_NTHWC: jax.Array, _cache: None, context: Context) -> tuple[jax.Array, None]:
        return blocks.downsample(
            self.params(), x_NTHWC, compress_time=self.in_time, split=context.split
        ), None


class Upsample3D(Resampler):
    """A layer that doubles height, width and maybe the number of frames; then it convolves."""

    def __call__(self, x_NTHWC: jax.Array, _cache: None, context: Context) -> tuple[jax.Array, None]:
        return blocks.upsample(self.params(), x_NTHWC, expand_time=self.in_time, split=context.split), None


class Block3D(Module):
    """Several residual blocks, which a downsampler or an upsampler may follow; a mid block has neither."""

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

    def __call__(
        self, x_NTHWC: jax.Array, cache: blocks.Cache | None, context: Context
    ) -> tuple[jax.Array, blocks.Cache]:
        layers = named(self, "resnets", "downsamplers", "upsamplers")
        return run_layers(layers, x_NTHWC, cache, context)


def named(module: nnx.Module, *lists: str) -> dict[str, Layer]:
    """Return the layers in a module's lists of these names, by names such as `resnets.0`."""
    return {f"{name}.{i}": layer for name in lists for i, layer in enumerate(getattr(module, name))}


class Encoder3D(Module):
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
                downsampler=Downsample3D(channels, layers, in_time=i < config.time_doublings)
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

    def __call__(
        self, x_NTHWC: jax.Array, cache: blocks.Cache | None, context: Context
    ) -> tuple[jax.Array, blocks.Cache]:
        layers: dict[str, Layer] = {
            "conv_in": self.conv_in,
            **named(self, "down_blocks"),
            "mid_block": self.mid_block,
            "norm_out": self.norm_out,
            "conv_act": lambda x_NTHWC, *_: (jax_kernels.silu(x_NTHWC, time_axis=1), None),
            "conv_out": self.conv_out,
        }
        return run_layers(layers, x_NTHWC, cache, context)


class Decoder3D(Module):
    """The network from latents (N, t, h, w, C) to frames (N, T, H, W, C)."""

    def __init__(self, config: FlaxAutoencoderKLCogVideoXConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        level_channels = config.block_out_channels[::-1]  # the config has them in the encoder's order
        # The config's `norm_eps` is left out, because diffusers' spatial norms do not take it.
        layers = LayerConfig(
            rngs,
            num_groups=config.norm_num_groups,
            latent_channels=config.latent_channels,
            param_dtype=param_dtype,
        )
        self.conv_in = CausalConv3d(config.latent_channels, level_channels[0], 3, layers)
        self.mid_block = Block3D(level_channels[0], level_channels[0], layers, num_layers=2)
        # Every level but the last doubles height and width, and the first ones also the number of frames.
        self.up_blocks = nnx.List(
            Block3D(
                level_channels[max(i - 1, 0)],  # of the level before; before the first level is `mid_block`
                channels,
                layers,
                num_layers=config.layers_per_block + 1,  # one more than the encoder's, as in diffusers
                upsampler=Upsample3D(channels, layers, in_time=i < config.time_doublings)
                if i < len(level_channels) - 1
                else None,
            )
            for i, channels in enumerate(level_channels)
        )
        self.norm_out = SpatialNorm3D(level_channels[-1], layers)
        self.conv_out = CausalConv3d(level_channels[-1], config.out_channels, 3, layers)

    def __call__(
        self, z_NthwC: jax.Array, cache: blocks.Cache | None, context: Context
    ) -> tuple[jax.Array, blocks.Cache]:
        layers: dict[str, Layer] = {
            "conv_in": self.conv_in,
            "mid_block": self.mid_block,
            **named(self, "up_blocks"),
            "conv_out": self._norm_and_convolve,
        }
        return run_layers(layers, z_NthwC, cache, context._replace(zq=z_NthwC))

    def _norm_and_convolve(self, x_NTHWC: jax.Array, cache: Any, context: Context) -> tuple[jax.Array, Any]:
        """Run `norm_out`, SiLU and `conv_out`."""
        y_NTHWC, cache, _moments = blocks.normed_conv(
            self.norm_out.params(),
            self.conv_out.params(),
            x_NTHWC,
            context.zq,
            cache,
            num_groups=self.norm_out.norm_layer.num_groups,
            eps=EPS,
            split=context.split,
        )
        return y_NTHWC, cache
