"""Modulation, SiLU, a causal 3 x 3 x 3 convolution, bias and residual in one Pallas kernel, for TPUs.

HBM holds only the frames before and after the kernel; what lies between is in VMEM. `step` has the work of a
grid step, and defines all terms. `direct` and `winograd` are the two ways to multiply, and `sizes` chooses
between them. This file has the operands, results and derivatives.

A grid step *modulates* one *block* of two rows of pixels: it computes `silu(x * multiplier + offset)`. And it
*finishes* another block: it writes its convolution, two steps (`LAG`) after that block was modulated. The
multiplier and the offset are the norm's *coefficients*. They come in *registers* (8 sublanes of 128 lanes),
each of which serves the pixels of a *cell*. A frame too wide for VMEM is computed in *strips* of columns. The
*edges* of a strip are what the columns beside it add to the results of its first and last column. A *part* is
128 channels. An axis of *entries* has all frames of a column, then those of the next one. The *moments* of a
column of pixels are its mean and M2, the sum of squared deviations from it.

For 128 channels of 8 x 480 x 720 the schedule for a v6e takes 2.5 ms, by Winograd's filtering. By direct
convolution it takes 3.85 ms, for which the matrix units at their peak would take 2.7 ms. XLA's convolution
alone takes 5.4 ms (estimates).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from jax_kernels.common import tiles
from jax_kernels.common.columns import add_columns
from jax_kernels.common.dispatch import with_derivatives_of
from jax_kernels.common.frames import kernel_layout, repeat_nearest
from jax_kernels.common.transforms import transformed_taps
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
from jax_kernels.norm_conv3d.step import grid_position, matrices


def to_registers(z: Shaped[Array, "N t h w Z"], frames: int, columns: int) -> Shaped[Array, "N h v S Z"]:
    """Repeat latents or coefficients `z` to registers, as the kernel reads coefficients: v for each row.

    A register has S = 8 sublanes: one for each frame of a pixel, for as many pixels as fit. `frames` and
    `columns` are the numbers of the activations' frames and columns, multiples of t and w. If the pixels that
    one latent covers in a row fill whole registers, these are all equal: one register serves them, and v is
    w. Otherwise the registers hold a value for each frame of each pixel in the row.
    """
    register_pixels = SUBLANES // frames  # pixels whose frames fill a register
    latent_columns = columns // z.shape[3]  # columns of pixels that a latent covers
    z = repeat_nearest(z.transpose(0, 2, 3, 1, 4), {3: frames // z.shape[1]})  # N h w T Z
    # One register is enough too if a single latent covers all columns. A register has the T frames of a
    # pixel, and then the same values for each of its other pixels.
    if z.shape[2] == 1 or fills_registers(latent_columns, frames):
        return jnp.concatenate([z] * register_pixels, axis=3)
    z = repeat_nearest(z, {2: latent_columns})  # N h W T Z
    # Columns of zeros complete the last register.
    z = jnp.pad(z, [(0, 0), (0, 0), (0, -columns % register_pixels), (0, 0), (0, 0)])
    return z.reshape(*z.shape[:2], -1, SUBLANES, z.shape[-1])


def _over_pixels(
    coefficients: Float[Array, "N h v S C"], x: Float[Array, "N T H W C"]
) -> Float[Array, "N T H W C"]:
    """Return the coefficient of each pixel of `x`, from the registers that `to_registers` made."""
    frames, height, columns, channels = x.shape[1:]
    videos, coefficient_rows, registers = coefficients.shape[:3]
    register_pixels = SUBLANES // frames  # pixels that a register has values for
    cell_columns = columns_of_register(columns, frames, registers)  # columns that a register serves
    values = coefficients.reshape(videos, coefficient_rows, registers * register_pixels, frames, channels)
    # If a register serves more columns than it has pixels, its pixels are equal: the first one is repeated.
    if cell_columns != register_pixels:
        values = repeat_nearest(values[:, :, ::register_pixels], {2: cell_columns})
    # The columns that complete the last register are cut off.
    values = repeat_nearest(values[:, :, :columns], {1: height // coefficient_rows})
    return values.transpose(0, 3, 1, 2, 4)  # from N H W T C


def activated(x: Array, multiplier: Array, offset: Array) -> Array:
    """Return `silu(x * multiplier + offset)`, computed in float32 and rounded to the dtype of `x`."""
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
    """Compute in XLA what the Pallas kernel computes; JAX takes the derivatives of this function."""
    hidden = activated(x, _over_pixels(multiplier, x), _over_pixels(offset, x))
    if cache is None:  # at the start of a video, two copies of its first frame come before it
        cache = jnp.concatenate([hidden[:, :1]] * 2, axis=1)
    frames = jnp.concatenate([cache, hidden], axis=1)
    sums = xla.summed(frames, kernel, xla.same_width_padding(kernel))
    if edges is not None:
        # These sums are computed for all columns of `x` together, not in strips. So they lack only what the
        # columns beside `x` add: the left edge of the first strip, and the right edge of the last strip.
        left_edges, right_edges = edges  # each (N, T, H, strips, O)
        sums = add_columns(sums, left_edges[:, :, :, :1], at=0)
        sums = add_columns(sums, right_edges[:, :, :, -1:], at=x.shape[3] - 1)
    sums = xla.add_bias_and_residual(sums, bias, residual)
    if true_width is not None:  # columns from there on are padding
        sums = jnp.where(jax.lax.iota(jnp.int32, x.shape[3])[:, None] < true_width, sums, 0.0)
    y = sums.astype(x.dtype)
    next_cache = frames[:, frames.shape[1] - cache.shape[1] :]  # the last two frames
    mean, m2 = column_moments(y)  # with an axis of one row
    return y, next_cache, (jnp.squeeze(mean, 2), jnp.squeeze(m2, 2))


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
    *,
    in_place: bool,
) -> tuple[
    Float[Array, "N T H W O"],
    Float[Array, "N 2 H W I"],
    tuple[Float[Array, "N T W O"], Float[Array, "N T W O"]],
]:
    """Run the Pallas kernel for frames that `sizes.is_supported` accepts.

    `multiplier` and `offset` are v float32 registers of coefficients for each of h rows, as `to_registers`
    makes them; a row serves H / h rows of pixels. `edges` are the left edges of all E strips, and their right
    edges; None if `x` is one strip with only zeros beside it. Columns from `true_width` on are padding and
    get zeros; None stands for no padding. `in_place` says whether the next cache reuses the memory of the
    last one. The results are the convolved frames, the next cache, and the moments (mean, M2) of the
    convolved frames' columns.
    """
    _, coefficient_rows, registers, *_ = multiplier.shape
    outputs = kernel.shape[-1]
    sizes = sizes_of(x, coefficient_rows, registers, outputs, residual is not None)
    # By name, each operand with its `BlockSpec`, and each result's shape and dtype with its `BlockSpec`.
    # `weights` are the matrices of the products.
    operands, weights = _operands(
        sizes, x, multiplier, offset, cache, residual, kernel, bias, edges, true_width
    )
    results = _result_specs(sizes, operands)
    scratch = {
        name: pltpu.VMEM((*shape, tiles.LANES), dtype)
        for name, (shape, dtype) in scratch_shapes(sizes).items()
    }
    # Pallas passes references in this order: weights, other operands, results, scratch buffers.
    names = [*operands, *results, *scratch]

    def run_step(*references: Any) -> None:
        step_class = winograd.WinogradStep if sizes.tile else direct.DirectStep
        memory = dict(zip(names, references[len(weights) :], strict=True))
        step_class(sizes, references[: len(weights)], memory).run()

    # For the compiler's estimate of times: the bytes of the result, and of a residual, which is as large.
    y_bytes = x.nbytes // sizes.channels * sizes.outputs * (1 if residual is None else 2)
    cache_bytes = x.nbytes // sizes.input_frames * (TAPS - 1)  # of two frames
    aliases = {}
    if cache is not None and in_place:
        # The next cache reuses the memory of the last one: {index of the argument: index of the result}.
        aliases = {len(weights) + names.index("cache"): [*results].index("next_cache")}
    # The axes are videos, strips if there are several, and steps. A step finishes the block that was
    # modulated `LAG` steps before, so there are `LAG` more steps than blocks.
    grid = x.shape[0], *([sizes.strips] if sizes.strips > 1 else []), sizes.blocks + LAG
    y, next_cache, *moments = pl.pallas_call(
        run_step,
        grid=grid,
        in_specs=[*map(tiles.whole_spec, weights), *(spec for _, spec in operands.values())],
        out_specs=[spec for _, spec in results.values()],
        # Declared in HBM: XLA would copy small results into VMEM and back.
        out_shape=[pltpu.HBM(struct.shape, struct.dtype) for struct, _ in results.values()],
        scratch_shapes=[*scratch.values()],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=tiles.vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * kernel.size * x.size // sizes.channels,
            bytes_accessed=x.nbytes + kernel.nbytes + y_bytes + (2 if cache is not None else 1) * cache_bytes,
            transcendentals=x.size,
        ),
        name="norm_conv3d",
    )(*weights, *(array for array, _ in operands.values()))
    # From (N, W T, channels), whose channels are padded to `sizes.outputs`, to (N, T, W, O).
    shape_NWTO = x.shape[0], sizes.columns, sizes.input_frames, outputs
    mean, m2 = (moment[..., :outputs].reshape(shape_NWTO).swapaxes(1, 2) for moment in moments)
    cache_shape = (x.shape[0], TAPS - 1, *x.shape[2:])
    return _frames_first(y, sizes, outputs), _cache_frames_first(next_cache, cache_shape), (mean, m2)


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
    """Return the operands that are not None, by name, with their `BlockSpec`s, and the products' matrices."""
    row_frames = sizes.strip_columns * sizes.input_frames  # of all pixels in a row of a strip

    def padded_outputs(array: Array) -> Array:
        """Pad the last axis, output channels, with zeros to `sizes.outputs`, a multiple of 128."""
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, sizes.outputs - array.shape[-1])])

    coefficient_spec = _coefficient_spec(sizes, multiplier.shape[2])
    kernel, bias = padded_outputs(kernel), padded_outputs(bias.astype(jnp.float32)[None])
    # A step modulates one block and finishes another. Of "x", the cache and the coefficients it reads what
    # belongs to the former, of the residual and the edges what belongs to the latter.
    operands = {
        "x": (_pixels_first(x), _rows_spec(partial(_modulated_block, sizes), row_frames, sizes.channels))
    }
    if cache is not None:
        operands["cache"] = _cache_pixels_first(cache), _cache_rows_spec(sizes)
    operands |= {
        "half": (multiplier / 2, coefficient_spec),  # SiLU is h + h tanh(h), where h is half of its argument
        "half_offset": (offset / 2, coefficient_spec),
        "bias": (bias, tiles.whole_spec(bias)),
    }
    if residual is not None:
        operands["residual"] = (
            _pixels_first(padded_outputs(residual)),
            _rows_spec(_finished_block, row_frames, sizes.outputs),
        )
    if edges is not None:
        joined_edges = _joined_edges(sizes, map(padded_outputs, edges))
        strip_entries = joined_edges.shape[2] // sizes.strips  # entries of a strip's two edges
        operands["edges"] = joined_edges, _rows_spec(_finished_block, strip_entries, sizes.outputs)
    if true_width is not None:
        operands["true_width"] = true_width[None], pl.BlockSpec(memory_space=pltpu.SMEM)
    weights_between = direct.weights_between
    if sizes.tile:  # Winograd's filtering combines the taps of time
        kernel, weights_between = transformed_taps(kernel, sizes.tile), winograd.weights_between
    return operands, [matrices(kernel, product, sizes.shares, weights_between) for product in sizes.products]


