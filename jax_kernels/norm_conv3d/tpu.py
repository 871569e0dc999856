"""Modulation, SiLU, a causal 3 x 3 x 3 convolution, bias and residual in one Pallas kernel, for TPUs.

Only the frames before and after it are stored in HBM, with whole tiles of channels. `step` is the work of a
grid step and defines the terms: block, strip, chunk, unit, part, word, edges. `direct` and `winograd` are the
two ways to multiply; `sizes` chooses between them. This file has the operands, results and derivatives.

A v6e schedules 2.5 ms for 128 channels of 8 x 480 x 720, and directly convolved 3.85, of which 2.7 are its
matrix units' peak; XLA's convolution alone takes 5.4.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from jax_kernels.common import tiles
from jax_kernels.common.columns import add_columns
from jax_kernels.common.dispatch import with_derivatives_of
from jax_kernels.common.frames import repeat_nearest
from jax_kernels.common.layout import kernel_layout
from jax_kernels.common.tiles import vmem_limit
from jax_kernels.conv3d import xla
from jax_kernels.group_norm.xla import column_moments
from jax_kernels.norm_conv3d import direct, winograd
from jax_kernels.norm_conv3d.sizes import (
    LAG,
    ROWS,
    SUBLANES,
    TAPS,
    ConvSizes,
    columns_of_register,
    fills_registers,
    scratch_shapes,
    sizes_of,
)
from jax_kernels.norm_conv3d.step import grid_position
from jax_kernels.norm_conv3d.transforms import transformed_taps

RAGGED_IN_PLACE = True
"""True if the next cache reuses the memory of the last one where columns are no whole chunks.

