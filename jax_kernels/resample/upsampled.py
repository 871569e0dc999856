"""Upsampling by two in space (nearest), a 3 x 3 convolution and its bias in one Pallas kernel, for TPUs.

Of all doubled arrays only the result is stored in HBM. A pixel is multiplied by each of the nine taps once,
and the products are added to the four pixels that it becomes: a quarter of the operations of a convolution of
the doubled frame. If frames are doubled too, each is multiplied twice, which costs less than writing results
twice afterwards. A grid step computes a row of pixels. A row of a matrix product is one frame of one pixel,
so with eight frames a shift by a column is a shift by whole registers.

Grid step g reads row g of pixels and finishes the two rows of results of row g - 1, whose lower one needs row
g too: there is one step more than rows.

For 8 x 240 x 360 x 256 doubled the schedule for a v6e takes 1.4 ms. At their peak the matrix units would take
0.9 ms, and the bytes read and written 1.1 ms; XLA's convolution of the doubled frames alone takes 4.3 ms.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jax_kernels.common import tiles
from jax_kernels.common.columns import add_columns
from jax_kernels.common.dispatch import with_derivatives_of
from jax_kernels.common.frames import conv_frames, repeat_nearest
from jax_kernels.resample import xla

TAPS = 3
"""Taps of the kernel along each axis."""

PRODUCT = 288
"""Rows of a matrix product, before its columns are rounded up to a multiple of `COLUMNS`.

They are 320 then for eight frames of 360 columns. Milliseconds of a schedule for 8 x 240 x 360 x 256, and
seconds to compile it: 1.8 and 4 with 192 rows, 1.4 and 4 with 320, 1.5 and 7 with 480.
"""

FRAMES = (8, 4, 2)
"""Supported numbers of frames, of the input and of the result."""

COLUMNS = 8
"""A product's columns are a multiple of this number: two frames of so many fill a tile of bfloat16."""


