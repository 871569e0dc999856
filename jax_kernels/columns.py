"""Activations whose columns are split over the devices of a mesh, and padded where they do not divide.

Between kernels XLA's partitioner carries the split. A kernel that looks at neighbouring columns runs by hand
on each device's own (`by_shards`): what its neighbours' columns add to its edges is computed from the columns
that they send, so that the rest is the program of one device, unchanged.

Padding fills up the last shards of a width that does not divide. It holds zeros: kernels take it so and give
it so, which costs them nothing where they compute the result anyway. Statistics leave it out.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


class Split(NamedTuple):
    """How the columns of what is traced now lie.

    Attributes:
        real: how many of every `padded` columns are the picture's.
        padded: see `real`.
        videos: the mesh axis over which videos are split, or None.
        columns: the mesh axes over which columns are split; none outside of a mesh.
        in_shard: whether it is the code of one device, on its own columns.
    """

    real: int = 1
    padded: int = 1
    videos: str | None = None
    columns: tuple[str, ...] = ()
    in_shard: bool = False

    @property
    def shards(self) -> int:
        """Over how many devices the columns are split that the code at hand does not see together."""
        return lax.axis_size(self.columns) if self.in_shard else 1


_split: ContextVar[Split] = ContextVar("split of the columns", default=Split())  # noqa: B039, a tuple


@contextlib.contextmanager
def split_columns(split: Split) -> Iterator[None]:
    """While it is open, kernels take activations to be split and padded so."""
    token = _split.set(split)
    try:
        yield
    finally:
        _split.reset(token)


Function = TypeVar("Function", bound=Callable[..., Any])


def jit_kernel(static_argnames: Sequence[str]) -> Callable[[Function], Function]:
    """`jax.jit` for a kernel of activations: what `split_columns` says is part of what it is traced for."""

    def decorate(function: Function) -> Function:
        def traced(*args: Any, split: Split, **kwargs: Any) -> Any:
            with split_columns(split):
                return function(*args, **kwargs)

        traced.__name__ = function.__name__  # what a compiled program calls its instructions after
        compiled = jax.jit(traced, static_argnames=("split", *static_argnames))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled(*args, split=_split.get(), **kwargs)

        return cast(Function, call)

    return decorate


def by_shards(
    function: Callable[..., Any], activations: tuple[Any, ...], weights: tuple[Any, ...] = ()
) -> Any:
    """`function(*activations, *weights)`, over a mesh by each device on its own columns.

    Args:
        function: gives activations.
        activations: N T H W C, or None.
        weights: the same on every device, or None.
    """
    split = _split.get()
    if not split.columns or split.in_shard:
        return function(*activations, *weights)

    def shard(activations: tuple[Any, ...], weights: tuple[Any, ...]) -> Any:
        with split_columns(split._replace(in_shard=True)):
            return function(*activations, *weights)

    own = PartitionSpec(split.videos, None, None, split.columns)
    return jax.shard_map(
        shard,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(own, PartitionSpec()),
        out_specs=own,
        check_vma=False,
    )(activations, weights)


def neighbours_of(x_NTHWC: jax.Array, reach: int) -> tuple[jax.Array, jax.Array]:
    """The `reach` columns left and right of a shard's own, zeros beyond the first and the last shard."""
    split = _split.get()
    pairs = [(shard, shard + 1) for shard in range(split.shards - 1)]
    left = lax.ppermute(x_NTHWC[:, :, :, -reach:], split.columns, pairs)
    right = lax.ppermute(x_NTHWC[:, :, :, :reach], split.columns, [(b, a) for a, b in pairs])
    return left, right


def add_columns(y_NTHWC: jax.Array, columns: jax.Array, at: int) -> jax.Array:
    """`y` with `columns` added from column `at` on."""
    after = y_NTHWC.shape[3] - columns.shape[3] - at
    none, zero = (0, 0, 0), jnp.zeros((), columns.dtype)
    return y_NTHWC + lax.pad(columns, zero, [none, none, none, (at, after, 0), none])


def add_from_neighbours(
    y_NTHWC: jax.Array,
    x_NTHWC: jax.Array,
    kernel_WIO: jax.Array,
    convolve: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array],
) -> jax.Array:
    """The sums of a window over `x`, with what a shard's neighbours add to its edges.

    Args:
        y_NTHWC: the sums with zeros in the neighbours' place, not yet rounded.
        x_NTHWC: what the window moves over.
        kernel_WIO: the window, its columns the third axis from the end: an odd number.
        convolve: moves a window over columns, with so many of zeros to the left and to the right.
    """
    reach = kernel_WIO.shape[-3] // 2
    if not reach or not in_shard():
        return y_NTHWC
    left, right = neighbours_of(x_NTHWC, reach)
    before, after = kernel_WIO[..., :reach, :, :], kernel_WIO[..., reach + 1 :, :, :]
    y_NTHWC = add_columns(y_NTHWC, convolve(left, before, (0, reach - 1)), at=0)
    last = y_NTHWC.shape[3] - reach
    return add_columns(y_NTHWC, convolve(right, after, (reach - 1, 0)), at=last)


def in_shard() -> bool:
    """Whether what is traced now is the code of one device, on its own columns."""
    return _split.get().in_shard


def real_columns(columns: int) -> int:
    """How many of an activation's columns are the picture's, in all shards together."""
    split = _split.get()
    return columns * split.shards * split.real // split.padded


def column_mask(columns: int) -> jax.Array:
    """Whether each column is the picture's, (W,)."""
    split = _split.get()
    first = lax.axis_index(split.columns) * columns if split.in_shard else 0
    return first + lax.iota(jnp.int32, columns) < real_columns(columns)


def with_clear_padding(x: jax.Array, column_axis: int = 3) -> jax.Array:
    """`x` with zeros in the columns that are not the picture's."""
    columns = x.shape[column_axis]
    split = _split.get()
    if split.real == split.padded:
        return x
    others = [axis for axis in range(x.ndim) if axis != column_axis]
    return jnp.where(jnp.expand_dims(column_mask(columns), others), x, jnp.zeros((), x.dtype))