JAX's interpreters run no blocks that reach beyond such an argument: tests compile it for TPUs and do not run
it.
"""


def to_registers(z: Shaped[Array, "N t h w Z"], frames: int, columns: int) -> Shaped[Array, "N h v S Z"]:
    """Repeat `z`, one value for each latent, to registers: the form in which the kernel reads coefficients.

    A register (S = 8 rows) has a row for each frame of a pixel, for as many pixels as fit. v, the registers
    of a row of pixels, is w if one latent's pixels fill whole registers; else it is as many as the row fills.
    """
    register_pixels, cell = SUBLANES // frames, columns // z.shape[3]
    z = repeat_nearest(z.transpose(0, 2, 3, 1, 4), {3: frames // z.shape[1]})
    if z.shape[2] == 1 or fills_registers(cell, frames):
        return jnp.concatenate([z] * register_pixels, axis=3)
    z = repeat_nearest(z, {2: cell})
    z = jnp.pad(z, [(0, 0), (0, 0), (0, -columns % register_pixels), (0, 0), (0, 0)])
    return z.reshape(*z.shape[:2], -1, SUBLANES, z.shape[-1])


def _over_pixels(part: Float[Array, "N h v S C"], x: Float[Array, "N T H W C"]) -> Float[Array, "N T H W C"]:
    """Invert `to_registers`: return a coefficient for each pixel of `x`."""
    frames, height, columns, channels = x.shape[1:]
    videos, rows, registers = part.shape[:3]
    register_pixels, cell = SUBLANES // frames, columns_of_register(columns, frames, registers)
    pixels = part.reshape(videos, rows, registers * register_pixels, frames, channels)
    if cell != register_pixels:  # a register holds the same for all pixels that it covers
        pixels = repeat_nearest(pixels[:, :, ::register_pixels], {2: cell})
    pixels = repeat_nearest(pixels[:, :, :columns], {1: height // rows})
    return pixels.transpose(0, 3, 1, 2, 4)


def activated(x: Array, multiplier: Array, offset: Array) -> Array:
    """Return `silu(x * multiplier + offset)` in float32, rounded to the dtype of `x`."""
    return jax.nn.silu(x.astype(jnp.float32) * multiplier + offset).astype(x.dtype)


def _xla_form(
    x: Array,
    multiplier: Array,
    offset: Array,
    cache: Array | None,
    residual: Array | None,
    kernel: Array,
    bias: Array,
    edges: tuple[Array, Array] | None = None,
    true_width: Array | None = None,
) -> Any:
    """Compute what `_by_kernel` does in XLA, for the derivatives."""
    hidden = activated(x, _over_pixels(multiplier, x), _over_pixels(offset, x))
    if cache is None:
        cache = jnp.concatenate([hidden[:, :1]] * 2, axis=1)
    frames = jnp.concatenate([cache, hidden], axis=1)
    sums = xla.summed(frames, kernel, xla.same_width_padding(kernel))
    if edges is not None:
        left, right = edges  # the edges between strips are in the sums already
        sums = add_columns(sums, left[:, :, :, :1], at=0)
        sums = add_columns(sums, right[:, :, :, -1:], at=x.shape[3] - 1)
    sums = xla.add_bias_and_residual(sums, bias, residual)
    if true_width is not None:
        sums = jnp.where(lax.iota(jnp.int32, x.shape[3])[:, None] < true_width, sums, 0.0)
    y = sums.astype(x.dtype)
    latest = frames[:, frames.shape[1] - cache.shape[1] :]
    mean, m2 = column_moments(y)
    return y, latest, (jnp.squeeze(mean, 2), jnp.squeeze(m2, 2))


def _by_kernel(
    x: Float[Array, "N T H W I"],
    multiplier: Float[Array, "N h v S I"],
    offset: Float[Array, "N h v S I"],
    cache: Float[Array, "N 2 H W I"] | None,
    residual: Float[Array, "N T H W O"] | None,
    kernel: Float[Array, "3 3 3 I O"],
    bias: Float[Array, " O"],
    edges: tuple[Float[Array, "N T H E O"], Float[Array, "N T H E O"]] | None = None,
    true_width: Int[Array, ""] | None = None,
) -> tuple[
    Float[Array, "N T H W O"],
    Float[Array, "N 2 H W I"],
    tuple[Float[Array, "N T W O"], Float[Array, "N T W O"]],
]:
    """Run the causal convolution of `silu(x * multiplier + offset)`, and the operations after it.

    Args:
        x: frames that the kernel supports, together with all of these.
        multiplier, offset: float32, `to_registers`; each the same for H / h rows.
        cache: the two activated frames before `x`, whose memory the next ones reuse; None at the start of a
            video, whose first frame then stands before itself.
        residual: added to the sums before they are rounded, or None.
        kernel, bias: the convolution's.
        edges: contributions of the columns beside each strip (`ConvSizes`) to the sums of its first and last
            column, float32; None for a single strip without neighbours.
        true_width: columns from this one on are padding and get zeros; None without padding.

    Returns:
        The convolved frames; the next cache; mean and M2 of each of their columns of pixels.
    """
    _, rows, registers, *_ = multiplier.shape
    outputs = kernel.shape[-1]
    sizes = sizes_of(x, rows, registers, outputs, residual is not None)
    operands, weights = _operands(
        sizes, x, multiplier, offset, cache, residual, kernel, bias, edges, true_width
    )
    results = _results(sizes, operands)
    scratch = {
        name: pltpu.VMEM((*shape, tiles.LANES), dtype)
        for name, (shape, dtype) in scratch_shapes(sizes).items()
    }
    names = [*operands, *results, *scratch]

    def run(*refs: Any) -> None:
        """Run a step on its references by name; those of the weights come first."""
        last = len(refs) - len(names)
        step = winograd.WinogradStep if sizes.tile else direct.DirectStep
        step(sizes, refs[:last], dict(zip(names, refs[last:], strict=True))).run()

    in_place = sizes.width == sizes.columns or RAGGED_IN_PLACE
    y_bytes = x.nbytes // sizes.channels * sizes.outputs * (1 if residual is None else 2)
    cache_bytes = x.nbytes // sizes.input_frames * (TAPS - 1)
    aliases = {}
    if cache is not None and in_place:
        aliases = {len(weights) + names.index("cache"): [*results].index("latest")}
    cache_shape = (x.shape[0], TAPS - 1, *x.shape[2:])
    y, latest, *moments = pl.pallas_call(
        run,
        grid=_grid(x.shape[0], sizes),
        in_specs=[*map(_whole_spec, weights), *(spec for _, spec in operands.values())],
        out_specs=[spec for _, spec in results.values()],
        # In HBM: XLA would bring small results into VMEM and back.
        out_shape=[pltpu.HBM(struct.shape, struct.dtype) for struct, _ in results.values()],
        scratch_shapes=[*scratch.values()],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(_grid(x.shape[0], sizes)), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * kernel.size * x.size // sizes.channels,
            bytes_accessed=x.nbytes + kernel.nbytes + y_bytes + (2 if cache is not None else 1) * cache_bytes,
            transcendentals=x.size,
        ),
        name="norm_conv3d",
    )(*weights, *(array for array, _ in operands.values()))
    moments = (
        part[..., :outputs].reshape(x.shape[0], sizes.columns, sizes.input_frames, -1) for part in moments
    )
    mean, m2 = (part.swapaxes(1, 2) for part in moments)
    return _frames_first(y, sizes, outputs), _cache_frames_first(latest, cache_shape), (mean, m2)


def _operands(
    sizes: ConvSizes,
    x: Array,
    multiplier: Array,
    offset: Array,
    cache: Array | None,
    residual: Array | None,
    kernel: Array,
    bias: Array,
    edges: tuple[Array, Array] | None,
    true_width: Array | None,
) -> tuple[dict[str, tuple[Any, pl.BlockSpec]], list[Array]]:
    """Return the kernel's operands by name, each with its `BlockSpec`; and the matrices of its products.

    A cell is the pixels under one register of coefficients: `cells` are those of a strip's row.
    """
    cells = -(-sizes.width // sizes.cell)
    row = sizes.width * sizes.input_frames
    rows = ROWS if sizes.cell_rows == 1 else 1

    def in_tiles(part: Array) -> Array:
        """Pad the last axis, output channels, to whole tiles."""
        return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, sizes.outputs - part.shape[-1])])

    def coefficient_block(*indices: Any) -> tuple[Any, ...]:
        """Return the index of the block of coefficients that covers the rows of a step."""
        video, strip, step = grid_position(indices)
        strip = strip if multiplier.shape[2] > 1 else 0
        return video, lax.div(_modulated_block(sizes, step) * ROWS, max(ROWS, sizes.cell_rows)), strip, 0, 0

    cell_spec = pl.BlockSpec((1, rows, cells, SUBLANES, sizes.channels), coefficient_block)
    kernel, bias = in_tiles(kernel), in_tiles(bias.astype(jnp.float32)[None])
    operands = {"x": (_pixels_first(x), _modulated_rows_spec(sizes, row, sizes.channels))}
    if cache is not None:
        operands["cache"] = _cache_pixels_first(cache), _cache_rows_spec(sizes)
    operands |= {
        "half": (multiplier / 2, cell_spec),  # for SiLU by a hyperbolic tangent
        "half_offset": (offset / 2, cell_spec),
        "bias": (bias, _whole_spec(bias)),
    }
    if residual is not None:
        operands["residual"] = _pixels_first(in_tiles(residual)), _finished_rows_spec(row, sizes.outputs)
    if edges is not None:
        padded_edges = (
            jnp.repeat(in_tiles(edge), sizes.frames // sizes.input_frames, axis=1) for edge in edges
        )
        both = jnp.concatenate([edge.transpose(0, 2, 3, 1, 4) for edge in padded_edges], axis=3)
        if sizes.strips > 1 and both.shape[3] % SUBLANES:  # a strip's rows fill whole registers
            both = jnp.pad(both, [(0, 0)] * 3 + [(0, SUBLANES - both.shape[3]), (0, 0)])
        length = both.shape[3]
        both = both.reshape(*both.shape[:2], -1, sizes.outputs)
        operands["edges"] = both, _finished_rows_spec(length, sizes.outputs)
    if true_width is not None:
        operands["true_width"] = true_width[None], pl.BlockSpec(memory_space=pltpu.SMEM)
    weights = winograd.weights if sizes.tile else direct.weights
    if sizes.tile:
        kernel = transformed_taps(kernel, sizes.tile)
    return operands, [weights(kernel, product, sizes.turns) for product in sizes.products]


def _results(
    sizes: ConvSizes, operands: dict[str, tuple[Any, pl.BlockSpec]]
) -> dict[str, tuple[Any, pl.BlockSpec]]:
    """Return the structs of the kernel's results by name, each with its `BlockSpec`."""
    x, _ = operands["x"]
    row, videos, height = sizes.width * sizes.input_frames, *x.shape[:2]
    latest = (videos, height, sizes.columns * sizes.parts * (TAPS - 1), tiles.LANES)
    moments = jax.ShapeDtypeStruct((videos, x.shape[2], sizes.outputs), jnp.float32)
    strip_spec = pl.BlockSpec((1, row, sizes.outputs), lambda *indices: (*grid_position(indices)[:2], 0))
    y = jax.ShapeDtypeStruct((*x.shape[:3], sizes.outputs), x.dtype)
    return {
        "y": (y, _finished_rows_spec(row, sizes.outputs)),
        "latest": (jax.ShapeDtypeStruct(latest, x.dtype), _cache_rows_spec(sizes)),
        "mean": (moments, strip_spec),
        "m2": (moments, strip_spec),
    }


