"""Activations whose columns are split over the devices of a mesh, with padding columns if need be.

Between kernels XLA's partitioner carries the split. A kernel that looks at neighbouring columns, or has a
part in Pallas, runs on each device's shard (`dispatch.map_shards`). It computes the shard as a single device
computes a whole frame, with zeros beside it. Neighbouring devices also send each other the columns at their
edges, and each adds what the columns that it received contribute to the edges of its result.

If the number of devices does not divide a frame's width, the width is padded: the last shards have padding
columns on their right. These are zero before and after every kernel, and statistics leave them out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


@dataclass(frozen=True)
class Split:
    """The sharding of activations' columns.

    A split over devices goes with `jax.sharding.use_abstract_mesh`, whose axes it names.

    Attributes:
        real, padded: of `padded` columns, `real` are the frame's; the remainder is padding on its right. The
            two are a ratio, so that one split holds at every resolution of a model.
        videos: the mesh axis that splits videos, or None.
        columns: the mesh axes that split columns; none outside a mesh.
        in_shard: whether the code runs for one device, on its local columns.
    """

    real: int = 1
    padded: int = 1
    videos: str | None = None
    columns: tuple[str, ...] = ()
    in_shard: bool = False

    @property
    def shards(self) -> int:
        """Number of devices that share a frame's columns; 1 outside a shard, where code has all columns."""
        return jax.lax.axis_size(self.columns) if self.in_shard else 1

    @property
    def is_padded(self) -> bool:
        return self.real != self.padded

    def real_columns(self, columns: int) -> int:
        """Return the width of a whole frame without padding; `columns` is a shard's width with padding."""
        return columns * self.shards * self.real // self.padded

    def real_columns_here(self, columns: int) -> Int[Array, ""]:
        """Return how many of this shard's `columns` belong to the frame; the others are padding."""
        # All devices run one program, so the number is an array: it depends on the device's index.
        # `self.columns` names the mesh axes that the index is counted along.
        # `real_columns` takes a shard's width, but returns the number of the whole frame's real columns.
        columns_to_the_left = jax.lax.axis_index(self.columns) * columns if self.in_shard else 0
        return jnp.clip(jnp.int32(self.real_columns(columns)) - columns_to_the_left, 0, columns)

    def mask(self, columns: int) -> jax.Array:
        """Return a boolean for each of this shard's `columns`, which is False for a padding column."""
        return jax.lax.iota(jnp.int32, columns) < self.real_columns_here(columns)

    def shard_of(self, x: jax.Array) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a device's shard of `x` (N T H W C); inside a shard, `x` is the shard."""
        videos, *frames_and_rows, columns, channels = x.shape
        if self.columns and not self.in_shard:
            # Here `x` is whole, on all devices. The mesh is the one of `jax.sharding.use_abstract_mesh`.
            axis_sizes = jax.sharding.get_abstract_mesh().shape  # by the name of a mesh axis
            videos //= axis_sizes[self.videos] if self.videos else 1
            columns //= math.prod(axis_sizes[axis] for axis in self.columns)
        return jax.ShapeDtypeStruct((videos, *frames_and_rows, columns, channels), x.dtype)


WHOLE = Split()
"""The split of a single device, which has all columns."""


def neighbours_of(
    split: Split, x: Float[Array, "N T H W C"], reach: int
) -> tuple[Float[Array, "N T H reach C"], Float[Array, "N T H reach C"]]:
    """Return the `reach` columns left of a shard `x`, and those right of it, as the neighbours send them.

    Where the shard is at the frame's edge and has no neighbour, they are zeros.

    Raises:
        ValueError: `reach` is 0, or more than the columns of a shard: a neighbour has not enough to send.
    """
    if not 0 < reach <= x.shape[3]:
        raise ValueError(
            f"a kernel that reaches {reach} columns to either side got shards of {x.shape[3]}: a shard must "
            f"have that many columns; use fewer devices"
        )
    return exchanged(split, x[:, :, :, :reach], x[:, :, :, -reach:])


def exchanged(
    split: Split, first: Shaped[Array, "*axes"], last: Shaped[Array, "*axes"]
) -> tuple[Array, Array]:
    """Send `first` to the shard on the left and `last` to the one on the right; return what these two send.

    `first` and `last` are this shard's first and last columns, or what is computed from them. The results are
    (`last` of the shard on the left, `first` of the shard on the right). At the frame's edges, where there is
    no such shard, they are zeros.
    """
    to_right = [(shard, shard + 1) for shard in range(split.shards - 1)]  # (sender, receiver)
    # `split.columns` names the mesh axes. `ppermute` gives zeros to a shard that is no pair's receiver.
    return (
        jax.lax.ppermute(last, split.columns, to_right),
        jax.lax.ppermute(first, split.columns, [(receiver, sender) for sender, receiver in to_right]),
    )


def add_columns(y: Float[Array, "N T H W C"], columns: Float[Array, "N T H w C"], at: int) -> Array:
    """Return `y` with `columns` added to its columns from `at` on.

    `columns` are padded with zeros to the size of `y`, because XLA can fuse the sum of two equal shapes.
    """
    padding = [(0, 0, 0)] * 5  # zeros on each axis: before, after and between the elements
    padding[3] = at, y.shape[3] - columns.shape[3] - at, 0
    return y + jax.lax.pad(columns, jnp.zeros((), columns.dtype), padding)


def add_from_neighbours(
    split: Split,
    y: Float[Array, "N T2 H2 W O"],
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "... kw I O"],
    convolve: Callable[[Array, Array, tuple[int, int]], Array],
) -> Float[Array, "N T2 H2 W O"]:
    """Add to a shard's convolution `y` of `x` what its neighbours' columns contribute at its edges.

    `y` are float32 sums, computed with zeros in place of the neighbours' columns. The kernel has an odd
    number of columns. `convolve(columns, kernel, (left, right))` puts `left` zero columns before `columns`
    and `right` behind them, and convolves.
    """
    reach = kernel.shape[-3] // 2  # the columns that the kernel sees on either side of its middle one
    if not reach or split.shards == 1:
        return y
    left, right = neighbours_of(split, x, reach)
    left_taps, right_taps = kernel[..., :reach, :, :], kernel[..., reach + 1 :, :, :]
    # The first `reach` columns of `y` lack the products of `left` with the taps left of the middle tap. The
    # last `reach` columns lack those of `right` with the taps right of it. Zeros stand for the shard's own
    # columns, whose products `y` already has: `reach - 1` zeros, so that `reach` results come out.
    y = add_columns(y, convolve(left, left_taps, (0, reach - 1)), at=0)
    return add_columns(y, convolve(right, right_taps, (reach - 1, 0)), at=y.shape[3] - reach)


def with_clear_padding(x: jax.Array, split: Split, column_axis: int = 3) -> jax.Array:
    """Return `x` with zeros in the padding columns."""
    if not split.is_padded:
        return x
    mask = jnp.expand_dims(
        split.mask(x.shape[column_axis]), [axis for axis in range(x.ndim) if axis != column_axis]
    )
    return jnp.where(mask, x, jnp.zeros((), x.dtype))
