"""The ported modules: diffusers' own classes, with a second way to run.

Each class here is a subclass of the class that it replaces, and adds no state. Its forward runs a kernel of
`jax_kernels` for a tensor on an accelerator, if the module and all modules inside of it are as diffusers ships
them (`runtime.stock`). Otherwise the forward of diffusers runs, and calls the modules inside. `port` swaps a
module's class in place, so parameters, names, hooks and `isinstance` stay what they were. `torch_view` turns a
function of JAX arrays into one of tensors.

A causal convolution's cache (`conv_cache`) is its last input frames, which the next chunk takes. A block's
cache has its modules' caches by name. `zq`, as in diffusers, are the latents that modulate a spatial norm.
`first_frame_alone` says that the first frame belongs to no pair, and has a latent frame to itself. *Moments*
are a mean and a sum of squared deviations for each column of pixels, from which the next norm takes its
statistics. `split` is the sharding of the width over devices; its padding columns are zero.

Axis letters: N videos, C channels, T frames, H rows, W columns; O and I are the output and input channels of
a kernel.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as diffusers_vae
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import nn

import jax_kernels
from cogvideox_torchax.runtime import torch_view
from cogvideox_torchax.runtime.stock import runs_kernel
from cogvideox_torchax.vae.chunks import first_frame_is_alone
from cogvideox_torchax.vae.columns import OnColumns
from jax_kernels.common.columns import WHOLE

Cache = dict[str, Any]
Parts = Mapping[str, tuple[type[nn.Module], ...]]
"""By the name of a module inside, the classes for which a kernel stands in (`runtime.stock`)."""


def _channels_last(x_NCTHW: torch.Tensor) -> torch.Tensor:
    return x_NCTHW.permute(0, 2, 3, 4, 1)


def _channels_first(x_NTHWC: torch.Tensor) -> torch.Tensor:
    return x_NTHWC.permute(0, 4, 1, 2, 3)


def _taps_first(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return a torch convolution's weight (O, I, *window) as `jax_kernels` takes it, (*window, I, O)."""
    return weight_OI.permute(*range(2, weight_OI.ndim), 1, 0)


def _matrix(conv: nn.Conv3d) -> torch.Tensor:
    """Return a 1x1x1 convolution's kernel as a matrix (I, O)."""
    return conv.weight[:, :, 0, 0, 0].T


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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_pointwise = self.kernel_size == self.stride == (1, 1, 1)
        if not is_pointwise or not runs_kernel(self, input):
            return super().forward(input)
        y, _no_cache = torch_view(jax_kernels.conv3d)(
            _channels_last(input), _taps_first(self.weight), self.bias, split=self.split
        )
        return _channels_first(y)


