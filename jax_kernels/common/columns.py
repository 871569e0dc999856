"""Activations whose columns are split over the devices of a mesh, and padded where they do not divide.

Between kernels XLA's partitioner carries the split. A kernel that looks at neighbouring columns, or has a
part in Pallas, runs by hand on each device's own (`by_shards`): what its neighbours' columns add to its edges
is computed from the columns that they send, so that the rest is the program of one device, unchanged.

Padding fills up the last shards of a width that does not divide. It holds zeros: kernels take it so and give
it so, which costs them nothing where they compute the result anyway. Statistics leave it out.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jax_kernels.common.tiles import pallas_is_on


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
        """How many devices' columns make a picture; 1 to code that sees them all, outside of a shard."""
        return lax.axis_size(self.columns) if self.in_shard else 1


_split: ContextVar[Split] = ContextVar("split of the columns", default=Split())  # noqa: B039, a tuple


@contextlib.contextmanager
def split_columns(split: Split) -> Iterator[None]:
    """While it is open, kernels take activations to be split and padded so.

    A `split` over devices goes with `jax.sharding.use_abstract_mesh`, whose axes it names.
    """
    token = _split.set(split)
    try:
        yield
    finally:
        _split.reset(token)


Function = TypeVar("Function", bound=Callable[..., Any])


def jit_kernel(static_argnames: Sequence[str]) -> Callable[[Function], Function]:
    """`jax.jit` for a kernel of activations: what `split_columns` says and whether Pallas kernels are on is
    part of what it is traced for."""

    def decorate(function: Function) -> Function:
        def traced(*args: Any, split: Split, pallas: bool, **kwargs: Any) -> Any:
            with split_columns(split):
                return function(*args, **kwargs)

        traced.__name__ = function.__name__  # what a compiled program calls its instructions after
        compiled = jax.jit(traced, static_argnames=("split", "pallas", *static_argnames))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled(*args, split=_split.get(), pallas=pallas_is_on(), **kwargs)

        return cast(Function, call)

    return decorate


def by_shards(
    function: Callable[..., Any],
    activations: tuple[Any, ...],
    weights: tuple[Any, ...] = (),
    statistics: tuple[Any, ...] = (),
) -> Any:
    """`function(*activations, *weights, *statistics)`, by each device on its own columns where
    `split_columns` says that they are split, else by one for all.

    Args:
        function: gives activations.
        activations: arrays N T H W C, each split as `split_columns` says, or None.
        weights: arrays that are the same on every device, or None.
        statistics: arrays N ..., of each video and all of its columns.
    """
    split = _split.get()
    if not split.columns or split.in_shard:
        return function(*activations, *weights, *statistics)

    def shard(*groups: tuple[Any, ...]) -> Any:
        with split_columns(split._replace(in_shard=True)):
            return function(*(array for group in groups for array in group))

    own = PartitionSpec(split.videos, None, None, split.columns)
    return jax.shard_map(
        shard,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(own, PartitionSpec(), PartitionSpec(split.videos)),
        out_specs=own,
        check_vma=False,
    )(activations, weights, statistics)


def by_platform(*operands: Any, **branches: Callable[..., Any]) -> Any:
    """`lax.platform_dependent` for branches that ask how columns are split.

    JAX keeps what it traced of a branch by the function and its operands' shapes. These are functions that it
    has not seen.
    """
    fresh = {platform: functools.partial(branch) for platform, branch in branches.items()}
    return lax.platform_dependent(*operands, **fresh)


def neighbours_of(
    x: Float[Array, "N T H W C"], reach: int
) -> tuple[Float[Array, "N T H reach C"], Float[Array, "N T H reach C"]]:
    """The `reach` columns left and right of a shard's own, zeros beyond the first and the last shard.

    Raises:
        ValueError: a reach beyond the next shard's columns.
    """
    if not 0 < reach <= x.shape[3]:
        raise ValueError(
            f"a kernel that reaches {reach} columns to either side got shards of {x.shape[3]}: a shard must "
            f"have that many columns; use fewer devices"
        )
    return exchanged(x[:, :, :, :reach], x[:, :, :, -reach:])