def _joined_edges(sizes: ConvSizes, edges: Iterable[Array]) -> Float[Array, "N H entries O"]:
    """Return the edges of all strips as the kernel reads them: of each strip the left, then the right one.

    `edges` are the left edges of all E strips, and their right edges, each (N, T, H, E, O).
    """
    copies = sizes.multiplied_frames // sizes.input_frames  # a single frame is multiplied as two equal ones
    repeated = (jnp.repeat(edge, copies, axis=1).transpose(0, 2, 3, 1, 4) for edge in edges)
    joined = jnp.concatenate([*repeated], axis=3)  # N H E 2T O
    # Zeros complete a register, so that the block of each strip begins with a whole one.
    if sizes.strips > 1 and joined.shape[3] % SUBLANES:
        joined = jnp.pad(joined, [(0, 0)] * 3 + [(0, SUBLANES - joined.shape[3]), (0, 0)])
    return joined.reshape(*joined.shape[:2], -1, sizes.outputs)


def _coefficient_spec(sizes: ConvSizes, registers: int) -> pl.BlockSpec:
    """Return the spec of the coefficients (N, h, v, 8, I) that a step reads; `registers` is v.

    It reads the registers of the cells that cover the block to modulate, in one strip.
    """
    cells = -(-sizes.strip_columns // sizes.cell_columns)  # in a row of a strip

    def index(video: Any, strip: Any, step: Any) -> tuple[Any, ...]:
        """Return the index of the step's block on each axis, counted in blocks of coefficients."""
        strip = strip if registers > 1 else 0  # a single register serves all strips
        first_row = _modulated_block(sizes, step) * ROWS  # of pixels
        # A block of coefficients covers both rows of pixels of a block, or more.
        return video, jax.lax.div(first_row, max(ROWS, sizes.cell_rows)), strip, 0, 0

    # A block's two rows of pixels are in one row of cells, unless a cell has a single row.
    rows_of_cells = ROWS if sizes.cell_rows == 1 else 1
    return _block_spec((1, rows_of_cells, cells, SUBLANES, sizes.channels), index)


def _result_specs(
    sizes: ConvSizes, operands: dict[str, tuple[Any, pl.BlockSpec]]
) -> dict[str, tuple[Any, pl.BlockSpec]]:
    """Return the shape and dtype of each of the kernel's results, with its `BlockSpec`, by name."""
    x, _ = operands["x"]
    videos, height, row_frames, _ = x.shape  # the frames of all pixels in a row: W T
    strip_frames = sizes.strip_columns * sizes.input_frames  # of all pixels in a row of a strip
    # An entry for each column, each part and each of two frames (`TAPS - 1`).
    next_cache_shape = (videos, height, sizes.columns * sizes.parts * (TAPS - 1), tiles.LANES)
    moments = (
        jax.ShapeDtypeStruct((videos, row_frames, sizes.outputs), jnp.float32),
        # All steps of a strip share one block of moments, which the strip's last step writes.
        _block_spec((1, strip_frames, sizes.outputs), lambda video, strip, _step: (video, strip, 0)),
    )
    return {
        "y": (
            jax.ShapeDtypeStruct((videos, height, row_frames, sizes.outputs), x.dtype),
            _rows_spec(_finished_block, strip_frames, sizes.outputs),
        ),
        "next_cache": (jax.ShapeDtypeStruct(next_cache_shape, x.dtype), _cache_rows_spec(sizes)),
        "mean": moments,
        "m2": moments,
    }


def _modulated_block(sizes: ConvSizes, step: Array) -> Array:
    """Return the index of the block that a step modulates; the last `LAG` steps keep the last block."""
    return jax.lax.min(step, sizes.blocks - 1)


def _finished_block(step: Array) -> Array:
    """Return the index of the block that a step finishes: 0 for the first `LAG` steps, which finish none."""
    return jax.lax.max(step - LAG, 0)


def _rows_spec(block_of: Callable[[Any], Any], strip_entries: int, lanes: int) -> pl.BlockSpec:
    """Return the spec by which a step accesses block `block_of(step)` of an array (N, H, entries, lanes)."""
    return _block_spec(
        (1, ROWS, strip_entries, lanes), lambda video, strip, step: (video, block_of(step), strip, 0)
    )


def _block_spec(shape: tuple[int, ...], index: Callable[[Any, Any, Any], tuple[Any, ...]]) -> pl.BlockSpec:
    """Return the spec of blocks at `index(video, strip, step)`; `strip` is 0 if there is only one."""
    return pl.BlockSpec(shape, lambda *indices: index(*grid_position(indices)))


def _cache_rows_spec(sizes: ConvSizes) -> pl.BlockSpec:
    """Return the spec of a step's block of the cache, with entries for each column, part and cached frame."""
    return _rows_spec(
        partial(_modulated_block, sizes), sizes.strip_columns * sizes.parts * (TAPS - 1), tiles.LANES
    )


def _pixels_first(x_NTHWC: Array) -> Array:
    """Return frames as (N, H, W T, C): the T frames of a pixel become neighbours."""
    x = kernel_layout(x_NTHWC).transpose(0, 2, 3, 1, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _frames_first(y: Array, sizes: ConvSizes, outputs: int) -> Array:
    """Return frames (N, T, H, W, O) of the kernel's result `y`, (N, H, W T, channels), without padding."""
    videos, height, *_ = y.shape
    if outputs == sizes.outputs or sizes.input_frames == 1:
        y = y.reshape(videos, height, sizes.columns, sizes.input_frames, -1)
        return y.transpose(0, 3, 1, 2, 4)[..., :outputs]
    # The padding channels are left out by a product with ones and zeros, which is exact for finite values.
    # Its result has the pixels as the last axis. A slice would make XLA transpose all 128 channels first. A
    # single frame is sliced above: that needs no transpose, and XLA would take 90 s to compile the product.
    few = jnp.einsum("nhpc,co->nohp", y, jnp.eye(sizes.outputs, outputs, dtype=y.dtype))
    return few.reshape(videos, outputs, height, sizes.columns, sizes.input_frames).transpose(0, 4, 2, 3, 1)


def _cache_pixels_first(cache_NTHWC: Array) -> Array:
    """Return a cache as (N, H, W P T, 128), with T = 2 frames of P parts of 128 channels."""
    # A TPU keeps the cache in this order, so the kernel reads it without a copy.
    cache = cache_NTHWC.transpose(0, 2, 3, 1, 4)
    videos, height, columns, frames, channels = cache.shape
    cache = cache.reshape(videos, height, columns, frames, channels // tiles.LANES, tiles.LANES)
    return cache.transpose(0, 1, 2, 4, 3, 5).reshape(videos, height, -1, tiles.LANES)


def column_of_cache(cache: Float[Array, "N 2 H W I"], column: int) -> Float[Array, "N 2 H 1 I"]:
    """Return one column of a cache."""
    videos, frames, height, _, channels = cache.shape
    # Entries of a column in the reshaped cache, (N, H, W * entries, 128).
    entries = channels // tiles.LANES * frames
    # It is sliced in the kernel's order of axes: XLA would copy the whole cache into another order.
    column_entries = _cache_pixels_first(cache)[:, :, column * entries : (column + 1) * entries]
    return _cache_frames_first(column_entries, (videos, frames, height, 1, channels))


def _cache_frames_first(next_cache: Array, shape: tuple[int, ...]) -> Array:
    """Return a cache of `shape`, (N, 2, H, W, C), from one in the order of `_cache_pixels_first`."""
    # Each operation undoes one of that function, so that XLA drops both where one follows the other.
    videos, frames, height, columns, channels = shape
    next_cache = next_cache.reshape(videos, height, columns, -1, frames, tiles.LANES).transpose(
        0, 1, 2, 4, 3, 5
    )
    return next_cache.reshape(videos, height, columns, frames, channels).transpose(0, 3, 1, 2, 4)


def convolved(*operands: Any, in_place: bool = True) -> Any:
    """Compute `_by_kernel`, with the derivatives of `_xla_form`; both take the operands by position."""
    return with_derivatives_of(_xla_form, partial(_by_kernel, in_place=in_place))(*operands)
