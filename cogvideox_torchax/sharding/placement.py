"""Where the arrays of a VAE lie on a mesh, and how those that do not divide cross a program's border.

Videos are split by width, in either layout: one video over both mesh axes, a batch that "dp" divides by video
over "dp" and by width over "tp". Another batch is split as one video is: padding it would cost each device a
video's work, padding a width costs some columns. Time is never split, weights are copied to every device.

A width that does not divide is padded where it enters (`PaddedChunk`): 90 latent columns over 8 devices to
8 x 12, and so 24, 48 and 96 columns a device at the levels above. Kernels are given which columns are the
picture's (`jax_kernels.common.columns.Split`), and the padding is cut off what a user gets. Left to
XLA, each level would be split for itself, as 180 into 23 and 360 into 45: columns would travel at every one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cogvideox_torchax.sharding.mesh import AXES
from cogvideox_torchax.upstream import is_traced
from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.dispatch import Target, by_shards, dispatched
from jax_kernels.common.layout import kept_columns_last


class Layout(NamedTuple):
    """Which axis of an activation is what; the one that is not named here is time."""

    batch: int
    channel: int
    row: int
    column: int


NCTHW = Layout(batch=0, channel=1, row=3, column=4)

NTHWC = Layout(batch=0, channel=4, row=2, column=3)

HWNTC = Layout(batch=2, channel=4, row=0, column=1)


@dataclass(frozen=True)
class PaddedChunk:
    """A chunk as it enters a program: split evenly, and the shape of what it stands for.

    `shape` is static: a compiled program knows it, and two shapes with the same padding are two programs.
    """

    array: Any
    shape: tuple[int, ...]


jax.tree_util.register_dataclass(PaddedChunk, data_fields=["array"], meta_fields=["shape"])


@dataclass(frozen=True)
class Placement:
    """Where the arrays of a VAE lie on a mesh.

    Attributes:
        mesh: of `make_mesh`.
        layout: of the activations, chunks and results that are placed.
        cache_layout: of the caches between two chunks; as `layout` where None.
        unit: columns of a chunk that stay together: those of one latent pixel.
    """

    mesh: Mesh
    layout: Layout = NCTHW
    cache_layout: Layout | None = None
    unit: int = 1

    @property
    def of_caches(self) -> "Placement":
        """Where the caches lie."""
        return Placement(self.mesh, self.cache_layout or self.layout)

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How an activation of this shape is split."""
        return self._split(shape, self.layout.column)

    def _split(self, shape: tuple[int, ...], axis: int) -> PartitionSpec:
        """By video over "dp" and along `axis` over "tp", or, where "dp" does not divide the batch, along
        `axis` over both."""
        if shape[self.layout.batch] % self.mesh.shape["dp"] == 0:
            names = {self.layout.batch: "dp", axis: "tp"}
        else:
            names = {axis: AXES}
        return PartitionSpec(*(names.get(i) for i in range(len(shape))))

    def parts(self, spec: PartitionSpec) -> list[int]:
        """Over how many devices each axis is split."""
        return [
            math.prod(self.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ()))
            for names in spec
        ]

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(shape))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def padding(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """What makes every axis of a chunk divide, at its every level, at the end of each."""
        units = [self.unit if axis == self.layout.column else 1 for axis in range(len(shape))]
        parts = self.parts(self.spec(shape))
        return [(0, -size % (n * unit)) for size, n, unit in zip(shape, parts, units, strict=True)]

    def constrain(self, x: jax.Array) -> jax.Array:
        """Inside a program: `x` split by its spec."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape))

    def hand_out(self, x: jax.Array, split: Split = WHOLE) -> jax.Array:
        """Inside a program: the picture's columns, split as a result that leaves it, see `result_spec`.

        By width first: a result that leaves in rows or channels would otherwise have the layers before it
        computed so, their inputs gathered.
        """
        column = self.layout.column
        picture = jax.lax.slice_in_dim(self.constrain(x), 0, split.real_columns(x.shape[column]), axis=column)
        sharding = NamedSharding(self.mesh, self.result_spec(picture.shape))
        return jax.lax.with_sharding_constraint(picture, sharding)

    def trace(self, network: Callable[..., Any], chunk: PaddedChunk, cache: Any) -> tuple[jax.Array, Any]:
        """Inside a program: `network(chunk, cache, split=...)`, which returns (result, cache), split from end
        to end."""
        column = self.layout.column
        spec = self.spec(chunk.shape)
        columns = spec[column]
        split = Split(
            real=chunk.shape[column],
            padded=chunk.array.shape[column],
            videos=spec[self.layout.batch],
            columns=(columns,) if isinstance(columns, str) else columns,
        )
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            result, cache = network(chunk.array, cache, split=split)
            result = _columns_last(jnp.moveaxis(result, self.layout.channel, -1), split=split)
            result = jnp.moveaxis(result, -1, self.layout.channel)  # whose padding is cut off
            return self.hand_out(result, split), jax.tree.map(self.of_caches.constrain, cache)

    def put(self, chunk: Any) -> PaddedChunk:
        """A chunk, a NumPy array or one on JAX, split over the mesh.

        Over several processes each gives an array of the whole shape, of which it places the columns that lie
        on its own devices and looks at no others.
        """
        shape, sharding = tuple(chunk.shape), self.sharding(chunk.shape)
        padding = self.padding(shape)
        if any(after for _, after in padding):
            chunk = (jnp.pad if isinstance(chunk, jax.Array) else np.pad)(chunk, padding)
        return PaddedChunk(spread(chunk, sharding), shape)

    def own_columns(self, shape: tuple[int, ...]) -> slice:
        """The columns of an activation that lie on this process's devices: all, where it is the only one."""
        column = self.layout.column
        padded = tuple(size + after for size, (_, after) in zip(shape, self.padding(shape), strict=True))
        indices = self.sharding(shape).addressable_devices_indices_map(padded).values()
        spans = [index[column].indices(padded[column]) for index in indices if index is not None]
        start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
        return slice(min(start, shape[column]), min(stop, shape[column]))

    def struct(self, shape: tuple[int, ...], dtype: Any) -> PaddedChunk:
        """What stands for `put`'s result when a program is compiled without data."""
        padded = tuple(size + after for size, (_, after) in zip(shape, self.padding(shape), strict=True))
        return PaddedChunk(jax.ShapeDtypeStruct(padded, dtype, sharding=self.sharding(shape)), shape)

    def cache_structs(self, cache: Any) -> Any:
        """What stands for a cache, of which the shapes are known, where it lies."""
        stored = self.of_caches
        return jax.tree.map(
            lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=stored.sharding(part.shape)),
            cache,
        )

    def result_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How a result is split that a user gets, and so cannot be padded: by width as everything else, or,
        where the width does not divide, by rows or by channels.

        Raises:
            ValueError: none of them divides; the message names the sizes that would.
        """
        layout = self.layout
        parts = self.parts(self.spec(shape))[layout.column]
        for axis in (layout.column, layout.row, layout.channel):
            if shape[axis] % parts == 0:
                return self._split(shape, axis)
        raise ValueError(
            f"got a result of {shape[layout.row]} x {shape[layout.column]} pixels (height x width), "
            f"{shape[layout.channel]} channels: it cannot be split over {parts} devices; make its height or "
            f"width a multiple of {parts}, or the mesh smaller"
        )


def columns_last_on(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Frames of a few channels as a TPU keeps them best."""
    return by_shards(target, kept_columns_last, (x_NTHWC,))


_columns_last = dispatched(columns_last_on, "tpu")


def spread(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array under a sharding; over several processes each places what lies on its own devices."""
    if is_traced(array):
        return jax.device_put(array, sharding)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
