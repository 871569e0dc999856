"""Causal 3-D convolution with a cache of past frames, in five formulations behind one signature."""

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.columns import (
    add_from_neighbours,
    by_platform,
    by_shards,
    has_neighbours,
    jit_kernel,
    with_clear_padding,
)
from jax_kernels.layout import (
    conv_frames,
    frames_first,
    is_large,
    kept_columns_last,
    kept_pixels_first,
    pixels_first,
    precision_for,
    select_frames,
    zero_of,
)
from jax_kernels.tpu.shifted_copies import shifted_copies, takes
from jax_kernels.tpu.tiles import LANES

Implementation = Literal["direct", "summed", "folded", "copied", "narrow"]
Columns = tuple[int, int]

FEW = 16
"""Output channels of all taps together that leave a TPU's matrix unit nearly empty."""

TOGETHER = 16
"""Columns that the narrow form computes together (v6e, 128 to 3 channels at 8 x 480 x 720: 7.4 ms one by one,
3.5 with 4 of them, 3.0 with 8, 2.6 with 16, the taps apart)."""

Form = Callable[[Array, Array, Columns], Array]


@jit_kernel(static_argnames=["implementation"])
def conv3d(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kt kh kw I O"],
    bias: Float[Array, " O"] | None = None,
    cache: Float[Array, "N kt-1 H W I"] | None = None,
    *,
    residual: Float[Array, "N T H W O"] | None = None,
    after: Float[Array, "N T H W O"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "N T H W O"], Float[Array, "N kt-1 H W I"] | None]:
    """3-D convolution, causal in time and zero-padded to the same size in space.

    A frame sees itself and the kt - 1 frames before it: those of `cache`, or, at the start of a video, its
    first frame repeated (diffusers' `CogVideoXCausalConv3d` with `pad_mode="first"`). Sums are float32,
    rounded once.

    Args:
        x: a batch of frames.
        kernel: odd in space; `x`'s dtype.
        bias: (O,), or None.
        cache: what the call on the frames before returned, in `x`'s dtype; None at the start.
        residual: added to the sums before they are rounded, or None.
        after: the result is computed when this has been, for the sake of memory; or None.
        implementation: "direct" is one 3-D convolution; "summed" adds kt 2-D convolutions; "folded" is one
            2-D convolution over kt * I channels; "copied" is that with the taps' frames written by a Pallas
            kernel, for TPUs (`shifted_copies`); "narrow" is one over I channels with the taps, and columns
            next to each other, among its output channels, for finite frames. None takes the fastest known for
            the platform that is compiled for, of those that take `x`.

    Returns:
        The convolved frames, and the cache for the next call (None where kt is 1).

    Raises:
        ValueError: channels, cache, kernel or residual that do not fit each other; an implementation that
            there is not.
    """
    _check(x, kernel, cache, residual)
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {sorted(_IMPLEMENTATIONS)}")
    causal = functools.partial(_causal, implementation=implementation)
    return by_shards(causal, (x, cache, residual, after), (kernel, bias))


def _causal(
    x: Array,
    cache: Array | None,
    residual: Array | None,
    after: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    implementation: Implementation | None,
) -> tuple[Array, Array | None]:
    if after is not None:
        zero = zero_of(after[0, 0, 0, 0, 0])
        bias = zero[None] if bias is None else bias + zero
    if kernel.shape[0] == 1:
        return _finished(_same(x, kernel, _summed), bias, residual, like=x), None
    if cache is None:
        cache = jnp.repeat(x[:, :1], kernel.shape[0] - 1, axis=1)
    inputs = x, cache, residual, kernel, bias
    if implementation is not None:
        return _IMPLEMENTATIONS[implementation](*inputs)
    named = {"tpu": _for_tpu(x, kernel), "cuda": "direct", "default": "summed"}
    forms = {platform: _IMPLEMENTATIONS[name] for platform, name in named.items()}
    return by_platform(*inputs, **forms)


def _for_tpu(x: Array, kernel: Array) -> Implementation:
    """The fastest formulation by the v6e compiler's estimate, measured for CogVideoX's own layer sizes.

    The 3-D form wins while a frame is small; on large ones its relayouts cost more than folding the taps'
    copies.
    """
    if not is_large(x):
        return "direct"
    if _is_narrow(kernel):
        return "narrow"
    return "copied" if takes(x, past=kernel.shape[0] - 1) else "folded"


def _is_narrow(kernel: Array) -> bool:
    """Whether its channels are few enough, on a device that has all columns. A decoder whose shards took that
    form was planned with 20 ms and 1.5 GB more (docs/performance.md)."""
    return kernel.shape[0] * kernel.shape[4] <= FEW and not has_neighbours()


