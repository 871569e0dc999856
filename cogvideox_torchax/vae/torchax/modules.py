"""The ported modules: diffusers' own classes, with a second way to run.

Each class here is a subclass of the class that it replaces, and adds no state. Its forward runs a function of
`vae.blocks` or a kernel of `jax_kernels` for a tensor on an accelerator, if the module and all modules inside
of it are as diffusers ships them (`runtime.trees`). Otherwise the forward of diffusers runs, and calls the
modules inside. `port` swaps a module's class in place, so parameters, names, hooks and `isinstance` stay what
they were. `torch_view` turns a function of JAX arrays into one of tensors.

`vae.blocks` explains the caches (`conv_cache`), the latents `zq` and the sharding of the width, `split`.

Axis letters: N videos, C channels, T frames, H rows, W columns.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as diffusers_vae
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import nn
from torch.utils._pytree import tree_map_only

import jax_kernels
from cogvideox_torchax.runtime import torch_view
from cogvideox_torchax.runtime.trees import runs_kernel
from cogvideox_torchax.vae import blocks
from cogvideox_torchax.vae.placement import OnColumns
from jax_kernels.common.columns import WHOLE

Parts = Mapping[str, tuple[type, ...]]
"""By the name of a module inside, the classes for which a kernel stands in (`runtime.trees`)."""


def _channels_last(x_NCTHW: torch.Tensor) -> torch.Tensor:
    return x_NCTHW.permute(0, 2, 3, 4, 1)


def _channels_first(x_NTHWC: torch.Tensor) -> torch.Tensor:
    return x_NTHWC.permute(0, 4, 1, 2, 3)


def _params(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters by name, with the axes of kernels as in JAX: (*window, I, O)."""
    return {
        name: weight.permute(*range(2, weight.ndim), 1, 0) if weight.ndim > 2 else weight
        for name, weight in module.named_parameters(remove_duplicate=False)  # one may have several names
    }


def _on_block(block: Callable[..., Any], module: Any, *inputs: Any, **options: Any) -> Any:
    """Return `block(params, *inputs)`, a function of `vae.blocks`, for tensors NCTHW and trees of them."""
    arguments = tree_map_only(torch.Tensor, _channels_last, inputs)
    results = torch_view(block)(_params(module), *arguments, split=module.split, **options)
    return tree_map_only(torch.Tensor, _channels_first, results)


def _norm_options(norm: Any) -> dict[str, Any]:
    """Return the options of a norm's kernel, of a GroupNorm or of the one in a spatial norm."""
    group_norm = norm.norm_layer if isinstance(norm, SpatialNorm3D) else norm
    return {"num_groups": group_norm.num_groups, "eps": group_norm.eps}


def _other_settings(conv: Any, window: Any, stride: Any, padding: Any) -> str | None:
    """Return in what a convolution differs from the one that a kernel computes; None for nothing."""
    wanted = {
        "kernel_size": window,
        "stride": stride,
        "padding": padding,
        "dilation": (1,) * len(conv.kernel_size),
        "groups": 1,
        "padding_mode": "zeros",
    }
    other = next((name for name in wanted if getattr(conv, name) != wanted[name]), None)
    return other and f"has a convolution with {other}={getattr(conv, other)!r}"


class GroupNorm(OnColumns, nn.GroupNorm):
    """GroupNorm with statistics in float32, by `jax_kernels.group_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.ndim < 3 or not runs_kernel(self, input):  # the kernel needs an axis of pixels
            return super().forward(input)
        return torch_view(jax_kernels.group_norm)(
            input,
            self.weight,
            self.bias,
            num_groups=self.num_groups,
            eps=self.eps,
            split=self.split if input.ndim == 5 else WHOLE,  # only (N, C, T, H, W) has columns to split
        )


class SiLU(nn.SiLU):
    """SiLU, computed in float32 and rounded once, by `jax_kernels.silu`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not runs_kernel(self, input):
            return super().forward(input)
        # By `time_axis` the kernel finds the frames of (N, C, T, H, W). It computes a few of them at a time,
        # which saves memory on a TPU.
        return torch_view(jax_kernels.silu)(input, time_axis=2 if input.ndim == 5 else None)


