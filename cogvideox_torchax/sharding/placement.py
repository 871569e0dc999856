"""Where the arrays of a VAE lie on a mesh, and how those that do not divide cross a program's border.

Videos are split by width, in either layout: one video over both mesh axes, a batch that "dp" divides by video
over "dp" and by width over "tp". Another batch is split as one video is: padding it would cost each device a
video's work, padding a width costs some columns. Time is never split, weights are copied to every device.

A width that does not divide is padded where it enters (`Padded`): 90 latent columns over 8 devices to 8 x 12,
and so 24, 48 and 96 columns a device at the levels above. Kernels know which columns are the picture's
(`jax_kernels.columns.split_columns`), and the padding is cut off what a user gets. Left to XLA, each level
would be split for itself, as 180 into 23 and 360 into 45, and columns would travel at every one.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.modules import PORTED
from jax_kernels.columns import Split, by_shards, real_columns, split_columns
from jax_kernels.layout import kept_columns_last

AXES = ("dp", "tp")


class Layout(NamedTuple):
    """Which axis of an activation is what; the one that is not named here is time."""

    batch: int
    channel: int
    row: int
    column: int


NCTHW = Layout(batch=0, channel=1, row=3, column=4)
NTHWC = Layout(batch=0, channel=4, row=2, column=3)
HWNTC = Layout(batch=2, channel=4, row=0, column=1)


def make_mesh(dp: int = 1, tp: int | None = None, *, devices: Any = None) -> Mesh:
    """A mesh with the axes "dp" and "tp", for `port(..., mesh=mesh)`.

    Args:
        dp: over how many devices a batch is split.
        tp: over how many devices a width is split; all that are left where None.
        devices: in order; `jax.devices()` where None. The first dp * tp of them are used.

    Raises:
        ValueError: sizes below one, more devices than there are, or a dp that does not divide them.
    """
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    if dp < 1 or (tp is not None and tp < 1):
        raise ValueError(f"got a mesh of dp={dp}, tp={tp}: both must be at least 1")
    if tp is None and devices.size % dp:
        raise ValueError(
            f"got dp={dp} for {devices.size} devices: it does not divide them; pass tp, or a dp of "
            f"{[n for n in range(1, devices.size + 1) if devices.size % n == 0]}"
        )
    columns = devices.size // dp if tp is None else tp
    size = dp * columns
    if size > devices.size:
        raise ValueError(
            f"got a mesh of dp={dp} x tp={columns}, {size} devices, where there are {devices.size}: "
            "make dp * tp no larger"
        )
    return Mesh(devices[:size].reshape(dp, columns), AXES, axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Any) -> Mesh:
    """The mesh, if it is one that this module can place on.

    Raises:
        ValueError: not a mesh, other axes, or axes that are not Auto.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"got a mesh of type {type(mesh).__name__}: make one with make_mesh(dp, tp)")
    if mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"got a mesh with axes {mesh.axis_names} of types {mesh.axis_types}: it takes {AXES}, both "
            "AxisType.Auto; make one with make_mesh(dp, tp)"
        )
    return mesh


@dataclass(frozen=True)
class Padded:
    """A chunk as it enters a program: split evenly, and the shape of what it stands for.

    `shape` is static: a compiled program knows it, and two shapes with the same padding are two programs.
    """

    array: Any
    shape: tuple[int, ...]


