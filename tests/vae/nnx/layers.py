"""Every layer of the VAE in both builds, from the same weights, and the inputs to compare them on.

The table feeds the tests, at small widths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as stock
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from flax import nnx

from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx import modules, networks, weights
from tests import reference

LATENTS = 16


@dataclass(frozen=True)
class Sizes:
    """Channels at the first and second level, groups, resnets a block, and the widths of whole networks."""

    narrow: int
    wide: int
    groups: int
    layers: int
    widths: tuple[int, ...]

    @property
    def config(self) -> FlaxAutoencoderKLCogVideoXConfig:
        return FlaxAutoencoderKLCogVideoXConfig(
            block_out_channels=self.widths, norm_num_groups=self.groups, layers_per_block=self.layers
        )

    @property
    def stock_network(self) -> dict[str, Any]:
        return {
            "block_out_channels": self.widths,
            "norm_num_groups": self.groups,
            "layers_per_block": self.layers,
        }


SMALL = Sizes(16, 32, 8, 1, (16, 32, 32, 64))


@dataclass(frozen=True)
class Layer:
    """One layer in both builds.

    Attributes:
        tolerance: largest difference allowed, relative to the largest absolute value of the reference.
        stock, ours: builders; `ours` takes rngs too.
        channels: of the input.
        call: how diffusers' module is called, "x", "x, cache", "x, zq" or "x, zq, cache".
        scale: pixels and frames of the input to one of the latents, for layers that take both.
        frames: of the two chunks that are run one after the other.
    """

    tolerance: float
    stock: Callable[[Sizes], torch.nn.Module]
    ours: Callable[[Sizes, nnx.Rngs], nnx.Module]
    channels: Callable[[Sizes], int]
    call: str
    scale: tuple[int, int] = (1, 1)
    frames: tuple[int, int] = (3, 2)


def _down_block(s: Sizes) -> torch.nn.Module:
    return stock.CogVideoXDownBlock3D(
        s.narrow,
        s.wide,
        temb_channels=0,
        num_layers=s.layers,
        resnet_groups=s.groups,
        compress_time=True,
    )


def _up_block(s: Sizes) -> torch.nn.Module:
    return stock.CogVideoXUpBlock3D(
        s.wide,
        s.narrow,
        temb_channels=0,
        num_layers=s.layers + 1,
        resnet_groups=s.groups,
        spatial_norm_dim=LATENTS,
        compress_time=True,
    )


def _mid_block(s: Sizes) -> torch.nn.Module:
    return stock.CogVideoXMidBlock3D(
        s.wide, temb_channels=0, num_layers=2, resnet_groups=s.groups, spatial_norm_dim=LATENTS
    )


def _resnet(s: Sizes, latents: int | None) -> torch.nn.Module:
    return stock.CogVideoXResnetBlock3D(
        s.narrow, s.wide, temb_channels=0, groups=s.groups, spatial_norm_dim=latents
    )


def _config(s: Sizes, rngs: nnx.Rngs, latents: int | None = None) -> modules.LayerConfig:
    return modules.LayerConfig(rngs, s.groups, latent_channels=latents)


LAYERS: dict[str, Layer] = {
    "conv_in": Layer(
        1e-6,
        lambda s: stock.CogVideoXCausalConv3d(3, s.narrow, 3, pad_mode="first"),
        lambda s, r: modules.CausalConv3d(3, s.narrow, 3, _config(s, r)),
        lambda s: 3,
        "x, cache",
    ),
    "causal convolution": Layer(
        1e-6,
        lambda s: stock.CogVideoXCausalConv3d(s.narrow, s.wide, 3, pad_mode="first"),
        lambda s, r: modules.CausalConv3d(s.narrow, s.wide, 3, _config(s, r)),
        lambda s: s.narrow,
        "x, cache",
    ),
    "1x1x1 convolution": Layer(
        1e-6,
        lambda s: stock.CogVideoXSafeConv3d(s.narrow, s.wide, 1),
        lambda s, r: modules.Conv3d(s.narrow, s.wide, _config(s, r)),
        lambda s: s.narrow,
        "x",
    ),
    "group norm": Layer(
        1e-6,
        lambda s: torch.nn.GroupNorm(s.groups, s.narrow, eps=1e-6),
        lambda s, r: modules.GroupNorm(s.narrow, _config(s, r)),
        lambda s: s.narrow,
        "x",
    ),
    "spatial norm": Layer(
        1e-6,
        lambda s: stock.CogVideoXSpatialNorm3D(s.narrow, LATENTS, groups=s.groups),
        lambda s, r: modules.SpatialNorm3D(s.narrow, LATENTS, _config(s, r)),
        lambda s: s.narrow,
        "x, zq",
        scale=(4, 4),
    ),
    "resnet block": Layer(
        1e-5,
        lambda s: _resnet(s, None),
        lambda s, r: modules.ResnetBlock3D(s.narrow, s.wide, _config(s, r)),
        lambda s: s.narrow,
        "x, cache",
    ),
    "resnet block, spatial norms": Layer(
        1e-5,
        lambda s: _resnet(s, LATENTS),
        lambda s, r: modules.ResnetBlock3D(s.narrow, s.wide, _config(s, r, LATENTS)),
        lambda s: s.narrow,
        "x, zq, cache",
    ),
    "downsampler": Layer(
        1e-6,
        lambda s: CogVideoXDownsample3D(s.narrow, s.narrow, compress_time=True),
        lambda s, r: modules.Downsample3D(s.narrow, _config(s, r), compress_time=True),
        lambda s: s.narrow,
        "x",
        frames=(9, 8),
    ),
    "upsampler": Layer(
        1e-6,
        lambda s: CogVideoXUpsample3D(s.narrow, s.narrow, compress_time=True),
        lambda s, r: modules.Upsample3D(s.narrow, _config(s, r), expand_time=True),
        lambda s: s.narrow,
        "x",
    ),
    "down block": Layer(
        1e-5,
        _down_block,
        lambda s, r: modules.DownBlock3D(
            s.narrow,
            s.wide,
            _config(s, r),
            num_layers=s.layers,
            add_downsample=True,
            compress_time=True,
        ),
        lambda s: s.narrow,
        "x, cache",
        frames=(9, 8),
    ),
    "mid block": Layer(
        1e-5,
        _mid_block,
        lambda s, r: modules.MidBlock3D(s.wide, s.wide, _config(s, r, LATENTS), num_layers=2),
        lambda s: s.wide,
        "x, zq, cache",
    ),
    "up block": Layer(
        1e-5,
        _up_block,
        lambda s, r: modules.UpBlock3D(
            s.wide,
            s.narrow,
            _config(s, r, LATENTS),
            num_layers=s.layers + 1,
            add_upsample=True,
            expand_time=True,
        ),
        lambda s: s.wide,
        "x, zq, cache",
        scale=(2, 2),
    ),
    "encoder": Layer(
        1e-5,
        lambda s: stock.CogVideoXEncoder3D(out_channels=LATENTS, **s.stock_network),
        lambda s, r: networks.Encoder3D(s.config, param_dtype=jnp.float32, rngs=r),
        lambda s: 3,
        "x, cache",
        frames=(9, 8),
    ),
    "decoder": Layer(
        1e-5,
        lambda s: stock.CogVideoXDecoder3D(in_channels=LATENTS, **s.stock_network),
        lambda s, r: networks.Decoder3D(s.config, param_dtype=jnp.float32, rngs=r),
        lambda s: LATENTS,
        "x, cache",
    ),
}


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """Draw a module's biases and affine parameters, so that none can be lost."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter.data, mean=center, std=0.2)
    return module.eval()