class SafeConv3d(OnColumns, diffusers_vae.CogVideoXSafeConv3d):
    """A 3-D convolution; on JAX `jax_kernels.conv3d` computes it if its window is 1x1x1 and its stride 1.

    Diffusers' forward would cut the input into parts, to save memory.
    """

    @property
    def is_pointwise(self) -> bool:
        return _other_settings(self, (1, 1, 1), (1, 1, 1), (0, 0, 0)) is None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.is_pointwise or not runs_kernel(self, input):
            return super().forward(input)
        return _on_block(blocks.pointwise_conv, self, input)


class CausalConv3d(OnColumns, diffusers_vae.CogVideoXCausalConv3d):
    """The causal convolution, by `jax_kernels.conv3d`."""

    parts: Parts = {"conv": (SafeConv3d,)}  # noqa: RUF012 - read only

    @property
    def unsupported(self) -> str | None:
        """What no kernel computes: other strides and paddings, and edges of frames that are repeated."""
        if self.pad_mode == "replicate":
            return "has pad_mode='replicate'"
        window = self.conv.kernel_size
        padding = (0, (window[1] - 1) // 2, (window[2] - 1) // 2)
        return _other_settings(self.conv, window, (1, 1, 1), padding)

    def forward(
        self, inputs: torch.Tensor, conv_cache: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolve; return the result and the next cache, which is None for one tap of time."""
        if not runs_kernel(self, inputs):
            return super().forward(inputs, conv_cache)  # pyright: ignore[reportReturnType]
        return _on_block(blocks.causal_conv, self, inputs, conv_cache)


class SpatialNorm3D(OnColumns, diffusers_vae.CogVideoXSpatialNorm3D):
    """GroupNorm and its modulation by latents, by `jax_kernels.spatial_norm`."""

    parts: Parts = {  # noqa: RUF012 - read only
        "norm_layer": (GroupNorm,),
        "conv_y": (CausalConv3d,),
        "conv_b": (CausalConv3d,),
    }

    def forward(
        self, f: torch.Tensor, zq: torch.Tensor, conv_cache: blocks.Cache | None = None
    ) -> tuple[torch.Tensor, blocks.Cache]:
        """Norm `f` and modulate it by the latents; return the result and the next cache.

        With the kernel the cache is empty, because convolutions of 1x1x1 need none.
        """
        if not runs_kernel(self, f):
            return super().forward(f, zq, conv_cache)  # pyright: ignore[reportReturnType]
        return _on_block(blocks.spatial_norm, self, f, zq, **_norm_options(self)), {}


class ResnetBlock3D(OnColumns, diffusers_vae.CogVideoXResnetBlock3D):
    """The residual block, in which a norm and a convolution run as one, by `jax_kernels.norm_conv3d`."""

    parts: Parts = {  # noqa: RUF012 - read only
        "norm1": (GroupNorm, SpatialNorm3D),
        "norm2": (GroupNorm, SpatialNorm3D),
        "conv1": (CausalConv3d,),
        "conv2": (CausalConv3d,),
        "conv_shortcut": (SafeConv3d, type(None)),  # None where the number of channels stays
        "nonlinearity": (SiLU,),
        "dropout": (nn.Dropout,),
    }

    @property
    def unsupported(self) -> str | None:
        """What no kernel computes: dropout, and norms with unlike settings."""
        if self.training and self.dropout.p > 0:
            return f"drops values by chance (p={self.dropout.p})"
        if self.in_channels != self.out_channels and not self.conv_shortcut.is_pointwise:  # pyright: ignore
            return "has a shortcut that mixes pixels"
        return None if _norm_options(self.norm1) == _norm_options(self.norm2) else "has two kinds of norms"

    def forward(
        self,
        inputs: torch.Tensor,
        temb: torch.Tensor | None = None,
        zq: torch.Tensor | None = None,
        conv_cache: blocks.Cache | None = None,
    ) -> tuple[torch.Tensor, blocks.Cache]:
        """Run the block on a chunk; return the result and the next cache.

        The VAE passes no time embedding `temb`, which no kernel takes.
        """
        if temb is not None or not runs_kernel(self, inputs):
            return super().forward(inputs, temb, zq, conv_cache)  # pyright: ignore[reportReturnType]
        return _on_block(
            blocks.residual_block, self, inputs, zq, conv_cache or None, **_norm_options(self.norm1)
        )


class Upsample3D(OnColumns, CogVideoXUpsample3D):
    """The upsampler, by `jax_kernels.upsample`."""

    parts: Parts = {"conv": (nn.Conv2d,)}  # noqa: RUF012 - read only

    @property
    def unsupported(self) -> str | None:
        return _other_settings(self.conv, (3, 3), (1, 1), (1, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not runs_kernel(self, inputs):
            return super().forward(inputs)
        return _on_block(blocks.upsample, self, inputs, expand_time=bool(self.compress_time))


class Downsample3D(OnColumns, CogVideoXDownsample3D):
    """The downsampler, by `jax_kernels.downsample`."""

    parts: Parts = {"conv": (nn.Conv2d,)}  # noqa: RUF012 - read only

    @property
    def unsupported(self) -> str | None:
        return _other_settings(self.conv, (3, 3), (2, 2), (0, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not runs_kernel(self, x):
            return super().forward(x)
        return _on_block(blocks.downsample, self, x, compress_time=bool(self.compress_time))


class CogVideoXDecoder3D(OnColumns, diffusers_vae.CogVideoXDecoder3D):
    """The decoder, whose last norm, activation and convolution run as one kernel."""

    parts: Parts = {  # noqa: RUF012 - read only
        "norm_out": (SpatialNorm3D,),
        "conv_act": (SiLU,),
        "conv_out": (CausalConv3d,),
    }

    def forward(
        self, sample: torch.Tensor, temb: torch.Tensor | None = None, conv_cache: blocks.Cache | None = None
    ) -> tuple[torch.Tensor, blocks.Cache]:
        """Decode a chunk `sample` of latents; return its frames and the next cache.

        The VAE passes no time embedding `temb`.
        """
        if not runs_kernel(self, sample):
            return super().forward(sample, temb, conv_cache)  # pyright: ignore[reportReturnType]
        cache = conv_cache or {}
        new_cache: blocks.Cache = {}
        hidden, new_cache["conv_in"] = self.conv_in(sample, conv_cache=cache.get("conv_in"))
        up_blocks = {f"up_block_{index}": block for index, block in enumerate(self.up_blocks)}
        # With checkpointing a backward pass computes a block's activations again.
        uses_checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        call: Any = self._gradient_checkpointing_func if uses_checkpointing else operator.call
        for name, block in {"mid_block": self.mid_block, **up_blocks}.items():
            # diffusers' function for checkpointing takes no keywords: (block, hidden, temb, zq, conv_cache).
            hidden, new_cache[name] = call(block, hidden, temb, sample, cache.get(name))
        y, out_cache, _moments = torch_view(blocks.normed_conv)(
            _params(self.norm_out),
            _params(self.conv_out),
            *tree_map_only(torch.Tensor, _channels_last, (hidden, sample, cache.get("conv_out"))),
            **_norm_options(self.norm_out),
            split=self.split,
        )
        new_cache["conv_out"] = _channels_first(out_cache)
        return _channels_first(y), new_cache


PORTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: GroupNorm,
    nn.SiLU: SiLU,
    diffusers_vae.CogVideoXSafeConv3d: SafeConv3d,
    diffusers_vae.CogVideoXCausalConv3d: CausalConv3d,
    diffusers_vae.CogVideoXSpatialNorm3D: SpatialNorm3D,
    diffusers_vae.CogVideoXResnetBlock3D: ResnetBlock3D,
    CogVideoXUpsample3D: Upsample3D,
    CogVideoXDownsample3D: Downsample3D,
    diffusers_vae.CogVideoXDecoder3D: CogVideoXDecoder3D,
}
"""The ported classes, by diffusers' classes; these modules take most of the time."""


def port_modules(root: nn.Module) -> None:
    """Give each module in `root` that `PORTED` lists its ported class, in place."""
    for module in root.modules():
        module.__class__ = PORTED.get(type(module), type(module))