jax.tree_util.register_dataclass(Padded, data_fields=["array"], meta_fields=["shape"])


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

    def hand_out(self, x: jax.Array) -> jax.Array:
        """Inside a program: the picture's columns, split as a result that leaves it, see `result_spec`.

        By width first: a result that leaves in rows or channels would otherwise have the layers before it
        computed so, their inputs gathered.
        """
        column = self.layout.column
        picture = jax.lax.slice_in_dim(self.constrain(x), 0, real_columns(x.shape[column]), axis=column)
        sharding = NamedSharding(self.mesh, self.result_spec(picture.shape))
        return jax.lax.with_sharding_constraint(picture, sharding)

    def trace(self, network: Callable[..., Any], chunk: Padded, cache: Any) -> tuple[jax.Array, Any]:
        """Inside a program: `network(chunk, cache)`, which gives (result, cache), split from end to end."""
        column = self.layout.column
        spec = self.spec(chunk.shape)
        columns = spec[column]
        split = Split(
            real=chunk.shape[column],
            padded=chunk.array.shape[column],
            videos=spec[self.layout.batch],
            columns=(columns,) if isinstance(columns, str) else columns,
        )
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), split_columns(split):
            result, cache = network(chunk.array, cache)
            result = by_shards(kept_columns_last, (jnp.moveaxis(result, self.layout.channel, -1),))
            result = jnp.moveaxis(result, -1, self.layout.channel)  # whose padding is cut off
            return self.hand_out(result), jax.tree.map(self.of_caches.constrain, cache)

    def put(self, chunk: Any) -> Padded:
        """A chunk, a NumPy array or one on JAX, split over the mesh.

        Over several processes each gives an array of the whole shape, of which it places the columns that lie
        on its own devices and looks at no others.
        """
        shape, sharding = tuple(chunk.shape), self.sharding(chunk.shape)
        padding = self.padding(shape)
        if any(after for _, after in padding):
            chunk = (jnp.pad if isinstance(chunk, jax.Array) else np.pad)(chunk, padding)
        return Padded(spread(chunk, sharding), shape)

    def own_columns(self, shape: tuple[int, ...]) -> slice:
        """The columns of an activation that lie on this process's devices: all, where it is the only one."""
        column = self.layout.column
        padded = tuple(size + after for size, (_, after) in zip(shape, self.padding(shape), strict=True))
        indices = self.sharding(shape).addressable_devices_indices_map(padded).values()
        spans = [index[column].indices(padded[column]) for index in indices if index is not None]
        start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
        return slice(min(start, shape[column]), min(stop, shape[column]))

    def struct(self, shape: tuple[int, ...], dtype: Any) -> Padded:
        """What stands for `put`'s result when a program is compiled without data."""
        padded = tuple(size + after for size, (_, after) in zip(shape, self.padding(shape), strict=True))
        return Padded(jax.ShapeDtypeStruct(padded, dtype, sharding=self.sharding(shape)), shape)

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


def spread(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array under a sharding; over several processes each places what lies on its own devices."""
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@dataclass
class Layer:
    """The activations (N, C, T, H, W) that a module took and gave while a program was traced."""

    shapes: set[tuple[int, ...]]

    @property
    def largest(self) -> tuple[int, ...]:
        return max(self.shapes, key=math.prod)


@contextlib.contextmanager
def recorded(network: nn.Module) -> Iterator[dict[str, Layer]]:
    """While a program is traced: the activations of every ported module, whose instructions are named after
    it, as `report` reads them. The modules know nothing of it.

    Yields:
        The layers by name, filled in as they are traced.
    """
    scopes: list[Any] = []
    layers: dict[str, Layer] = {}

    def record(name: str, values: Any) -> None:
        for value in jax.tree.leaves(values):
            if getattr(value, "ndim", 0) == 5:
                layers.setdefault(name, Layer(set())).shapes.add(tuple(value.shape))

    def before(name: str):
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            record(name, (args, kwargs))
            scopes.append(jax.named_scope(name))
            scopes[-1].__enter__()

        return hook

    def after(name: str):
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            scopes.pop().__exit__(None, None, None)
            record(name, result)

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if type(module) in PORTED.values():
                hooks.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after(name)).remove)
        yield layers


class ShardedProgram(runtime.ChunkProgram):
    """A chunk program over a mesh: chunks, caches and results cross its border in shards."""

    def __init__(self, network: nn.Module, mesh: Mesh, unit: int = 1):
        super().__init__(network)
        self.placement = Placement(mesh, NCTHW, cache_layout=HWNTC, unit=unit)
        self.layers: dict[str, Layer] = {}

    def _trace(self, weights: dict[str, Any], chunk: Padded, cache: Any) -> Any:
        with recorded(self.network) as self.layers:
            return self.placement.trace(functools.partial(super()._trace, weights), chunk, cache)

    def weights(self) -> dict[str, Any]:
        runtime.move_weights(self.network, functools.partial(spread, sharding=self.placement.replicated))
        return super().weights()

    def put(self, chunk: torch.Tensor) -> Padded:
        on_jax = runtime.on_jax(chunk)
        return self.placement.put(runtime.array_of(chunk) if on_jax else runtime.host_array(chunk))

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        weights, _ = super().structs(chunk, dtype)
        weights = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self.placement.replicated)
            for name, value in weights.items()
        }
        return weights, self.placement.struct(chunk, dtype)

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        return self.placement.cache_structs(super().cache_structs(weights, chunk))
