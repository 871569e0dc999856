"""Activations whose columns are split over the devices of a mesh, and padded where they do not divide.

Between kernels XLA's partitioner carries the split. A kernel that looks at neighbouring columns, or has a
part in Pallas, runs on each device's shard (`dispatch.map_shards`). Neighbouring devices send each other the
columns at their edges. The kernel computes separately what those add to the shard's own edges, so that the
rest is the program of one device, unchanged.

If the devices do not divide a width, it is padded: the last shards have padding columns on their right. These
are zero before and after every kernel, and statistics leave them out.
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
        real, padded: of every `padded` columns, `real` are the frame's and the others are padding: a ratio,
            which holds at every resolution of a model.
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
        """Number of devices that share a frame's columns; 1 for code outside a shard, which sees them all."""
        return jax.lax.axis_size(self.columns) if self.in_shard else 1

    @property
    def has_neighbours(self) -> bool:
        return self.shards > 1

    @property
    def is_padded(self) -> bool:
        return self.real != self.padded

    def real_columns(self, columns: int) -> int:
        """Return the width of a whole frame without padding; `columns` is a shard's width with padding."""
        return columns * self.shards * self.real // self.padded

    def real_columns_here(self, columns: int) -> Int[Array, ""]:
        """Return how many of this shard's `columns` belong to the frame."""
        # `real_columns` counts in the whole frame; `self.columns` are mesh axes.
        columns_before = jax.lax.axis_index(self.columns) * columns if self.in_shard else 0
        return jnp.clip(jnp.int32(self.real_columns(columns)) - columns_before, 0, columns)

    def mask(self, columns: int) -> jax.Array:
        """Return booleans, which are False for this shard's padding columns."""
        return jax.lax.iota(jnp.int32, columns) < self.real_columns_here(columns)

    def shard_of(self, x: jax.Array) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of one device's shard of `x` (N T H W C): inside a shard, of `x` itself."""
        videos, *frames_and_rows, columns, channels = x.shape
        if self.columns and not self.in_shard:
            axis_sizes = jax.sharding.get_abstract_mesh().shape  # by the name of a mesh axis
            videos //= axis_sizes[self.videos] if self.videos else 1
            columns //= math.prod(axis_sizes[axis] for axis in self.columns)
        return jax.ShapeDtypeStruct((videos, *frames_and_rows, columns, channels), x.dtype)


WHOLE = Split()
"""The split of a single device, which has all columns."""


def neighbours_of(
    split: Split, x: Float[Array, "N T H W C"], reach: int
) -> tuple[Float[Array, "N T H reach C"], Float[Array, "N T H reach C"]]:
    """Fetch the `reach` columns left and right of a shard `x` from other devices; a frame's end has zeros.

    Raises:
        ValueError: a reach beyond the next shard's columns.
    """
    if not 0 < reach <= x.shape[3]:
        raise ValueError(
            f"a kernel that reaches {reach} columns to either side got shards of {x.shape[3]}: a shard must "
            f"have that many columns; use fewer devices"
        )
    return exchanged(split, x[:, :, :, :reach], x[:, :, :, -reach:])


def exchanged(
    split: Split, first: Shaped[Array, "*column"], last: Shaped[Array, "*column"]
) -> tuple[Array, Array]:
    """Send a shard's first and last columns to its neighbours, and return (left, right) columns of theirs.

    The first shard gets zeros on its left, the last on its right.
    """
    to_right = [(shard, shard + 1) for shard in range(split.shards - 1)]  # (sender, receiver)
    to_left = [(receiver, sender) for sender, receiver in to_right]
    # `split.columns` are the mesh axes. A device that no pair names as receiver gets zeros.
    return jax.lax.ppermute(last, split.columns, to_right), jax.lax.ppermute(first, split.columns, to_left)


def add_columns(y: Float[Array, "N T H W C"], columns: Float[Array, "N T H w C"], at: int) -> Array:
    """Return `y` with `columns` added to its columns from `at` on, by a sum that XLA can fuse."""
    padding = [(0, 0, 0)] * 5  # of each axis: before, after, between elements
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
    number of columns. `convolve(columns, kernel, (left, right))` pads with so many zero columns and
    convolves.
    """
    reach = kernel.shape[-3] // 2
    if not reach or not split.has_neighbours:
        return y
    left, right = neighbours_of(split, x, reach)
    left_taps, right_taps = kernel[..., :reach, :, :], kernel[..., reach + 1 :, :, :]
    # Zeros stand for the shard's own columns, which `y` has counted. `reach` columns and `reach - 1` zeros,
    # convolved with `reach` taps, give `reach` columns.
    y = add_columns(y, convolve(left, left_taps, (0, reach - 1)), at=0)
    return add_columns(y, convolve(right, right_taps, (reach - 1, 0)), at=y.shape[3] - reach)


def with_clear_padding(x: jax.Array, split: Split, column_axis: int = 3) -> jax.Array:
    """Return `x` with zeros in the padding columns."""
    if not split.is_padded:
        return x
    other_axes = [axis for axis in range(x.ndim) if axis != column_axis]
    mask = jnp.expand_dims(split.mask(x.shape[column_axis]), other_axes)
    return jnp.where(mask, x, jnp.zeros((), x.dtype))