def _grid(videos: int, sizes: ConvSizes) -> tuple[int, ...]:
    """Return the grid: videos, strips if there are several, and steps, which follow blocks of rows."""
    steps = sizes.blocks + LAG
    return (videos, steps) if sizes.strips == 1 else (videos, sizes.strips, steps)


def _modulated_block(sizes: ConvSizes, step: Array) -> Array:
    """Return the index of the two rows that a step modulates.

    The last `LAG` steps only finish results: their index stays at the last rows, so that nothing is fetched.
    """
    return lax.min(step, sizes.blocks - 1)


def _rows_spec(block: Callable[[Any], Any], length: int, lanes: int) -> pl.BlockSpec:
    """Return the spec of the two rows that a step reads or writes.

    `block(step)` is their index; `length` counts the entries of a row, pixels times frames, in a strip.
    """

    def rows(*indices: Any) -> tuple[Any, ...]:
        video, strip, step = grid_position(indices)
        return video, block(step), strip, 0

    return pl.BlockSpec((1, ROWS, length, lanes), rows)


def _modulated_rows_spec(sizes: ConvSizes, length: int, lanes: int) -> pl.BlockSpec:
    """Return the spec of the rows that a step modulates."""
    return _rows_spec(partial(_modulated_block, sizes), length, lanes)


