"""The ported modules: diffusers' own classes, with a second way to run.

Each class here is a subclass of the class that it replaces, and adds no state. Its forward runs a kernel of
`jax_kernels` for a tensor on an accelerator. For a plain tensor, and where a hook or a change of the module
needs it, the forward of diffusers runs. `port` swaps a module's class in place, so parameters, names, hooks
and `isinstance` stay what they were. On JAX a norm and the activation after it are one call, so their hooks
see other tensors than in diffusers. `by_kernel` says whether a module may run its kernel on a tensor,
`is_watched` whether it has a hook or a replaced forward, and `_as_ported` whether its submodules, whose
weights the kernel reads, are unchanged. `torch_view` turns a function of JAX arrays into one of tensors.

A causal convolution's cache (`conv_cache`) is its last input frames, which the next chunk takes. A block's
cache has its modules' caches by name. `zq`, as in diffusers, are the latents that modulate a spatial norm.
`first_frame_alone` says that the first frame belongs to no pair, and has a latent frame to itself. *Moments*
are a mean and a sum of squared deviations for each column of pixels, from which the next norm takes its
statistics. `split` is the sharding of the width over devices. Its padding columns are zero, and PyTorch's
operations may overwrite them.

Axis letters: N videos, C channels, T frames, H rows, W columns; O and I are the output and input channels of
a kernel.
"""

import functools
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as diffusers_vae
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import nn

import jax_kernels
from cogvideox_torchax.runtime import on_accelerator, torch_view
from cogvideox_torchax.runtime.layers import as_layer, by_kernel, is_watched
from cogvideox_torchax.upstream import is_patched
from cogvideox_torchax.vae.chunks import first_frame_is_alone
from cogvideox_torchax.vae.columns import OnColumns
from jax_kernels.common.columns import WHOLE, Split, with_clear_padding

Cache = dict[str, Any]


def _channels_last(x_NCTHW: torch.Tensor) -> torch.Tensor:
    return x_NCTHW.permute(0, 2, 3, 4, 1)


def _channels_first(x_NTHWC: torch.Tensor) -> torch.Tensor:
    return x_NTHWC.permute(0, 4, 1, 2, 3)