def in_flax(make: Callable[[], nnx.Module], module: torch.nn.Module) -> nnx.Module:
    """Return the Flax module that `make` builds, with a torch module's weights."""
    graph, abstract = nnx.split(nnx.eval_shape(make))
    tensors = weights.from_torch(module.state_dict())
    return nnx.merge(
        graph, weights.read_state(abstract, tensors, source="the module", param_dtype=jnp.float32)
    )


def error(layer: Layer, sizes: Sizes, seed: int = 0) -> float:
    """Return the largest difference over two chunks, relative to the reference's largest absolute value."""
    torch.manual_seed(seed)
    theirs = randomized(layer.stock(sizes))
    ours = in_flax(lambda: layer.ours(sizes, nnx.Rngs(0)), theirs)
    graph, state = nnx.split(ours)
    run = jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs))
    cached, takes_latents = "cache" in layer.call, "zq" in layer.call
    their_cache = our_cache = None
    worst = 0.0
    for frames in layer.frames:
        x, zq = _inputs(layer, sizes, frames)
        latents = (zq,) if takes_latents else ()
        if takes_latents and cached:
            want, their_cache = theirs(x, None, zq, their_cache)
        elif cached:
            want, their_cache = theirs(x, conv_cache=their_cache)
        else:
            want = theirs(x, *latents)
            want = want[0] if isinstance(want, tuple) else want
        # A resnet block takes its latents before its cache even where it has none.
        between = (None,) if layer.call == "x, cache" and isinstance(ours, modules.ResnetBlock3D) else ()
        arrays = [_channels_last(tensor) for tensor in (x, *latents)]
        got = run(state, *arrays, *between, *((our_cache,) if cached else ()))
        if cached:
            got, our_cache = got
        worst = max(worst, _relative(np.moveaxis(np.asarray(got), -1, 1), want.numpy()))
    return worst


def _inputs(layer: Layer, sizes: Sizes, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    time, space = layer.scale
    zq = torch.randn(1, LATENTS, frames, 6, 10)
    if "zq" in layer.call:
        full = 1 + (frames - 1) * time if frames % 2 else frames * time
        return torch.randn(1, layer.channels(sizes), full, 6 * space, 10 * space), zq
    return torch.randn(1, layer.channels(sizes), frames, 8, 16), zq


def _channels_last(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.permute(0, 2, 3, 4, 1).numpy())


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.abs(got - want).max() / np.abs(want).max())


def frame_by_frame_difference() -> dict[str, float]:
    """Return the distance of decoding one latent frame a step to the reference, for 5 latent frames.

    The weights are random.
    """
    from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX

    stock_vae = reference.small_vae()
    vae = FlaxAutoencoderKLCogVideoX.from_state_dict(dict(stock_vae.config), stock_vae.state_dict())
    z = reference.latents(5)
    want = stock_vae.decode(z).sample.numpy()
    got = np.moveaxis(np.asarray(vae.decode_frame_by_frame(_channels_last(z))), -1, 1)
    return {
        "largest": _relative(got, want),
        "root_mean_square": float(np.sqrt(np.square(got - want).mean()) / np.abs(want).max()),
    }
