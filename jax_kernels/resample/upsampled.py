"""Upsampling by two in space (nearest), a 3 x 3 convolution and its bias in one Pallas kernel, for TPUs.

The kernel stores only the result in HBM, no other doubled array. It multiplies a pixel by each of the nine
taps once, and adds the products to the results that need them: a quarter of the operations of a convolution
of the doubled frame. If frames are doubled too, it multiplies each one twice, which costs less than writing
results twice afterwards. In matrix products, each row of the left matrix is an *entry*: one frame of one
pixel. All frames of a pixel are followed by those of the next pixel in its row. So with eight frames a shift
by a column is a shift by whole registers. A *chunk* is the columns of pixels that one product covers.

A row of pixels becomes two rows of results, the upper and the lower one, and a column becomes two columns,
the left and the right one. Upper results also need products of the row of pixels above, and lower results of
the row below. Grid step g therefore reads row g of pixels, and finishes both rows of results of row g - 1:
there is one step more than rows. On several devices, `x` is a *shard*: some of the frame's columns.

Estimates for a v6e and frames of 8 x 240 x 360 x 256, which are doubled: the schedule takes 1.4 ms. At their
peaks the matrix units would take 0.9 ms, and the bytes read and written 1.1 ms. XLA's convolution of the
doubled frames alone takes 4.3 ms.
"""

import functools
import math
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

TAPS = 3
"""Taps of the kernel along each axis."""

PRODUCT = 288
"""Most entries of a matrix product, before its columns are rounded up to a multiple of `COLUMNS`.

For eight frames of 360 columns they become 320. With 320 entries the schedule for a v6e and frames of 8 x 240
x 360 x 256 takes 1.4 ms and is compiled in 4 s; with 192 it takes 1.8 ms and 4 s, and with 480 1.5 ms and 7
s.
"""

FRAMES = (8, 4, 2)
"""Supported numbers of frames, of the input and of the result."""

COLUMNS = 8
"""A product's columns are a multiple of this number: two frames of so many fill a tile of bfloat16."""


