"""Spatially conditioned GroupNorm, `group_norm(x) * y + b`, where y and b are convolutions of latents `zq`.

A *target* is the platform that the code is traced for, with the split of columns into *shards*, one for each
device. `dispatch` passes it to the body of an op, named `OP_on`.
"""

from typing import Any

from jaxtyping import Array, Float

from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import join_frames, split_frames
from jax_kernels.common.pointwise import Activation, check_choice
from jax_kernels.group_norm.op import check_groups, moments, scale_and_shift
from jax_kernels.spatial_norm import xla


def spatial_norm(
    x: Float[Array, "N T H W C"],
    zq: Float[Array, "N t h w Z"],
    weight: Float[Array, " C"],
    bias: Float[Array, " C"],
    kernel_y: Float[Array, "Z C"],
    bias_y: Float[Array, " C"],
    kernel_b: Float[Array, "Z C"],
    bias_b: Float[Array, " C"],
    *,
    num_groups: int,
    eps: float = 1e-6,
    activation: Activation | None = None,
    first_frame_alone: bool = False,
    split: Split = WHOLE,
) -> Float[Array, "N T H W C"]:
    """Return `group_norm(x) * conv_y(zq) + conv_b(zq)`, with `zq` upsampled to `x` by nearest neighbour.

    The source is MoVQ, arXiv 2209.09002. A 1x1x1 convolution commutes with nearest upsampling: both
    convolutions are computed for the latents' rows, and their results are repeated for the rows of `x`.

    Args:
        x: the activations.
        zq: the latents: H / h, W / w and T / t are whole; see `first_frame_alone` for T.
        weight, bias: GroupNorm's affine.
        kernel_y, bias_y, kernel_b, bias_b: the two 1x1x1 convolutions.
        num_groups, eps: GroupNorm's.
        activation: applied to the result ("silu"), or None.
        first_frame_alone: whether the first latent frame covers the first frame alone; (T - 1) / (t - 1) is
            then whole.
        split: the sharding of columns.

    Returns:
        The shape and dtype of `x`; everything in between is float32.

    Raises:
        ValueError: sizes of `x` that are no whole multiples of the sizes of `zq`; weights of other sizes; an
            unknown activation.
    """
    weights = weight, bias, kernel_y, bias_y, kernel_b, bias_b
    check_spatial_norm(x, zq, *weights, num_groups=num_groups, first_frame_alone=first_frame_alone)
    check_choice("activation", activation, None, "silu")
    return dispatch(
        spatial_norm_on,
        x,
        zq,
        *weights,
        num_groups=num_groups,
        eps=eps,
        activation=activation,
        first_frame_alone=first_frame_alone,
        split=split,
    )


def spatial_norm_on(
    target: Target,
    x: Array,
    zq: Array,
    weight: Array,
    bias: Array,
    kernel_y: Array,
    bias_y: Array,
    kernel_b: Array,
    bias_b: Array,
    *,
    num_groups: int,
    eps: float,
    activation: Activation | None,
    first_frame_alone: bool,
) -> Array:
    """Compute `spatial_norm` for a target: the statistics of all frames, then the result of each run."""
    statistics = scale_and_shift(  # GroupNorm is `x * scale + shift`
        moments(target, x, num_groups=num_groups, channel_axis=-1), weight, bias, eps
    )
    # A run has the activations and the latents of frames that are computed together. On a TPU the first of an
    # odd number of frames is a run by itself, with the first latent frame. That is only right if this latent
    # frame covers the first frame alone. If all frames are one run, its first frame must still be alone.
    runs = split_frames(target, x, zq) if first_frame_alone else [(x, zq)]
    run_has_first_frame_alone = first_frame_alone and len(runs) == 1

    def modulated(target: Target, x: Array, zq: Array, *operands: Any) -> Array:
        """Modulate a run on one device; `operands` are the two convolutions, then scale and shift."""
        zq = xla.match_frames_and_columns(zq, x.shape, first_frame_alone=run_has_first_frame_alone)
        # On a TPU several frames are in memory in the order in which `modulate_pixels` computes.
        form = xla.modulate_pixels if target.on_tpu and x.shape[1] > 1 else xla.modulate_rows
        return form(target, x, zq, *operands, activation=activation)

    # Each run is modulated on all devices at once. A device gets its shard of the run, the convolutions, and
    # the statistics of its videos.
    convolutions = (kernel_y, bias_y), (kernel_b, bias_b)
    return join_frames([map_shards(target, modulated, run, convolutions, statistics) for run in runs])


def check_spatial_norm(
    x: Array,
    zq: Array,
    weight: Array,
    bias: Array,
    kernel_y: Array,
    bias_y: Array,
    kernel_b: Array,
    bias_b: Array,
    *,
    num_groups: int,
    first_frame_alone: bool,
) -> None:
    """Raise `ValueError` for arrays or a number of groups that `spatial_norm` does not take."""
    channels, latent_channels = x.shape[-1], zq.shape[-1]
    check_groups("spatial_norm", channels, num_groups, weight=weight, bias=bias, bias_y=bias_y, bias_b=bias_b)
    # With `first_frame_alone` there are two parts of the latents: the first latent frame, which covers one
    # frame, and the latent frames after it, which cover all other frames.
    for zq_part, frames in xla.frame_parts(zq, x.shape, first_frame_alone):
        sizes = zip((frames, *x.shape[2:4]), zq_part.shape[1:4], strict=True)  # a pair for each axis
        if any(zq_size == 0 or size % zq_size for size, zq_size in sizes):
            raise ValueError(
                f"spatial_norm got latents {zq.shape} for activations {x.shape}: frames, rows and "
                "columns of the activations must be whole multiples of the latents'"
            )
    for kernel in (kernel_y, kernel_b):
        if kernel.shape != (latent_channels, channels):
            raise ValueError(
                f"spatial_norm got a kernel of shape {kernel.shape} for latents of {latent_channels} "
                f"channels and activations of {channels}: it needs ({latent_channels}, {channels})"
            )