def exchanged(first: Shaped[Array, "*column"], last: Shaped[Array, "*column"]) -> tuple[Array, Array]:
    """For the first and the last columns of a shard those of its neighbours, the left one's last and the
    right one's first, zeros beyond the first and the last shard."""
    split = _split.get()
    pairs = [(shard, shard + 1) for shard in range(split.shards - 1)]
    left = lax.ppermute(last, split.columns, pairs)
    return left, lax.ppermute(first, split.columns, [(b, a) for a, b in pairs])


def add_columns(y: Float[Array, "N T H W C"], columns: Float[Array, "N T H w C"], at: int) -> Array:
    """`y` with `columns` added from column `at` on."""
    after = y.shape[3] - columns.shape[3] - at
    none, zero = (0, 0, 0), jnp.zeros((), columns.dtype)
    return y + lax.pad(columns, zero, [none, none, none, (at, after, 0), none])


def add_from_neighbours(
    y: Float[Array, "N T2 H2 W O"],
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "... kw I O"],
    convolve: Callable[[Array, Array, tuple[int, int]], Array],
) -> Float[Array, "N T2 H2 W O"]:
    """The sums of a window over `x`, with what a shard's neighbours add to its edges.

    Args:
        y: the sums with zeros in the neighbours' place, not yet rounded.
        x: what the window moves over.
        kernel: the window, of an odd number of columns.
        convolve: moves a window over columns, with so many of zeros to the left and to the right.
    """
    reach = kernel.shape[-3] // 2
    if not reach or not has_neighbours():
        return y
    left, right = neighbours_of(x, reach)
    before, after = kernel[..., :reach, :, :], kernel[..., reach + 1 :, :, :]
    y = add_columns(y, convolve(left, before, (0, reach - 1)), at=0)
    return add_columns(y, convolve(right, after, (reach - 1, 0)), at=y.shape[3] - reach)


def shard_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """What one device has of `x`, an activation N T H W C, shape and dtype."""
    split, (videos, *size, columns, channels) = _split.get(), x.shape
    if split.columns and not split.in_shard:
        mesh = jax.sharding.get_abstract_mesh().shape
        videos //= mesh[split.videos] if split.videos else 1
        columns //= math.prod(mesh[axis] for axis in split.columns)
    return jax.ShapeDtypeStruct((videos, *size, columns, channels), x.dtype)


def is_padded() -> bool:
    """Whether some columns only pad a width."""
    split = _split.get()
    return split.real != split.padded


def has_neighbours() -> bool:
    """Whether what is traced now is the code of one device among others that have columns of the same
    picture."""
    return _split.get().shards > 1


def real_columns(columns: int) -> int:
    """How many of the picture's columns an activation of so many columns has, in all shards together."""
    split = _split.get()
    return columns * split.shards * split.real // split.padded


def real_columns_here(columns: int) -> Int[Array, ""]:
    """How many of the picture's columns an activation of so many columns has by itself."""
    split = _split.get()
    first = lax.axis_index(split.columns) * columns if split.in_shard else 0
    return jnp.clip(jnp.int32(real_columns(columns)) - first, 0, columns)


def column_mask(columns: int) -> jax.Array:
    """Whether each column is the picture's, (W,)."""
    return lax.iota(jnp.int32, columns) < real_columns_here(columns)


def with_clear_padding(x: jax.Array, column_axis: int = 3) -> jax.Array:
    """`x`, of any shape and dtype, with zeros in the columns that are not the picture's."""
    columns = x.shape[column_axis]
    if not is_padded():
        return x
    others = [axis for axis in range(x.ndim) if axis != column_axis]
    return jnp.where(jnp.expand_dims(column_mask(columns), others), x, jnp.zeros((), x.dtype))
