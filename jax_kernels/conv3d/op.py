"""Causal 3-D convolution with a cache of past frames; five implementations behind one signature.

A TPU computes the frames of a call in *runs*, one after the other (`common.frames`): the first frame by
itself if their number is odd, then two, four or eight frames at a time. Elsewhere a call is one run.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import check_convolution, is_large, join_frames, split_frames
from jax_kernels.common.pointwise import check_choice
from jax_kernels.conv3d import xla

Implementation = Literal["direct", "summed", "filtered", "folded", "patches"]


def conv3d(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kt kh kw I O"],
    bias: Float[Array, " O"] | None = None,
    cache: Float[Array, "N kt-1 H W I"] | None = None,
    *,
    residual: Float[Array, "N T H W O"] | None = None,
    implementation: Implementation | None = None,
    split: Split = WHOLE,
) -> tuple[Float[Array, "N T H W O"], Float[Array, "N kt-1 H W I"] | None]:
    """Convolve in 3-D, causal in time and zero-padded to the same size in space.

    A frame sees itself and the kt - 1 frames before it: the frames of `cache`, or, at the start of a video,
    its first frame again. Sums are float32, rounded once.

    Args:
        x: frames.
        kernel: odd in space; `x`'s dtype.
        bias: (O,), or None.
        cache: second result of the call on the frames before, in `x`'s dtype; None at the start of a video.
        residual: added to the sums before they are rounded, or None.
        implementation: "direct" is one 3-D convolution; "summed" adds kt 2-D convolutions; "filtered" is the
            same, for kt = 3, but takes fewer products on a CPU; "folded" is one 2-D convolution over kt * I
            channels; "patches" is one matrix product over all pixels of a window, for few channels. None
            takes the fastest known for the platform that is compiled for.
        split: the sharding of columns.

    Returns:
        The convolved frames, and the cache for the next call (None where kt is 1).

    Raises:
        ValueError: channels, bias, cache, kernel or residual that do not fit each other; an unknown
            implementation.
    """
    check_conv3d(x, kernel, bias, cache, residual)
    check_choice("implementation", implementation, None, *_IMPLEMENTATIONS)
    return dispatch(
        conv3d_on,
        x,
        kernel,
        bias,
        cache,
        residual,
        implementation=implementation,
        split=split,
    )


def conv3d_on(
    target: Target,
    x: Array,
    kernel: Array,
    bias: Array | None,
    cache: Array | None,
    residual: Array | None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Array, Array | None]:
    """Compute `conv3d` for a target: one run of frames after the other, each on all devices."""
    results = []
    for frames, run_residual in split_frames(target, x, residual):
        # The cache that a run returns has the frames before the next run.
        y, cache = map_shards(
            target,
            functools.partial(_convolve_run, implementation=implementation),
            (frames, cache, run_residual),
            (kernel, bias),
        )
        results.append(y)
    return join_frames(results), cache


def _convolve_run(
    target: Target,
    x: Array,
    cache: Array | None,
    residual: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    implementation: Implementation | None,
) -> tuple[Array, Array | None]:
    """Convolve a run of frames after the frames of `cache`, on one device; return result and next cache."""
    # A kernel of one tap in time has no cache and ignores `implementation`.
    if kernel.shape[0] == 1:
        sums = xla.convolve_same(target, x, kernel, xla.image_form(target, x, kernel))
        return xla.finish(target, sums, bias, residual, like=x), None
    # A video's first frame, computed as a run by itself, takes one 2-D convolution.
    if cache is None and x.shape[1] == 1 and implementation is None:
        return xla.convolve_image(target, x, residual, kernel, bias)
    # The function that returns the convolution's sums in float32.
    form = _IMPLEMENTATIONS[implementation or _fastest(target, x, kernel)]
    if cache is None:
        if form is xla.filtered_on_cpu:
            form = functools.partial(form, at_start=True)  # the first frame and its copies share products
        cache = jnp.repeat(x[:, :1], kernel.shape[0] - 1, axis=1)
    return xla.convolve_frames(target, x, cache, residual, kernel, bias, form=form)


def _fastest(target: Target, x: Array, kernel: Array) -> Implementation:
    """Return the implementation that is fastest, as far as known.

    For a TPU this follows the v6e compiler's estimates of CogVideoX's layers. "direct" is the fastest for
    small frames; for large ones its changes of memory layout cost more than the copies that "folded" makes of
    frames. Elsewhere 2-D convolutions are summed: on an H200 a decoding with 3-D convolutions did not end
    within 100 s, compiling included.
    """
    if not target.on_tpu:
        # A CPU may filter in float32, and by three taps of time.
        return "filtered" if x.dtype == jnp.float32 and kernel.shape[0] == xla.TAPS else "summed"
    if xla.suits_patches(x, kernel):
        return "patches"
    return "folded" if is_large(x) else "direct"


_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "direct": xla.direct,
    "summed": xla.summed,
    "filtered": xla.filtered_on_cpu,
    "folded": xla.folded,
    "patches": xla.patches,
}


def check_conv3d(
    x: Array, kernel: Array, bias: Array | None, cache: Array | None, residual: Array | None
) -> None:
    """Raise `ValueError` for arrays that `conv3d` does not take."""
    check_convolution("conv3d", x, kernel, bias, "kt kh kw I O")
    cache_shape = (x.shape[0], kernel.shape[0] - 1, *x.shape[2:])
    if cache is not None and (cache.shape, cache.dtype) != (cache_shape, x.dtype):
        raise ValueError(
            f"conv3d got a cache {cache.dtype}{cache.shape}: "
            f"{x.dtype}{cache_shape} goes with x {x.dtype}{x.shape}"
        )
    result_shape = (*x.shape[:4], kernel.shape[4])
    if residual is not None and residual.shape != result_shape:
        raise ValueError(f"conv3d got a residual of shape {residual.shape} for a result of {result_shape}")