def _direct(frames: Array, kernel: Array, columns: Columns) -> Array:
    return lax.conv_general_dilated(
        frames,
        kernel,
        window_strides=(1, 1, 1),
        padding=((0, 0), *_padding(kernel, columns)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision_for(frames.dtype),
        preferred_element_type=jnp.float32,
    )


def _summed(frames: Array, kernel: Array, columns: Columns) -> Array:
    return functools.reduce(
        jnp.add,
        (
            conv_frames(tap, kernel[index], padding=_padding(kernel, columns))
            for index, tap in enumerate(_taps(frames, kernel))
        ),
    )


def _folded(frames: Array, kernel: Array, columns: Columns) -> Array:
    return _stacked(_taps(frames, kernel), kernel, columns)


def _narrow(frames: Array, kernel: Array, columns: Columns) -> Array:
    taps, _, reach, _, out = kernel.shape
    videos, length, height, width, _ = frames.shape
    width += sum(columns) - (reach - 1)
    together = next(n for n in range(min(TOGETHER, width), 0, -1) if width % n == 0)
    each = jnp.concatenate(list(kernel), axis=-1)
    # A window moves by many columns, over all that they see.
    windows = [jnp.pad(each, [(0, 0), (i, together - 1 - i), (0, 0), (0, 0)]) for i in range(together)]
    kernel_HWIO = jnp.concatenate(windows, axis=-1)
    y = conv_frames(frames, kernel_HWIO, padding=_padding(kernel, columns), stride=(1, together))
    # Frames are added where they have few channels: no copies of them lie under the taps.
    y = y.reshape(videos, length, height, width, taps, out)
    return functools.reduce(
        jnp.add, (y[:, tap : tap + length - taps + 1, ..., tap, :] for tap in range(taps))
    )


def _taps(frames: Array, kernel: Array) -> list[Array]:
    """The frames under each tap of the kernel."""
    taps = kernel.shape[0]
    length = frames.shape[1] - taps + 1
    return [frames[:, tap : tap + length] for tap in range(taps)]


def _stacked(taps: list[Array], kernel: Array, columns: Columns) -> Array:
    folded = jnp.concatenate(list(kernel), axis=2)
    return conv_frames(jnp.concatenate(taps, axis=-1), folded, padding=_padding(kernel, columns))


def _by_xla(
    x: Array,
    cache: Array,
    residual: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    form: Form,
) -> tuple[Array, Array]:
    past = cache.shape[1]
    frames = jnp.concatenate([cache, x], axis=1)
    y = _finished(_same(frames, kernel, form), bias, residual, like=x)
    # From x alone where it is long enough, and after the old cache was read: a donated cache whose memory is
    # written while something still reads it is one that XLA copies first.
    latest = x if x.shape[1] >= past else frames
    return y, select_frames(latest, range(latest.shape[1] - past, latest.shape[1]), after=y)


def _copied(
    x: Array, cache: Array, residual: Array | None, kernel: Array, bias: Array | None
) -> tuple[Array, Array]:
    # One array for the kernel and for the products, which would else each have their own made.
    x = frames_first(lax.optimization_barrier(pixels_first(x)))
    # Where a decoder's channels narrow its memory peaks.
    copies, latest = shifted_copies(cache, x, kernel.shape[3] > kernel.shape[4] >= LANES)
    sums = _stacked([*copies, x], kernel, _same_columns(kernel))
    frames = jnp.concatenate([cache, x], axis=1)  # of which a shard makes the columns that it sends
    return _finished(add_from_neighbours(sums, frames, kernel, _folded), bias, residual, like=x), latest


def _same(frames: Array, kernel: Array, form: Form) -> Array:
    """The sums of the convolution that is zero-padded to the same size in space."""
    return add_from_neighbours(form(frames, kernel, _same_columns(kernel)), frames, kernel, form)


def _same_columns(kernel: Array) -> Columns:
    return kernel.shape[2] // 2, kernel.shape[2] // 2


def _finished(sums: Array, bias: Array | None, residual: Array | None, *, like: Array) -> Array:
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    if residual is not None:
        sums = sums + residual.astype(jnp.float32)
    y = with_clear_padding(sums.astype(like.dtype))
    if not is_large(like):
        return y
    if y.shape[-1] >= LANES:
        return kept_pixels_first(y)
    return kept_columns_last(y) if y.shape[-1] <= FEW and not has_neighbours() else y


_IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "direct": functools.partial(_by_xla, form=_direct),
    "summed": functools.partial(_by_xla, form=_summed),
    "folded": functools.partial(_by_xla, form=_folded),
    "copied": _copied,
    "narrow": functools.partial(_by_xla, form=_narrow),
}


def _padding(kernel: Array, columns: Columns) -> tuple[tuple[int, int], Columns]:
    """Zeros for as many rows as there are, and these columns to the left and right."""
    rows = kernel.shape[1] // 2
    return (rows, rows), columns


def _check(x: Array, kernel: Array, cache: Array | None, residual: Array | None) -> None:
    if x.ndim != 5 or kernel.ndim != 5:
        raise ValueError(
            f"conv3d got x {x.shape} and kernel {kernel.shape}: it needs N T H W I and kt kh kw I O"
        )
    if x.shape[-1] != kernel.shape[3]:
        raise ValueError(f"conv3d got {x.shape[-1]} channels for a kernel that takes {kernel.shape[3]}")
    if kernel.shape[1] % 2 == 0 or kernel.shape[2] % 2 == 0:
        raise ValueError(
            f"conv3d got a kernel of {kernel.shape[1]} x {kernel.shape[2]} pixels: both must be odd"
        )
    wanted = (x.shape[0], kernel.shape[0] - 1, *x.shape[2:])
    if cache is not None and (cache.shape, cache.dtype) != (wanted, x.dtype):
        raise ValueError(
            f"conv3d got a cache {cache.dtype}{cache.shape}: {x.dtype}{wanted} goes with x {x.dtype}{x.shape}"
        )
    wanted = (*x.shape[:4], kernel.shape[4])
    if residual is not None and residual.shape != wanted:
        raise ValueError(f"conv3d got a residual of shape {residual.shape} for a result of {wanted}")
