"""The networks of one chunk, (chunk, cache) -> (result, next cache), from which programs are compiled.

The cache has the last input frames of each causal convolution, by name; at the start of a video it is None.
Diffusers' modules take it and return it in NCTHW. Between two chunks it is in HWNTC, the order that a TPU
computes in. In any other order each program would rearrange the cache on its way in and out.

Axis letters: N videos, C channels, T frames, H rows, W columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.layers import watched
from cogvideox_torchax.vae.directions import DECODE, ENCODE, HWNTC, NCTHW, Axes, Direction
from cogvideox_torchax.vae.pixels import from_uint8, to_uint8
from cogvideox_torchax.vae.placement import OnColumns
from jax_kernels.common.columns import with_clear_padding


class EncoderChunk(OnColumns, nn.Module):
    """The network from frames, floats in [-1, 1] or uint8, to their latents' means and log-variances."""

    direction, as_uint8 = ENCODE, False

    def __init__(self, vae: DiffusersAutoencoder):
        super().__init__()
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv

    def forward(self, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        if x.dtype == torch.uint8:
            # On a mesh the width may be padded with columns of zeros (`self.split`), to be divided evenly.
            # `from_uint8` turns these zeros into -1, and the kernels need zeros there.
            x = from_uint8(x, runtime.dtype_name(self.encoder.conv_in.conv.weight.dtype))
            if runtime.on_accelerator(x):  # only there is anything padded
                x = runtime.torch_view(with_clear_padding)(x, self.split, NCTHW.index("W"))
        moments, cache = self.encoder(x, conv_cache=_permuted(cache, HWNTC, NCTHW))
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        return moments, _permuted(cache, NCTHW, HWNTC)


class DecoderChunk(nn.Module):
    """The network from latents to frames, in [-1, 1] or as uint8."""

    direction = DECODE

    def __init__(self, vae: DiffusersAutoencoder, as_uint8: bool = False):
        super().__init__()
        self.decoder = vae.decoder
        self.post_quant_conv = vae.post_quant_conv
        self.as_uint8 = as_uint8

    def forward(self, z: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        if self.post_quant_conv is not None:
            z = self.post_quant_conv(z)
        frames, cache = self.decoder(z, conv_cache=_permuted(cache, HWNTC, NCTHW))
        return to_uint8(frames) if self.as_uint8 else frames, _permuted(cache, NCTHW, HWNTC)


def _permuted(cache: Any, axes: Axes, new_axes: Axes) -> Any:
    """Return a cache, tensors in nested dictionaries, with the tensors' axes in another order."""
    if isinstance(cache, dict):  # JAX sorts dictionaries by name: with this order programs come out the same
        return {name: _permuted(cache[name], axes, new_axes) for name in sorted(cache)}
    return None if cache is None else cache.permute([axes.index(letter) for letter in new_axes])


ChunkNetwork = EncoderChunk | DecoderChunk


def chunk_network(vae: DiffusersAutoencoder, direction: Direction, as_uint8: bool = False) -> ChunkNetwork:
    """Return the network of one direction; with `as_uint8` decoded frames are bytes."""
    return EncoderChunk(vae) if direction == ENCODE else DecoderChunk(vae, as_uint8)


class RecordedLayers(nn.Module):
    """A network that runs another network, and returns the outputs of its layers, by name.

    `wanted` is a function that returns whether a layer of this name is recorded.
    """

    def __init__(self, network: nn.Module, wanted: Callable[[str], Any]):
        super().__init__()
        self.network = network
        self._wanted = wanted

    def forward(self, chunk: torch.Tensor, cache: Any) -> tuple[dict[str, torch.Tensor], Any]:
        outputs: dict[str, torch.Tensor] = {}

        def record(name: str, result: Any) -> Any:
            """Keep a layer's output, without its cache, and return the result for the layers after it."""
            output, *_cache = result if isinstance(result, tuple) else (result,)
            outputs[name] = output
            return result

        # `watched` calls `record` with the name and the result of each wanted layer.
        with watched(self.network, lambda name, _: self._wanted(name), on_result=record):
            _, cache = self.network(chunk, cache)
        return outputs, cache


def stock_of(vae: DiffusersAutoencoder) -> DiffusersAutoencoder:
    """Return a VAE of diffusers' own modules that shares a ported one's weights, which must be in PyTorch."""
    if type(vae) is DiffusersAutoencoder:
        return vae
    # The new weights take no memory; `assign` replaces them by `vae`'s own.
    with torch.device("meta"):
        stock: Any = DiffusersAutoencoder.from_config(vae.config)
    stock.load_state_dict(vae.state_dict(), assign=True)
    return stock.eval()