class UpsampleSizes(NamedTuple):
    """The sizes that a kernel is compiled for; `columns` is the width of the input's frames, or of a shard.

    `channels` are those of the input, and `outputs` those of the result.
    """

    frames_in: int
    frames_out: int
    columns: int
    channels: int
    outputs: int

    @property
    def chunk(self) -> int:
        """Number of columns that one matrix product covers; the last chunk of a row may have fewer."""
        # Chunks are as few as `PRODUCT` allows, and as equal as multiples of `COLUMNS` can be. -(-a // b)
        # rounds a / b up.
        chunks = -(-self.columns // (PRODUCT // self.frames_out))
        return -(-self.columns // (chunks * COLUMNS)) * COLUMNS

    @property
    def result_entries(self) -> int:
        """Number of entries of a row of results, which has twice the columns."""
        return 2 * self.columns * self.frames_out


def _sizes(x: Array | jax.ShapeDtypeStruct, outputs: int, expand_time: bool) -> UpsampleSizes:
    _, frames, _, columns, channels = x.shape
    return UpsampleSizes(frames, 2 * frames if expand_time else frames, columns, channels, outputs)


def is_supported(
    x: Float[Array | jax.ShapeDtypeStruct, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    *,
    expand_time: bool,
    pixels: int,
) -> bool:
    """Return whether the kernel supports these frames; only their shape and dtype are read.

    It supports two, four or eight frames of bfloat16, in the result too. Frames must not be small, channels
    in and out must fill whole tiles, and a row must fit into VMEM. `x` may be a shard; `pixels` is the number
    of pixels of a whole frame.
    """
    sizes = _sizes(x, kernel.shape[3], expand_time)
    return (
        tiles.fills_tiles(x)
        and x.dtype == jnp.bfloat16
        and 4 * pixels >= tiles.SMALLEST_FRAME  # a pixel becomes four
        and kernel.shape[:2] == (TAPS, TAPS)
        and kernel.shape[3] % tiles.LANES == 0
        and {sizes.frames_in, sizes.frames_out} <= {*FRAMES}
        and _vmem_bytes(sizes) <= tiles.vmem_limit()
    )


def _vmem_bytes(sizes: UpsampleSizes) -> int:
    """Return a bound of the VMEM that the kernel needs; bfloat16 numbers have 2 bytes, and float32 has 4."""
    pixel_row = sizes.columns * sizes.frames_in * sizes.channels * 2
    result_row = sizes.result_entries * sizes.outputs * 2
    return (
        # A row of pixels and two rows of results, each twice: other rows are transferred during a step.
        2 * (pixel_row + 2 * result_row)
        # The weights.
        + TAPS**2 * sizes.channels * sizes.outputs * 2
        # A step leaves three rows of results for the next one: "lower_sums" and "next_upper_sums" in float32,
        # which takes twice as much as bfloat16, and "upper_results" in bfloat16.
        + (2 + 2 + 1) * result_row
        # Products of a chunk by all taps, and as much for their sums: a cautious bound.
        + 2 * sizes.chunk * sizes.frames_out * TAPS**2 * sizes.outputs * 4
    )


class _Step:
    """A grid step of the kernel, which reads a row of pixels; `last` is the number of the last step.

    `memory` has references by name. "x", "beside" and "y" have the axes video (one), row, entry and channel.
    The operand "x" is this step's row of pixels, and "beside" has the two columns of the neighbouring shards
    in this row. The result "y" has both rows of results of the row above. Three buffers (entry, channel) hold
    what the step before has computed from the row above:

    - "upper_results": the finished upper results of that row;
    - "lower_sums": its lower results, which still lack the products of this step's row;
    - "next_upper_sums": bias and products for the upper results of this step's row.

    On a mesh "true_width" has the number of columns of results on this device that are not padding.

    "left_products" are the products of the column left of a chunk by its left taps, one for each kernel row.
    """

    def __init__(self, sizes: UpsampleSizes, memory: dict[str, Any], last: int):
        self.sizes, self.memory, self.last = sizes, memory, last
        self.step = pl.program_id(1)

    def run(self) -> None:
        """Add the products of a row of pixels, and write both rows of results of the row before it."""
        memory = self.memory

        @pl.when(self.step == 0)
        def _():  # nothing is above the first row: its upper results begin with the bias
            next_upper_sums = memory["next_upper_sums"]
            next_upper_sums[...] = jnp.broadcast_to(memory["bias"][...], next_upper_sums.shape)

        pl.when(self.step < self.last)(self._add_row)

        @pl.when(self.step == self.last)
        def _():  # nothing is below the last row
            memory["y"][0, 0] = memory["upper_results"][...]
            memory["y"][0, 1] = self._rounded(memory["lower_sums"][...], 0)  # of the columns from 0 on

    def _add_row(self) -> None:
        """Add the products of a row of pixels to the sums of results, chunk by chunk from the left.

        A chunk also needs products of the columns beside it. The chunk before leaves those of the column on
        the left in "left_products". The column on the right is multiplied with the chunk. For the columns
        beside the row, this function computes them first.
        """
        sizes, memory = self.sizes, self.memory
        if "beside" in memory:
            # The columns of the neighbouring shards: all frames of the left column, then of the right one.
            beside = self._repeat_frames(memory["beside"][0, 0])
            # The left column is only under the left tap (0) of each kernel row, and the right column only
            # under the right tap (2). Each product takes both columns, though half of it is not used: with so
            # few entries that costs little.
            by_left_tap, by_right_tap = (
                [self._product(beside, kernel_row, tap) for kernel_row in range(TAPS)] for tap in (0, 2)
            )
            for kernel_row, products in enumerate(by_left_tap):
                memory["left_products"][kernel_row] = products[: sizes.frames_out]
            right_products = [products[sizes.frames_out :] for products in by_right_tap]
        else:  # zeros are beside a whole frame
            memory["left_products"][...] = jnp.zeros(memory["left_products"].shape, jnp.float32)
            right_products = [jnp.zeros((sizes.frames_out, sizes.outputs), jnp.float32)] * TAPS

        def add_whole_chunk(index: Array, carry: None) -> None:
            self._add_chunk(index * sizes.chunk, sizes.chunk)

        chunks = -(-sizes.columns // sizes.chunk)
        if chunks > 1:
            jax.lax.fori_loop(0, chunks - 1, add_whole_chunk, None)
        last_chunk = (chunks - 1) * sizes.chunk  # its first column
        self._add_chunk(last_chunk, sizes.columns - last_chunk, right_products)

    def _add_chunk(self, column: Any, count: int, right_products: list[Array] | None = None) -> None:
        """Add the products of a chunk, `count` columns from `column` on, and write results of the row above.

        For a row's last chunk, `right_products` are the products of the column right of it by the right taps,
        one array for each kernel row.
        """
        sizes, memory = self.sizes, self.memory
        frames = sizes.frames_out
        entries = count * frames  # of the chunk's pixels
        loaded = count if right_products else count + 1  # also the column right of the chunk, if it has one
        # A chunk begins at a multiple of `COLUMNS` columns, each of two frames or more: so at a whole tile.
        start = pl.multiple_of(column * sizes.frames_in, 2 * COLUMNS)
        x = self._repeat_frames(memory["x"][0, 0, pl.ds(start, loaded * sizes.frames_in)])
        left_products = memory["left_products"]
        sums = []  # for each kernel row: the products of its three taps, added
        for kernel_row in range(TAPS):
            by_left, by_middle, by_right = (self._product(x, kernel_row, tap) for tap in range(TAPS))
            # For each column of the chunk, the products of the column before it by the left tap, and those of
            # the column after it by the right tap.
            from_column_before = _concatenate(left_products[kernel_row], by_left[: entries - frames])
            beyond_row = [right_products[kernel_row]] if right_products else []
            from_column_after = _concatenate(by_right[frames : entries + frames], *beyond_row)
            left_products[kernel_row] = by_left[entries - frames : entries]  # for the next chunk
            by_left, by_middle, by_right = (products[:entries] for products in (by_left, by_middle, by_right))
            # Column w becomes two columns of results. The left one has columns w - 1, w, w under the three
            # taps, the right one columns w, w, w + 1.
            left_sums = by_middle + by_right + from_column_before
            right_sums = by_left + by_middle + from_column_after
            sums.append(self._interleave_columns(left_sums, right_sums))
        # Row i becomes two rows of results. The upper one has rows i - 1, i, i under the three kernel rows,
        # the lower one rows i, i, i + 1.
        by_upper_row, by_middle_row, by_lower_row = sums
        # The chunk's entries in a row of results, which has twice the columns.
        at = pl.ds(pl.multiple_of(2 * column * frames, 2 * COLUMNS), 2 * entries)
        # Write the results of the row above. Step 0 has no row above: step 1 overwrites what step 0 writes.
        memory["y"][0, 0, at] = memory["upper_results"][at]
        memory["y"][0, 1, at] = self._rounded(memory["lower_sums"][at] + by_lower_row, column)
        # Leave the sums of this row to the next step. Each result gets the bias once: with the products of
        # the upper kernel row.
        upper_sums = memory["next_upper_sums"][at] + (by_middle_row + by_lower_row)
        memory["upper_results"][at] = self._rounded(upper_sums, column)
        by_upper_row = by_upper_row + memory["bias"][...]
        memory["next_upper_sums"][at] = by_upper_row
        memory["lower_sums"][at] = by_upper_row + by_middle_row

    def _product(self, x: Array, kernel_row: int, tap: int) -> Array:
        """Multiply entries by a kernel row's left (0), middle or right (2) tap; return float32 products."""
        return jnp.dot(x, self.memory["weights"][TAPS * kernel_row + tap], preferred_element_type=jnp.float32)

    def _repeat_frames(self, x: Array) -> Array:
        """Return entries `x`, every one twice if frames are doubled."""
        if self.sizes.frames_in == self.sizes.frames_out:
            return x
        # The 32-bit words hold each number of 16 bits twice. Read as bfloat16, a row of words is two equal
        # rows.
        return pltpu.bitcast(tiles.duplicated_in_words(x), x.dtype)

    def _interleave_columns(self, left: Array, right: Array) -> Array:
        """Return the sums of each column's left result, then of its right result, column by column."""
        frames, outputs = self.sizes.frames_out, self.sizes.outputs
        by_pixel = [sums.reshape(-1, 1, frames, outputs) for sums in (left, right)]
        return jnp.concatenate(by_pixel, axis=1).reshape(-1, outputs)

    def _rounded(self, sums: Array, column: Any) -> Array:
        """Round the sums of results of the input's columns from `column` on; padding columns get zeros."""
        if "true_width" in self.memory:
            entry = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
            # The columns of `sums` that are not padding; there are two columns of results for each of `x`.
            real_columns = self.memory["true_width"][0] - 2 * column
            sums = jnp.where(entry < real_columns * self.sizes.frames_out, sums, 0.0)
        return sums.astype(jnp.bfloat16)


def _concatenate(*parts: Array) -> Array:
    """Concatenate the parts that are not empty: a Pallas kernel takes no empty arrays."""
    return jnp.concatenate([part for part in parts if part.shape[0]])


def upsampled(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "3 3 I O"],
    bias: Float[Array, " O"],
    beside: tuple[Float[Array, "N T H 1 I"], Float[Array, "N T H 1 I"]] | None,
    true_width: Int[Array, ""] | None,
    expand_time: bool,
) -> Float[Array, "N T2 2*H 2*W O"]:
    """Double rows and columns (nearest), with `expand_time` frames too, then convolve; by the Pallas kernel.

    `is_supported` holds for `x`. `beside` are the columns (left, right) of the shards beside this one; None
    stands for zeros. Columns of the result from `true_width` on are padding and get zeros; None stands for no
    padding.
    """
    # JAX cannot differentiate a Pallas kernel: the derivatives are those of the form for XLA.
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
    # `beside` are the columns (left, right) of the shards beside this one, or None for zeros. Columns of the
    # result from `true_width` on are padding; None stands for no padding.
    sizes = _sizes(x, kernel.shape[-1], expand_time)
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
    result_row = sizes.result_entries, sizes.outputs
    # What a step leaves to the next one, computed from its row of pixels: see `_Step`.
    scratch = {
        # Bias and products for the upper results of the next row:
        "next_upper_sums": pltpu.VMEM(result_row, jnp.float32),
        # The row's lower results, without the next row's products, and its finished upper results:
        "lower_sums": pltpu.VMEM(result_row, jnp.float32),
        "upper_results": pltpu.VMEM(result_row, jnp.bfloat16),
        # Within a step, what a chunk leaves to the next one: products of its last column by the left taps.
        "left_products": pltpu.VMEM((TAPS, sizes.frames_out, sizes.outputs), jnp.float32),
    }
    names = [*operands, "y", *scratch]
    y = pl.pallas_call(
        lambda *refs: _Step(sizes, dict(zip(names, refs, strict=True)), last=height).run(),
        grid=(videos, height + 1),  # one step more than rows: a row's results are written by the next step
        in_specs=[spec for _, spec in operands.values()],
        out_specs=pl.BlockSpec(
            (1, 2, *result_row), lambda video, step: (video, jax.lax.max(step - 1, 0), 0, 0)
        ),
        # Declared in HBM: XLA would copy small results into VMEM and back.
        out_shape=pltpu.HBM((videos, 2 * height, *result_row), x.dtype),
        scratch_shapes=[*scratch.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * kernel.size * videos * height * sizes.columns * sizes.frames_out,
            # A row of pixels has two rows of results, in bfloat16: 4 bytes.
            bytes_accessed=x.nbytes + kernel.nbytes + 4 * videos * height * math.prod(result_row),
            transcendentals=0,
        ),
        name="upsampled",
    )(*(array for array, _ in operands.values()))
    y = y.reshape(videos, 2 * height, 2 * sizes.columns, sizes.frames_out, sizes.outputs)
    return y.transpose(0, 3, 1, 2, 4)


def _row_operand(x_NTHWC: Array) -> tuple[Array, pl.BlockSpec]:
    """Return frames as the kernel's operand (N, H, W T, C), and the spec by which a grid step reads a row."""
    x = x_NTHWC.transpose(0, 2, 3, 1, 4)
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    last_row = x.shape[1] - 1
    # There is one step more than rows. The last step stays at the last row, so that nothing is fetched.
    return x, pl.BlockSpec(
        (1, 1, *x.shape[2:]), lambda video, step: (video, jax.lax.min(step, last_row), 0, 0)
    )


def _xla_form(
    x: Array,
    kernel: Array,
    bias: Array,
    beside: tuple[Array, Array] | None,
    true_width: Array | None,
    expand_time: bool,
) -> Array:
    # This computes in XLA what the Pallas kernel computes. JAX takes the kernel's derivatives from it.
    # `beside` are the columns (left, right) of the shards beside this one, or None for zeros. Columns of the
    # result from `true_width` on are padding; None stands for no padding.
    sums = conv_frames(repeat_nearest(x, {2: 2, 3: 2}), kernel, padding=((1, 1), (1, 1)))
    if beside is not None:
        # A neighbour's column, of doubled height, is under one tap of each kernel row. `left` and `right` are
        # the parts of the first and the last column of the result that come from the two columns.
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
