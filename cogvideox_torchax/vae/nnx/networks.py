"""Encoder and decoder: the whole networks for one chunk of frames, the cache in and out."""

import jax
from flax import nnx
from jax.typing import DTypeLike

import jax_kernels
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.modules import (
    Block3D,
    Cache,
    CausalConv3d,
    Downsample3D,
    GroupNorm,
    LayerConfig,
    SpatialNorm3D,
    Upsample3D,
    normed_conv,
)


class Encoder3D(nnx.Module):
    """Frames (N, T, H, W, C) to moments (N, t, h, w, 2 * latent_channels)."""

    def __init__(self, config: FlaxAutoencoderKLCogVideoXConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        """Build the network of these sizes; the first `time_doublings` levels halve the frames."""
        widths = config.block_out_channels  # a level's input has the channels of the level before
        layers = LayerConfig(
            rngs, num_groups=config.norm_num_groups, eps=config.norm_eps, param_dtype=param_dtype
        )
        self.conv_in = CausalConv3d(config.in_channels, widths[0], 3, layers)
        self.down_blocks = nnx.List(
            Block3D(
                widths[max(i - 1, 0)],
                width,
                layers,
                num_layers=config.layers_per_block,
                downsampler=Downsample3D(width, layers, compress_time=i < config.time_doublings)
                if i < len(widths) - 1  # the last level has none
                else None,
            )
            for i, width in enumerate(widths)
        )
        self.mid_block = Block3D(widths[-1], widths[-1], layers, num_layers=2)
        self.norm_out = GroupNorm(widths[-1], layers)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels, 3, layers)

    def __call__(self, x_NTHWC: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
        """Encode a chunk; return its moments and the cache for the next chunk."""
        old, new = cache or {}, {}
        x_NTHWC, new["conv_in"] = self.conv_in(x_NTHWC, old.get("conv_in"))
        for i, block in enumerate(self.down_blocks):
            name = f"down_block_{i}"
            x_NTHWC, new[name] = block(x_NTHWC, None, old.get(name))
        x_NTHWC, new["mid_block"] = self.mid_block(x_NTHWC, None, old.get("mid_block"))
        # Two calls, as in diffusers: the output of `norm_out` can be recorded without the activation.
        x_NTHWC = jax_kernels.silu(self.norm_out(x_NTHWC), time_axis=1)
        x_NTHWC, new["conv_out"] = self.conv_out(x_NTHWC, old.get("conv_out"))
        return x_NTHWC, new


class Decoder3D(nnx.Module):
    """Latents (N, t, h, w, C) to frames (N, T, H, W, C)."""

    def __init__(self, config: FlaxAutoencoderKLCogVideoXConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        """Build the network of these sizes; the first `time_doublings` levels double the frames."""
        widths = config.block_out_channels[::-1]
        latents = config.latent_channels
        # Without `eps`: diffusers' spatial norms do not take the config's.
        layers = LayerConfig(
            rngs, num_groups=config.norm_num_groups, latent_channels=latents, param_dtype=param_dtype
        )
        self.conv_in = CausalConv3d(latents, widths[0], 3, layers)
        self.mid_block = Block3D(widths[0], widths[0], layers, num_layers=2)
        self.up_blocks = nnx.List(
            Block3D(
                widths[max(i - 1, 0)],
                width,
                layers,
                num_layers=config.layers_per_block + 1,
                upsampler=Upsample3D(width, layers, expand_time=i < config.time_doublings)
                if i < len(widths) - 1  # the last level has none
                else None,
            )
            for i, width in enumerate(widths)
        )
        self.norm_out = SpatialNorm3D(widths[-1], latents, layers)
        self.conv_out = CausalConv3d(widths[-1], config.out_channels, 3, layers)

    def __call__(
        self, z_NthwC: jax.Array, cache: Cache | None = None, *, first_frame_alone: bool | None = None
    ) -> tuple[jax.Array, Cache]:
        """Decode a chunk; return its frames and the cache for the next chunk.

        `first_frame_alone` is whether the first frame stays single in time; if None, it does if the number of
        frames is odd.
        """
        old, new = cache or {}, {}
        x_NTHWC, new["conv_in"] = self.conv_in(z_NthwC, old.get("conv_in"))
        x_NTHWC, new["mid_block"] = self.mid_block(x_NTHWC, z_NthwC, old.get("mid_block"))
        for i, block in enumerate(self.up_blocks):
            name = f"up_block_{i}"
            x_NTHWC, new[name] = block(x_NTHWC, z_NthwC, old.get(name), first_frame_alone=first_frame_alone)
        x_NTHWC, new["conv_out"], _column_moments = normed_conv(
            self.norm_out, self.conv_out, x_NTHWC, z_NthwC, old.get("conv_out")
        )
        return x_NTHWC, new