class UpsampleSizes(NamedTuple):
    """The sizes that a kernel is compiled for.

    Attributes:
        taken: frames of the input.
        frames: frames of the result: as many, or twice as many.
        columns: columns of the frame, or of a shard.
        channels, outputs: channels into the convolution and out of it.
    """

    taken: int
    frames: int
    columns: int
    channels: int
    outputs: int

    @property
    def chunk(self) -> int:
        """Number of columns of pixels in a matrix product, which has a row for each frame of a column.

        A product has about `PRODUCT` rows. The last one of a row of pixels may have fewer columns.
        """
        # The fewest products that cover a row of pixels share its columns evenly, rounded up to a multiple of
        # `COLUMNS`.
        products = -(-self.columns // (PRODUCT // self.frames))
        return -(-self.columns // (products * COLUMNS)) * COLUMNS

    @property
    def row(self) -> int:
        """Entries of a row of results: its pixels, 2 W, times their frames."""
        return 2 * self.columns * self.frames


def _sizes(x: Array | jax.ShapeDtypeStruct, outputs: int, expand_time: bool) -> UpsampleSizes:
    """Return the sizes that the kernel is compiled for, for frames `x` (N, T, H, W, C).

    `outputs` is the number of output channels. With `expand_time` frames are doubled.
    """
    _, frames, _, columns, channels = x.shape
    # Frames of `x`, then frames of the result.
    return UpsampleSizes(frames, frames * (1 + expand_time), columns, channels, outputs)


def is_supported(
    x: Float[Array | jax.ShapeDtypeStruct, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    *,
    expand_time: bool,
    pixels: int,
) -> bool:
    """Return whether the kernel supports these frames.

    It supports two, four or eight frames of bfloat16. The result must have one of these numbers of frames
    too, and not be small. Channels in and out must be whole tiles, and a row must fit into VMEM.

    Args:
        x: frames, of which only shape and dtype are read.
        kernel: (3, 3, I, O), of which only the shape is read.
        expand_time: whether frames are doubled too.
        pixels: pixels of a whole frame, of which `x` may be a shard.
    """
    sizes = _sizes(x, kernel.shape[3], expand_time)
    return (
        tiles.fills_tiles(x)
        and x.dtype == jnp.bfloat16
        and 4 * pixels >= tiles.SMALLEST  # a pixel becomes four
        and kernel.shape[:2] == (TAPS, TAPS)
        and kernel.shape[3] % tiles.LANES == 0
        and {sizes.taken, sizes.frames} <= {*FRAMES}  # frames in and out
        and _vmem_bytes(sizes) <= tiles.vmem_limit()
    )


def _vmem_bytes(sizes: UpsampleSizes) -> int:
    """Return a bound of the bytes of VMEM that the kernel uses."""
    # A row of pixels, each of `taken` frames, and a row of results: `row` entries, one for each frame of a
    # pixel. A bfloat16 number has 2 bytes.
    input_bytes = sizes.columns * sizes.taken * sizes.channels * 2
    output_bytes = sizes.row * sizes.outputs * 2
    weights = TAPS**2 * sizes.channels * sizes.outputs * 2
    return (
        # A row of pixels and two rows of results, each twice, as the next block is transferred meanwhile.
        2 * (input_bytes + 2 * output_bytes)
        + weights
        # Rows of results that a step keeps for the next one: two in float32, twice `output_bytes` ("above"
        # and "odd"), and one in bfloat16 ("even").
        + (2 * 2 + 1) * output_bytes
        # Float32 products (4 bytes) of a chunk by all taps, and as much for their sums: a cautious bound.
        + 2 * sizes.chunk * sizes.frames * TAPS**2 * sizes.outputs * 4
    )


class _Step:
    """A grid step of the kernel.

    A row of pixels becomes two rows of results: an upper one (even) and a lower one (odd). An upper result
    has products of the row of pixels above, a lower one of the row below.

    Attributes:
        sizes: the sizes that the kernel is compiled for.
        refs: references to memory by name. Operands: "x", a row of pixels; "weights", "bias"; "beside", the
            neighbours' columns, and "true_width", if needed. Result: "y", two rows of results. Scratch, of
            the row of pixels before this step's: "even", its upper results, rounded; "odd", the sums of its
            lower results so far; "above", what it adds to the upper results of the row after it, plus bias.
            "left": the products of the column left of a chunk, for each kernel row.
        step, last: index of this grid step, and of the last one.
    """

    def __init__(self, sizes: UpsampleSizes, refs: dict[str, Any], last: int):
        """Keep the sizes, the references by name and the index of the last step; read this step's index."""
        self.sizes, self.refs, self.last = sizes, refs, last
        self.step = pl.program_id(1)

    def run(self) -> None:
        """Add the products of a row of pixels, and write the two rows of results of the row above it.

        Row i of pixels, which step i adds, becomes rows 2i and 2i + 1 of the result. When the step begins,
        "even" is row 2i - 2, complete; "odd" is row 2i - 1, without the products of row i; "above" is what
        row i - 1 of pixels adds to row 2i, plus the bias. The last step has no row to add: it only writes.
        """
        refs = self.refs

        @pl.when(self.step == 0)
        def _():  # nothing is above the first row
            refs["above"][...] = jnp.broadcast_to(refs["bias"][...], refs["above"].shape)

        pl.when(self.step < self.last)(self._add_row)

        @pl.when(self.step == self.last)
        def _():  # nothing is below the last row
            refs["y"][0, 0] = refs["even"][...]
            refs["y"][0, 1] = self._rounded(refs["odd"][...], 0)  # 0: the sums begin at the first column

    def _add_row(self) -> None:
        """Add the products of a row of pixels to the sums of results, in chunks of columns, the left first.

        "left" is memory for the products of the column left of a chunk. "beside" has the columns of the two
        neighbouring shards: the left column's frames, then the right column's. Without "beside" both columns
        are zeros.
        """
        sizes, refs = self.sizes, self.refs
        chunks = -(-sizes.columns // sizes.chunk)
        if "beside" in refs:
            beside = self._repeat_frames(refs["beside"][0, 0])
            # Each product takes both columns, the left one's frames first. The left column needs only the
            # products by the left tap (0) of each kernel row, the right column only those by the right (2).
            by_left_tap, by_right_tap = (
                [self._product(beside, kernel_row, tap) for kernel_row in range(TAPS)] for tap in (0, 2)
            )
            for kernel_row, products in enumerate(by_left_tap):
                refs["left"][kernel_row] = products[: sizes.frames]
            # The right column's products, which the row's last column needs.
            right = [products[sizes.frames :] for products in by_right_tap]
        else:
            refs["left"][...] = jnp.zeros(refs["left"].shape, jnp.float32)
            right = [jnp.zeros((sizes.frames, sizes.outputs), jnp.float32)] * TAPS

        def add_whole_chunk(index: Array, carry: None) -> None:
            """Add one chunk of full size; `fori_loop` wants a carry."""
            self._add_chunk(index * sizes.chunk, sizes.chunk)

        if chunks > 1:
            jax.lax.fori_loop(0, chunks - 1, add_whole_chunk, None)
        last_chunk = (chunks - 1) * sizes.chunk  # its first column
        self._add_chunk(last_chunk, sizes.columns - last_chunk, right)

    def _add_chunk(self, column: Any, count: int, right: list[Array] | None = None) -> None:
        """Add the products of `count` columns from `column` on to the sums of results; write complete ones.

        `right` has the products of the column beyond the row's last, one array for each kernel row; None for
        a chunk that another follows.
        """
        sizes, refs = self.sizes, self.refs
        # A column has a row for each frame: `taken` input frames in "x", `frames` result frames in a product.
        loaded = count + (right is None)  # columns; the one right of the chunk too, if the row goes on
        start = pl.multiple_of(column * sizes.taken, 2 * COLUMNS)
        x = self._repeat_frames(refs["x"][0, 0, pl.ds(start, loaded * sizes.taken)])
        rows = count * sizes.frames  # of the products of the chunk alone
        sums = []
        for row in range(TAPS):
            # The products by the left, the middle and the right tap of the kernel's row.
            tap_0, tap_1, tap_2 = (self._product(x, row, tap) for tap in range(TAPS))
            # For each column: what the column left of it gives by tap 0, the column right of it by tap 2.
            from_left = _concatenate(refs["left"][row], tap_0[: rows - sizes.frames])
            from_right = _concatenate(
                tap_2[sizes.frames : rows + sizes.frames], *([] if right is None else [right[row]])
            )
            refs["left"][row] = tap_0[rows - sizes.frames : rows]  # for the next chunk
            tap_0, tap_1, tap_2 = (products[:rows] for products in (tap_0, tap_1, tap_2))
            # Column w is doubled: its even result has columns w - 1, w, w under the three taps, its odd
            # result columns w, w, w + 1.
            sums.append(self._interleave_columns(tap_1 + tap_2 + from_left, tap_0 + tap_1 + from_right))
        # By the kernel's rows. Rows are doubled too: this row is under the middle and lower kernel row of its
        # even result, and under the upper and middle kernel row of its odd result. The previous grid step has
        # left, of the row above: its even result ("even"), its odd result without this row's `lower` ("odd"),
        # and what it adds to this row's even result ("above").
        upper, middle, lower = sums
        at = pl.ds(pl.multiple_of(2 * column * sizes.frames, 2 * COLUMNS), 2 * rows)
        # The two results of the row above. Step 0 has no row above: step 1 overwrites what step 0 writes.
        refs["y"][0, 0, at] = refs["even"][at]
        refs["y"][0, 1, at] = self._rounded(refs["odd"][at] + lower, column)
        refs["even"][at] = self._rounded(refs["above"][at] + (middle + lower), column)
        upper = upper + refs["bias"][...]
        refs["above"][at] = upper
        refs["odd"][at] = upper + middle

    def _product(self, x: Array, row: int, column: int) -> Array:
        """Multiply `x`, (pixels * frames, I), by the tap at `row` and `column`; return float32 products."""
        return jnp.dot(x, self.refs["weights"][TAPS * row + column], preferred_element_type=jnp.float32)

    def _repeat_frames(self, x: Array) -> Array:
        """Return `x`, a row for each frame of a pixel, with every row twice if frames are doubled.

        Frames are doubled if a result has more frames (`frames`) than are taken of `x` (`taken`).
        """
        return (
            x
            if self.sizes.taken == self.sizes.frames
            # Read as bfloat16, a word that holds a number twice has it in two successive rows.
            else pltpu.bitcast(tiles.duplicated_in_words(x), x.dtype)
        )

    def _interleave_columns(self, left: Array, right: Array) -> Array:
        """Interleave the results of even columns, `left`, and of odd columns, `right`, pixel by pixel."""
        frames, outputs = self.sizes.frames, self.sizes.outputs
        pixels = [part.reshape(-1, 1, frames, outputs) for part in (left, right)]
        return jnp.concatenate(pixels, axis=1).reshape(-1, outputs)

    def _rounded(self, sums: Array, column: Any) -> Array:
        """Round the sums of a row of results to bfloat16, with zeros in padding columns.

        `column` is a column of the input, which becomes two of the result. `sums` has an entry for each frame
        of each of the result's columns from `2 * column` on.
        """
        if "true_width" in self.refs:
            entry = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
            # "true_width" counts columns of the result: two for each column of the input.
            sums = jnp.where(entry < (self.refs["true_width"][0] - 2 * column) * self.sizes.frames, sums, 0.0)
        return sums.astype(jnp.bfloat16)


def _concatenate(*parts: Array) -> Array:
    """Concatenate the parts that are not empty: a Pallas kernel takes no empty arrays."""
    parts = tuple(part for part in parts if part.shape[0])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def upsampled(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "3 3 I O"],
    bias: Float[Array, " O"],
    beside: tuple[Float[Array, "N T H 1 I"], Float[Array, "N T H 1 I"]] | None,
    true_width: Int[Array, ""] | None,
    expand_time: bool,
) -> Float[Array, "N T2 2*H 2*W O"]:
    """Double rows and columns (nearest), then convolve, by the Pallas kernel; `_xla_form` gives derivatives.

    Args:
        x: frames for which `is_supported` holds.
        kernel, bias: the convolution's.
        beside: the neighbours' columns (left, right) of a shard; None for zeros.
        true_width: columns of the result from this one on are padding and get zeros; None without padding.
        expand_time: whether frames are doubled too.
    """
    plain, by_kernel = (functools.partial(form, expand_time=expand_time) for form in (_xla_form, _by_kernel))
    return with_derivatives_of(plain, by_kernel)(x, kernel, bias, beside, true_width)


def _by_kernel(
    x: Array,
    kernel: Array,
    bias: Array,
    beside: tuple[Array, Array] | None,
    true_width: Array | None,
    expand_time: bool,
) -> Array:
    """Double rows and columns (nearest) and convolve by the Pallas kernel, a row of pixels in a grid step.

    Args:
        x: frames (N, T, H, W, I).
        kernel, bias: the convolution's, (3, 3, I, O) and (O,).
        beside: the neighbours' columns (left, right) of a shard; None for zeros.
        true_width: columns of the result from this one on are padding and get zeros; None without padding.
        expand_time: whether frames are doubled too.
    """
    sizes = _sizes(x, kernel.shape[-1], expand_time)  # `row`: entries of a row of results, 2 W times frames
    videos, _, height, *_ = x.shape
    # The nine taps, (I, O) each, on one axis.
    weights, bias = kernel.reshape(-1, *kernel.shape[2:]), bias.astype(jnp.float32)[None]
    # By name: arrays with the specs of their blocks.
    operands = {
        "x": _row_operand(x),
        "weights": (weights, tiles.whole_spec(weights)),
        "bias": (bias, tiles.whole_spec(bias)),
    }
    if beside is not None:
        operands["beside"] = _row_operand(jnp.concatenate(beside, axis=3))
    if true_width is not None:
        operands["true_width"] = true_width[None], pl.BlockSpec(memory_space=pltpu.SMEM)
    scratch = {
        # A row of pixels gives an even (upper) and an odd (lower) row of results.
        # What the previous row of pixels adds to this row's even results, plus bias:
        "above": pltpu.VMEM((sizes.row, sizes.outputs), jnp.float32),
        # The previous row's odd results, without what this row adds, and its even results, complete:
        "odd": pltpu.VMEM((sizes.row, sizes.outputs), jnp.float32),
        "even": pltpu.VMEM((sizes.row, sizes.outputs), jnp.bfloat16),
        # A step goes over its row in chunks of columns. This has, for each kernel row, the products of the
        # column left of the chunk.
        "left": pltpu.VMEM((TAPS, sizes.frames, sizes.outputs), jnp.float32),
    }
    names = [*operands, "y", *scratch]
    y = pl.pallas_call(
        lambda *refs: _Step(sizes, dict(zip(names, refs, strict=True)), last=height).run(),
        grid=(videos, height + 1),  # a row's two rows of results are written by the next step
        in_specs=[spec for _, spec in operands.values()],
        out_specs=pl.BlockSpec(
            (1, 2, sizes.row, sizes.outputs), lambda video, step: (video, jax.lax.max(step - 1, 0), 0, 0)
        ),
        # Declared in HBM: XLA would copy small results into VMEM and back.
        out_shape=pltpu.HBM((videos, 2 * height, sizes.row, sizes.outputs), x.dtype),
        scratch_shapes=[*scratch.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * kernel.size * videos * height * sizes.columns * sizes.frames,
            # A row of pixels has two rows of results, in bfloat16: 4 bytes.
            bytes_accessed=x.nbytes + kernel.nbytes + 4 * videos * height * sizes.row * sizes.outputs,
            transcendentals=0,
        ),
        name="upsampled",
    )(*(array for array, _ in operands.values()))
    y = y.reshape(videos, 2 * height, 2 * sizes.columns, sizes.frames, sizes.outputs)
    return y.transpose(0, 3, 1, 2, 4)


def _row_operand(x_NTHWC: Array) -> tuple[Array, pl.BlockSpec]:
    """Return frames as the kernel's operand (N, H, W T, C), and the spec by which step g reads row g."""
    x = x_NTHWC.transpose(0, 2, 3, 1, 4)
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    # There is one step more than rows: its index stays at the last row, so that nothing is fetched.
    step_spec = pl.BlockSpec(
        (1, 1, *x.shape[2:]), lambda video, step: (video, jax.lax.min(step, x.shape[1] - 1), 0, 0)
    )
    return x, step_spec


def _xla_form(
    x: Array,
    kernel: Array,
    bias: Array,
    beside: tuple[Array, Array] | None,
    true_width: Array | None,
    expand_time: bool,
) -> Array:
    """Upsample as `_by_kernel` does, but by XLA's operations, which JAX can differentiate.

    Pixels are repeated to twice the height and width, and convolved with taps of 3 x 3.

    Args:
        x: frames (N, T, H, W, I).
        kernel, bias: the convolution's, (3, 3, I, O) and (O,).
        beside: the columns of pixels left and right of `x`; None for zeros.
        true_width: columns of the result from this one on are padding and get zeros; None without padding.
        expand_time: whether each frame of the result is repeated.
    """
    sums = conv_frames(xla.double_pixels(x), kernel, padding=((1, 1), (1, 1)))
    if beside is not None:
        # Each is what one neighbouring column, of doubled height, adds to a single column of the result.
        left, right = (
            conv_frames(repeat_nearest(column, {2: 2}), taps, padding=((1, 1), (0, 0)))
            for column, taps in zip(beside, (kernel[:, :1], kernel[:, 2:]), strict=True)
        )
        sums = add_columns(add_columns(sums, left, at=0), right, at=sums.shape[3] - 1)
    sums = sums + bias.astype(jnp.float32)
    if true_width is not None:
        sums = jnp.where(jax.lax.iota(jnp.int32, sums.shape[3])[:, None] < true_width, sums, 0.0)
    y = sums.astype(x.dtype)
    return repeat_nearest(y, {1: 2}) if expand_time else y