def _cache_rows_spec(sizes: ConvSizes) -> pl.BlockSpec:
    """Return the spec of a cache's rows, which a step reads and writes."""
    return _modulated_rows_spec(sizes, sizes.width * sizes.parts * (TAPS - 1), tiles.LANES)


def _finished_rows_spec(length: int, lanes: int) -> pl.BlockSpec:
    """Return the spec of the rows that a step finishes, `LAG` steps after it has modulated them."""
    return _rows_spec(lambda step: lax.max(step - LAG, 0), length, lanes)


def _whole_spec(array: Array) -> pl.BlockSpec:
    """Return the spec of an array that all steps read as a whole, from a single buffer."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim, pipeline_mode=pl.Buffered(1))


def _pixels_first(x_NTHWC: Array) -> Array:
    """Reshape frames to (N, H, W T, C), with a row for each frame of a pixel."""
    x = kernel_layout(x_NTHWC).transpose(0, 2, 3, 1, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _frames_first(y: Array, sizes: ConvSizes, outputs: int) -> Array:
    """Invert `_pixels_first`, and drop the channels that only fill a tile."""
    videos, height, *_ = y.shape
    if outputs == sizes.outputs or sizes.input_frames == 1:
        y = y.reshape(videos, height, sizes.columns, sizes.input_frames, -1).transpose(0, 3, 1, 2, 4)
        return y[..., :outputs]
    # The channels are selected by a product, exact if finite, pixels last: XLA would transpose the whole tile
    # for a slice. It slices an image, above, without that, and would compile the product for 90 s.
    few = jnp.einsum("nhpc,co->nohp", y, jnp.eye(sizes.outputs, outputs, dtype=y.dtype))
    return few.reshape(videos, outputs, height, sizes.columns, sizes.input_frames).transpose(0, 4, 2, 3, 1)


def _cache_pixels_first(cache_NTHWC: Array) -> Array:
    """Reshape a cache to (N, H, W P T, lanes), P parts of channels: as two frames lie in memory."""
    cache = cache_NTHWC.transpose(0, 2, 3, 1, 4)
    videos, height, columns, frames, channels = cache.shape
    cache = cache.reshape(videos, height, columns, frames, channels // tiles.LANES, tiles.LANES)
    return cache.transpose(0, 1, 2, 4, 3, 5).reshape(videos, height, -1, tiles.LANES)


def column_of_cache(cache: Float[Array, "N 2 H W I"], column: int) -> Float[Array, "N 2 H 1 I"]:
    """Slice a column of a cache in the form that the kernel takes.

    For a slice of the frames XLA would copy the whole cache into another order.
    """
    videos, frames, height, _, channels = cache.shape
    rows = channels // tiles.LANES * frames
    cut = _cache_pixels_first(cache)[:, :, column * rows : (column + 1) * rows]
    return _cache_frames_first(cut, (videos, frames, height, 1, channels))


def _cache_frames_first(latest: Array, shape: tuple[int, ...]) -> Array:
    """Invert `_cache_pixels_first`, step by step: XLA leaves both out if they follow each other."""
    videos, frames, height, columns, channels = shape
    latest = latest.reshape(videos, height, columns, -1, frames, tiles.LANES).transpose(0, 1, 2, 4, 3, 5)
    return latest.reshape(videos, height, columns, frames, channels).transpose(0, 3, 1, 2, 4)


convolved = with_derivatives_of(_xla_form, _by_kernel)