def _taps_first(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return a torch convolution's weight (O, I, *window) as `jax_kernels` takes it, (*window, I, O)."""
    return weight_OI.permute(*range(2, weight_OI.ndim), 1, 0)


def _as_ported(module: nn.Module) -> bool:
    """Return whether all submodules are as `port` left them: of the types in `PARTS`, and without hooks."""
    parts = (part for part in module.modules() if part is not module)
    return all(type(part) in PARTS and not is_watched(part) for part in parts)


def with_zero_padding(x_NCTHW: torch.Tensor, split: Split) -> torch.Tensor:
    """Return `x_NCTHW` with zeros in the padding columns; only tensors on JAX have any."""
    # Columns are the last axis of NCTHW.
    return torch_view(with_clear_padding)(x_NCTHW, split, 4) if on_accelerator(x_NCTHW) else x_NCTHW


def _matrix(conv: nn.Conv3d) -> torch.Tensor:
    """Return a 1x1x1 convolution's kernel as a matrix (I, O)."""
    return conv.weight[:, :, 0, 0, 0].T


def _activated(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation, or none, to the result of a norm that ran without its kernel.

    Raises:
        ValueError: an activation is given for a tensor in PyTorch, where a separate module applies it.
    """
    if activation is None:
        return y
    if not on_accelerator(y):
        raise ValueError(f"got activation={activation!r} for a norm without a kernel: apply it afterwards")
    return torch_view(getattr(jax_kernels, activation))(y)


class GroupNorm(OnColumns, nn.GroupNorm):
    """GroupNorm with statistics in float32, and the activation after it, by `jax_kernels.group_norm`."""

    def forward(self, input: torch.Tensor, *, activation: str | None = None) -> torch.Tensor:
        if not by_kernel(self, input) or input.ndim < 3:  # the kernel needs an axis of pixels
            return _activated(super().forward(input), activation)
        return torch_view(jax_kernels.group_norm)(
            input,
            self.weight,
            self.bias,
            num_groups=self.num_groups,
            eps=self.eps,
            activation=activation,
            split=self.split if input.ndim == 5 else WHOLE,  # only (N, C, T, H, W) has columns to split
        )


class SiLU(nn.SiLU):
    """SiLU, computed in float32 and rounded once, by `jax_kernels.silu`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not by_kernel(self, input):
            return super().forward(input)
        # By `time_axis` the kernel finds the frames of (N, C, T, H, W). It computes a few of them at a time,
        # which saves memory on a TPU.
        return torch_view(jax_kernels.silu)(input, time_axis=2 if input.ndim == 5 else None)


class SafeConv3d(OnColumns, diffusers_vae.CogVideoXSafeConv3d):
    """A 3-D convolution; on JAX `jax_kernels.conv3d` computes it if its window is 1x1x1 and its stride 1.

    Diffusers' forward would cut the input into parts, to save memory.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not by_kernel(self, input) or self.kernel_size != (1, 1, 1) or self.stride != (1, 1, 1):
            return super().forward(input)
        y, _no_cache = torch_view(jax_kernels.conv3d)(
            _channels_last(input), _taps_first(self.weight), self.bias, split=self.split
        )
        return _channels_first(y)


class CausalConv3d(OnColumns, diffusers_vae.CogVideoXCausalConv3d):
    """The causal convolution, by `jax_kernels.conv3d`."""

    @property
    def suits_kernels(self) -> bool:
        """Whether the kernels can compute this convolution."""
        return (
            _as_ported(self)  # else `conv` may be a LoRA's layer, which has no `stride`
            and self.conv.stride == self.conv.dilation == (1, 1, 1)
            and self.pad_mode != "replicate"  # which also repeats edge rows and columns, and has no cache
        )

    def forward(
        self,
        inputs: torch.Tensor,
        conv_cache: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolve, and add `residual`; return the result and the next cache.

        The next cache is None if the kernel has one tap of time.
        """
        conv = self.conv
        if not by_kernel(self, inputs) or not self.suits_kernels:
            y, new_cache = super().forward(inputs, conv_cache)
            return with_zero_padding(y if residual is None else y + residual, self.split), new_cache
        cache, residual = (None if x is None else _channels_last(x) for x in (conv_cache, residual))
        y, new_cache = torch_view(jax_kernels.conv3d)(
            _channels_last(inputs),
            _taps_first(conv.weight),
            conv.bias,
            cache,
            residual=residual,
            # Without a cache, the first frame is repeated before the chunk. Unlike diffusers' `pad_mode` of
            # this name, this repeats no rows and columns: beyond the frame are zeros.
            start="replicate",
            split=self.split,
        )
        return _channels_first(y), None if new_cache is None else _channels_first(new_cache)


class SpatialNorm3D(OnColumns, diffusers_vae.CogVideoXSpatialNorm3D):
    """GroupNorm, its modulation by latents and the activation, by `jax_kernels.spatial_norm`."""

    def forward(
        self,
        f: torch.Tensor,
        zq: torch.Tensor,
        conv_cache: Cache | None = None,
        *,
        activation: str | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """Norm `f`, modulate it by the latents, and apply an activation; return the result and a cache.

        On an accelerator the cache is empty, because convolutions of 1x1x1 need none.
        """
        if not by_kernel(self, f) or not _as_ported(self):
            y, new_cache = super().forward(f, zq, conv_cache)
            # Diffusers' 1x1x1 convolutions return their whole input as a cache, which nothing reads. In a
            # program it would be one more result, and take memory.
            cache: Any = {} if on_accelerator(f) else new_cache
            return with_zero_padding(_activated(y, activation), self.split), cache
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
            activation=activation,
            first_frame_alone=first_frame_is_alone(f.shape[2]),
            split=self.split,
        )
        return _channels_first(y), {}


class ResnetBlock3D(diffusers_vae.CogVideoXResnetBlock3D):
    """The residual block, in which a norm and a convolution run as one, by `jax_kernels.norm_conv3d`.

    If the norm or the convolution has a hook, two kernels run. The norm's kernel also applies the activation,
    and that of the second convolution adds the shortcut. So on JAX a hook on a norm sees the result after the
    activation, a hook on `conv2` sees the sum with the shortcut, and a hook on `nonlinearity` is not called.
    """

    def forward(
        self,
        inputs: torch.Tensor,
        temb: torch.Tensor | None = None,
        zq: torch.Tensor | None = None,
        conv_cache: Cache | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """Run the block on a chunk; return the result and the next cache.

        Diffusers' forward also runs for a time embedding `temb`, dropout, and a causal convolution as the
        shortcut (`use_conv_shortcut`).
        """
        has_dropout = self.training and self.dropout.p > 0
        is_ported = all(isinstance(conv, CausalConv3d) for conv in (self.conv1, self.conv2))
        has_other_parts = temb is not None or self.use_conv_shortcut or has_dropout
        if not by_kernel(self, inputs) or not is_ported or has_other_parts:
            return super().forward(inputs, temb, zq, conv_cache)  # pyright: ignore[reportReturnType]
        cache = conv_cache or {}
        new_cache: Cache = {}
        shortcut = inputs if self.in_channels == self.out_channels else self.conv_shortcut(inputs)
        # The first convolution's kernel also returns the moments of its result, which the second norm needs.
        hidden, new_cache["conv1"], column_moments = self._normed_conv(
            self.norm1, self.conv1, inputs, zq, cache.get("conv1")
        )
        hidden, new_cache["conv2"], _column_moments = self._normed_conv(
            self.norm2, self.conv2, hidden, zq, cache.get("conv2"), column_moments, residual=shortcut
        )
        return hidden, new_cache

    def _normed_conv(
        self,
        norm: nn.Module,
        conv: nn.Module,
        hidden: torch.Tensor,
        zq: torch.Tensor | None,
        conv_cache: torch.Tensor | None,
        moments: Any = None,
        **options: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Apply a norm, the activation and a convolution; return the result, the next cache and moments.

        The moments are the result's, or None without the fused kernel. The argument `moments` are those of
        `hidden`, if they are known. `options` may have a `residual`, which is added.
        """
        is_silu = isinstance(self.nonlinearity, nn.SiLU) and not is_patched(type(self.nonlinearity))
        if not is_silu or not _can_fuse(norm, conv):
            # The ported norms can apply SiLU themselves.
            norm_activates = is_silu and isinstance(norm, GroupNorm | SpatialNorm3D)
            keywords = {"activation": "silu"} if norm_activates else {}
            normed = norm(hidden, **keywords) if zq is None else norm(hidden, zq, **keywords)
            normed = normed[0] if isinstance(normed, tuple) else normed  # without a spatial norm's cache
            hidden = normed if norm_activates else self.nonlinearity(normed)
            return *conv(hidden, conv_cache=conv_cache, **options), None  # `conv` returns (result, cache)
        return _fused_norm_conv(norm, conv, hidden, zq, conv_cache, moments, **options)


def _can_fuse(norm: nn.Module, conv: nn.Module) -> bool:
    """Return whether `jax_kernels.norm_conv3d` can compute both modules, and neither has a hook."""
    return (
        type(norm) in (GroupNorm, SpatialNorm3D)
        and type(conv) is CausalConv3d
        and not is_watched(norm)
        and not is_watched(conv)
        # The kernel computes both as they were ported, without a LoRA or a hook inside.
        and _as_ported(norm)
        and conv.suits_kernels
    )


def _fused_norm_conv(
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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not by_kernel(self, inputs) or not _as_ported(self):
            return with_zero_padding(super().forward(inputs), self.split)
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not by_kernel(self, x) or not _as_ported(self):
            return with_zero_padding(super().forward(x), self.split)
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
    """The decoder, whose last norm, activation and convolution run as one kernel.

    If the norm or the activation has a hook, diffusers' forward runs, and the hook sees what it would see in
    diffusers. If only the convolution has a hook, the norm and the activation run as one kernel before it.
    """

    def forward(
        self, sample: torch.Tensor, temb: torch.Tensor | None = None, conv_cache: Cache | None = None
    ) -> tuple[torch.Tensor, Cache]:
        """Decode a chunk `sample` of latents; return its frames and the next cache.

        The VAE passes no time embedding `temb`.
        """
        norm, activation = self.norm_out, self.conv_act
        is_ported = type(norm) is SpatialNorm3D and type(activation) is SiLU
        if not by_kernel(self, sample) or not is_ported or is_watched(norm) or is_watched(activation):
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
        conv, out_cache = self.conv_out, cache.get("conv_out")
        if not _can_fuse(norm, conv):
            hidden, _no_cache = norm(hidden, sample, activation="silu")
            hidden, new_cache["conv_out"] = conv(hidden, conv_cache=out_cache)
        else:
            # In profiles the fused kernel runs under the name of `conv`. `[:2]` leaves out the moments, as
            # the convolution returns only frames and a cache.
            norm_and_conv = as_layer(
                conv, lambda hidden: _fused_norm_conv(norm, conv, hidden, sample, out_cache)[:2]
            )
            hidden, new_cache["conv_out"] = norm_and_conv(hidden)
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

PARTS = (nn.Conv2d, GroupNorm, SafeConv3d, CausalConv3d)
"""The types of submodules that the kernel of the layer above them computes too, unless they have hooks."""


def port_modules(root: nn.Module) -> None:
    """Give each module in `root` that `PORTED` lists its ported class, in place."""
    for module in root.modules():
        if type(module) in PORTED:
            module.__class__ = PORTED[type(module)]