class CausalConv3d(OnColumns, diffusers_vae.CogVideoXCausalConv3d):
    """The causal convolution, by `jax_kernels.conv3d`."""

    parts: Parts = {"conv": (SafeConv3d,)}  # noqa: RUF012 - read only

    @property
    def unsupported(self) -> str | None:
        """What no kernel computes: strides, or frames that are repeated at their edges too."""
        if self.conv.stride != (1, 1, 1) or self.conv.dilation != (1, 1, 1):
            return f"has stride {self.conv.stride} and dilation {self.conv.dilation}"
        return "has pad_mode='replicate'" if self.pad_mode == "replicate" else None

    def forward(
        self, inputs: torch.Tensor, conv_cache: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolve; return the result and the next cache, which is None for one tap of time."""
        if not runs_kernel(self, inputs):
            return super().forward(inputs, conv_cache)
        y, new_cache = torch_view(jax_kernels.conv3d)(
            _channels_last(inputs),
            _taps_first(self.conv.weight),
            self.conv.bias,
            None if conv_cache is None else _channels_last(conv_cache),
            # Without a cache, the first frame is repeated before the chunk. Unlike diffusers' `pad_mode` of
            # this name, this repeats no rows and columns: beyond the frame are zeros.
            start="replicate",
            split=self.split,
        )
        return _channels_first(y), None if new_cache is None else _channels_first(new_cache)


class SpatialNorm3D(OnColumns, diffusers_vae.CogVideoXSpatialNorm3D):
    """GroupNorm and its modulation by latents, by `jax_kernels.spatial_norm`."""

    parts: Parts = {  # noqa: RUF012 - read only
        "norm_layer": (GroupNorm,),
        "conv_y": (CausalConv3d,),
        "conv_b": (CausalConv3d,),
    }

    def forward(
        self, f: torch.Tensor, zq: torch.Tensor, conv_cache: Cache | None = None
    ) -> tuple[torch.Tensor, Cache]:
        """Norm `f` and modulate it by the latents; return the result and the next cache.

        With the kernel the cache is empty, because convolutions of 1x1x1 need none.
        """
        if not runs_kernel(self, f):
            return super().forward(f, zq, conv_cache)  # pyright: ignore[reportReturnType]
        # The result is norm(f) * conv_y(zq) + conv_b(zq).
        norm, conv_y, conv_b = self.norm_layer, self.conv_y.conv, self.conv_b.conv
        y = torch_view(jax_kernels.spatial_norm)(
            _channels_last(f),
            _channels_last(zq),
            norm.weight,
            norm.bias,
            _matrix(conv_y),
            conv_y.bias,
            _matrix(conv_b),
            conv_b.bias,
            num_groups=norm.num_groups,
            eps=norm.eps,
            first_frame_alone=first_frame_is_alone(f.shape[2]),
            split=self.split,
        )
        return _channels_first(y), {}


NORMS = (GroupNorm, SpatialNorm3D)


class ResnetBlock3D(diffusers_vae.CogVideoXResnetBlock3D):
    """The residual block, in which a norm and a convolution run as one, by `jax_kernels.norm_conv3d`."""

    parts: Parts = {  # noqa: RUF012 - read only
        "norm1": NORMS,
        "nonlinearity": (SiLU,),
        "conv1": (CausalConv3d,),
        "norm2": NORMS,
        "conv2": (CausalConv3d,),
    }

    @property
    def unsupported(self) -> str | None:
        """What no kernel computes: dropout, and a causal convolution as the shortcut."""
        if self.training and self.dropout.p > 0:
            return f"drops values by chance (p={self.dropout.p})"
        return "has a causal convolution as its shortcut" if self.use_conv_shortcut else None

    def forward(
        self,
        inputs: torch.Tensor,
        temb: torch.Tensor | None = None,
        zq: torch.Tensor | None = None,
        conv_cache: Cache | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """Run the block on a chunk; return the result and the next cache.

        The VAE passes no time embedding `temb`, which no kernel takes.
        """
        if temb is not None or not runs_kernel(self, inputs):
            return super().forward(inputs, temb, zq, conv_cache)  # pyright: ignore[reportReturnType]
        cache = conv_cache or {}
        new_cache: Cache = {}
        shortcut = inputs if self.in_channels == self.out_channels else self.conv_shortcut(inputs)
        # The first convolution's kernel also returns the moments of its result, which the second norm needs.
        hidden, new_cache["conv1"], column_moments = _normed_conv(
            self.norm1, self.conv1, inputs, zq, cache.get("conv1")
        )
        hidden, new_cache["conv2"], _column_moments = _normed_conv(
            self.norm2, self.conv2, hidden, zq, cache.get("conv2"), column_moments, residual=shortcut
        )
        return hidden, new_cache


def _normed_conv(
    norm: Any,
    causal: Any,
    hidden: torch.Tensor,
    zq: Any,
    conv_cache: torch.Tensor | None,
    moments: Any = None,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Run a norm, SiLU and a convolution as one kernel; return the result, the next cache and moments.

    The moments are the result's, or None if no kernel has computed them. The argument `moments` are those of
    `hidden`, if they are known.
    """
    conv = causal.conv
    group_norm = norm  # the GroupNorm by itself, or, below, the one in a spatial norm
    # For a spatial norm: the latents, then the kernel and the bias of their convolution to the norm's factors
    # (y), then of that to its addends (b).
    modulation: tuple[Any, ...] = ()
    if isinstance(norm, SpatialNorm3D):
        group_norm, conv_y, conv_b = norm.norm_layer, norm.conv_y.conv, norm.conv_b.conv
        modulation = (_channels_last(zq), _matrix(conv_y), conv_y.bias, _matrix(conv_b), conv_b.bias)
    y, new_cache, new_moments = torch_view(jax_kernels.norm_conv3d)(
        _channels_last(hidden),
        jax_kernels.NormParams(group_norm.weight, group_norm.bias, *modulation),
        _taps_first(conv.weight),
        conv.bias,
        None if conv_cache is None else _channels_last(conv_cache),
        moments,
        num_groups=group_norm.num_groups,
        eps=group_norm.eps,
        first_frame_alone=first_frame_is_alone(hidden.shape[2]),
        residual=None if residual is None else _channels_last(residual),
        split=causal.split,
    )
    return _channels_first(y), None if new_cache is None else _channels_first(new_cache), new_moments


class Upsample3D(OnColumns, CogVideoXUpsample3D):
    """The upsampler, by `jax_kernels.upsample`."""

    parts: Parts = {"conv": (nn.Conv2d,)}  # noqa: RUF012 - read only

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not runs_kernel(self, inputs):
            return super().forward(inputs)
        y = torch_view(jax_kernels.upsample)(
            _channels_last(inputs),
            _taps_first(self.conv.weight),
            self.conv.bias,
            expand_time=self.compress_time,
            first_frame_alone=first_frame_is_alone(inputs.shape[2]),
            split=self.split,
        )
        return _channels_first(y)


class Downsample3D(OnColumns, CogVideoXDownsample3D):
    """The downsampler, by `jax_kernels.downsample`."""

    parts: Parts = {"conv": (nn.Conv2d,)}  # noqa: RUF012 - read only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not runs_kernel(self, x):
            return super().forward(x)
        y = torch_view(jax_kernels.downsample)(
            _channels_last(x),
            _taps_first(self.conv.weight),
            self.conv.bias,
            compress_time=self.compress_time,
            first_frame_alone=first_frame_is_alone(x.shape[2]),
            split=self.split,
        )
        return _channels_first(y)


class CogVideoXDecoder3D(diffusers_vae.CogVideoXDecoder3D):
    """The decoder, whose last norm, activation and convolution run as one kernel."""

    parts: Parts = {  # noqa: RUF012 - read only
        "norm_out": (SpatialNorm3D,),
        "conv_act": (SiLU,),
        "conv_out": (CausalConv3d,),
    }

    def forward(
        self, sample: torch.Tensor, temb: torch.Tensor | None = None, conv_cache: Cache | None = None
    ) -> tuple[torch.Tensor, Cache]:
        """Decode a chunk `sample` of latents; return its frames and the next cache.

        The VAE passes no time embedding `temb`.
        """
        if not runs_kernel(self, sample):
            return super().forward(sample, temb, conv_cache)  # pyright: ignore[reportReturnType]
        cache = conv_cache or {}
        new_cache: Cache = {}
        hidden, new_cache["conv_in"] = self.conv_in(sample, conv_cache=cache.get("conv_in"))
        blocks = {f"up_block_{index}": block for index, block in enumerate(self.up_blocks)}
        uses_checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        for name, block in {"mid_block": self.mid_block, **blocks}.items():
            run_block: Any = block
            if uses_checkpointing:  # a backward pass then computes the block's activations again
                run_block = functools.partial(self._gradient_checkpointing_func, block)  # pyright: ignore
            # diffusers' function for checkpointing takes no keywords: (hidden, temb, zq, conv_cache).
            hidden, new_cache[name] = run_block(hidden, temb, sample, cache.get(name))
        hidden, new_cache["conv_out"], _column_moments = _normed_conv(
            self.norm_out, self.conv_out, hidden, sample, cache.get("conv_out")
        )
        return hidden, new_cache


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
        if type(module) in PORTED:
            module.__class__ = PORTED[type(module)]
