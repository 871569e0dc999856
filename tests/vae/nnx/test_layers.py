"""Each layer of the Flax build against diffusers' own, from the same weights, over two chunks.

Encoder and decoder as wholes are held to the same tolerance by `tests/vae/torchax/test_autoencoder.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as stock
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from flax import nnx

from cogvideox_torchax.vae.nnx import modules, weights
from tests.reference import largest_error, randomized

LATENTS = 16
NARROW, WIDE = 16, 32
"""Channels at the first and the second level."""
GROUPS, RESNETS = 8, 1


@dataclass(frozen=True)
class Layer:
    """One layer in both builds.

    Attributes:
        tolerance: largest difference allowed, relative to the largest absolute value of the reference.
        stock, ours: builders; `ours` takes rngs.
        channels: of the input.
        call: how diffusers' module is called, "x", "x, cache", "x, zq" or "x, zq, cache".
        scale: pixels and frames of the input to one of the latents, for layers that take both.
        frames: of the two chunks that are run one after the other.
    """

    tolerance: float
    stock: Callable[[], torch.nn.Module]
    ours: Callable[[nnx.Rngs], nnx.Module]
    channels: int
    call: str
    scale: tuple[int, int] = (1, 1)
    frames: tuple[int, int] = (3, 2)


def _resnet(latents: int | None) -> torch.nn.Module:
    return stock.CogVideoXResnetBlock3D(
        NARROW, WIDE, temb_channels=0, groups=GROUPS, spatial_norm_dim=latents
    )


def _config(rngs: nnx.Rngs, latents: int | None = None) -> modules.LayerConfig:
    return modules.LayerConfig(rngs, GROUPS, latent_channels=latents)


LAYERS: dict[str, Layer] = {
    "conv_in": Layer(
        1e-6,
        lambda: stock.CogVideoXCausalConv3d(3, NARROW, 3, pad_mode="first"),
        lambda r: modules.CausalConv3d(3, NARROW, 3, _config(r)),
        3,
        "x, cache",
    ),
    "causal convolution": Layer(
        1e-6,
        lambda: stock.CogVideoXCausalConv3d(NARROW, WIDE, 3, pad_mode="first"),
        lambda r: modules.CausalConv3d(NARROW, WIDE, 3, _config(r)),
        NARROW,
        "x, cache",
    ),
    "1x1x1 convolution": Layer(
        1e-6,
        lambda: stock.CogVideoXSafeConv3d(NARROW, WIDE, 1),
        lambda r: modules.Conv3d(NARROW, WIDE, _config(r)),
        NARROW,
        "x",
    ),
    "group norm": Layer(
        1e-6,
        lambda: torch.nn.GroupNorm(GROUPS, NARROW, eps=1e-6),
        lambda r: modules.GroupNorm(NARROW, _config(r)),
        NARROW,
        "x",
    ),
    "spatial norm": Layer(
        1e-6,
        lambda: stock.CogVideoXSpatialNorm3D(NARROW, LATENTS, groups=GROUPS),
        lambda r: modules.SpatialNorm3D(NARROW, LATENTS, _config(r)),
        NARROW,
        "x, zq",
        scale=(4, 4),
    ),
    "resnet block": Layer(
        1e-5,
        lambda: _resnet(None),
        lambda r: modules.ResnetBlock3D(NARROW, WIDE, _config(r)),
        NARROW,
        "x, cache",
    ),
    "resnet block, spatial norms": Layer(
        1e-5,
        lambda: _resnet(LATENTS),
        lambda r: modules.ResnetBlock3D(NARROW, WIDE, _config(r, LATENTS)),
        NARROW,
        "x, zq, cache",
    ),
    "downsampler": Layer(
        1e-6,
        lambda: CogVideoXDownsample3D(NARROW, NARROW, compress_time=True),
        lambda r: modules.Downsample3D(NARROW, _config(r), compress_time=True),
        NARROW,
        "x",
        frames=(9, 8),
    ),
    "upsampler": Layer(
        1e-6,
        lambda: CogVideoXUpsample3D(NARROW, NARROW, compress_time=True),
        lambda r: modules.Upsample3D(NARROW, _config(r), expand_time=True),
        NARROW,
        "x",
    ),
    "down block": Layer(
        1e-5,
        lambda: stock.CogVideoXDownBlock3D(
            NARROW, WIDE, temb_channels=0, num_layers=RESNETS, resnet_groups=GROUPS, compress_time=True
        ),
        lambda r: modules.Block3D(
            NARROW,
            WIDE,
            _config(r),
            num_layers=RESNETS,
            downsampler=modules.Downsample3D(WIDE, _config(r), compress_time=True),
        ),
        NARROW,
        "x, cache",
        frames=(9, 8),
    ),
    "mid block": Layer(
        1e-5,
        lambda: stock.CogVideoXMidBlock3D(
            WIDE, temb_channels=0, num_layers=2, resnet_groups=GROUPS, spatial_norm_dim=LATENTS
        ),
        lambda r: modules.Block3D(WIDE, WIDE, _config(r, LATENTS), num_layers=2),
        WIDE,
        "x, zq, cache",
    ),
    "up block": Layer(
        1e-5,
        lambda: stock.CogVideoXUpBlock3D(
            WIDE,
            NARROW,
            temb_channels=0,
            num_layers=RESNETS + 1,
            resnet_groups=GROUPS,
            spatial_norm_dim=LATENTS,
            compress_time=True,
        ),
        lambda r: modules.Block3D(
            WIDE,
            NARROW,
            _config(r, LATENTS),
            num_layers=RESNETS + 1,
            upsampler=modules.Upsample3D(NARROW, _config(r), expand_time=True),
        ),
        WIDE,
        "x, zq, cache",
        scale=(2, 2),
    ),
}


def in_flax(make: Callable[[], nnx.Module], module: torch.nn.Module) -> nnx.Module:
    """Return the Flax module that `make` builds, with a torch module's weights."""
    graph, abstract = nnx.split(nnx.eval_shape(make))
    tensors = weights.from_torch(module.state_dict())
    return nnx.merge(
        graph, weights.read_state(abstract, tensors, source="the module", param_dtype=jnp.float32)
    )


def inputs(layer: Layer, frames: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a chunk of frames, and for layers that take both their latents as `zq`."""
    if "zq" not in layer.call:
        return torch.randn(1, layer.channels, frames, 8, 16), {}
    time, space = layer.scale
    full = 1 + (frames - 1) * time if frames % 2 else frames * time
    x = torch.randn(1, layer.channels, full, 6 * space, 10 * space)
    return x, {"zq": torch.randn(1, LATENTS, frames, 6, 10)}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_layer_equals_diffusers(layer):
    torch.manual_seed(0)
    theirs = randomized(layer.stock())
    graph, state = nnx.split(in_flax(lambda: layer.ours(nnx.Rngs(0)), theirs))
    run = jax.jit(lambda state, *inputs, **cache: nnx.merge(graph, state)(*inputs, **cache))
    their_cache, our_cache = {}, {}
    for frames in layer.frames:
        x, latents = inputs(layer, frames)
        arrays = [jnp.asarray(tensor.permute(0, 2, 3, 4, 1).numpy()) for tensor in (x, *latents.values())]
        want = theirs(x, **latents, **their_cache)
        got = run(state, *arrays, **our_cache)
        if "cache" in layer.call:
            want, their_cache["conv_cache"] = want
            got, our_cache["cache"] = got
        elif isinstance(want, tuple):
            want = want[0]
        assert largest_error(np.moveaxis(np.asarray(got), -1, 1), want) < layer.tolerance
