"""Where the arrays of a VAE lie on a mesh, and how those that do not divide cross a program's border.

Videos (N, C, T, H, W) are split by width: one video over both mesh axes, a batch that "dp" divides by video
over "dp" and by width over "tp". Another batch is split as one video is: padding it would cost each device a
video's work, padding a width costs some columns. Time is never split, weights are copied to every device.

Inside a compiled program XLA splits a width of 90 over 8 devices by itself, as 7 x 12 + 6 columns, and masks
the columns that pad the last shard. At a program's border arrays have to divide, so they cross it padded to
the same 8 x 12 columns (`Padded`): cutting the padding off moves nothing.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.modules import PORTED

AXES = ("dp", "tp")
BATCH, CHANNEL, ROW, COLUMN = 0, 1, 3, 4


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
    """An array as it crosses a program's border: split evenly, and the shape of what it stands for.

    `shape` is static: a compiled program knows it, and two shapes with the same padding are two programs.
    """

    array: Any
    shape: tuple[int, ...]


jax.tree_util.register_dataclass(Padded, data_fields=["array"], meta_fields=["shape"])


@dataclass(frozen=True)
class Placement:
    """Where the arrays of a VAE lie on a mesh."""

    mesh: Mesh

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How an activation (N, C, T, H, W) is split."""
        if shape[BATCH] % self.mesh.shape["dp"] == 0:
            return PartitionSpec("dp", None, None, None, "tp")
        return PartitionSpec(None, None, None, None, AXES)

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
        """What makes every axis divide, at the end of each."""
        return [(0, -size % parts) for size, parts in zip(shape, self.parts(self.spec(shape)), strict=True)]

    def constrain(self, x: jax.Array) -> jax.Array:
        """Inside a program: `x` split by its spec, whether or not it divides."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape))

    def enter(self, padded: Padded) -> jax.Array:
        """Inside a program: the padding cut off; every column stays on its device."""
        return self.constrain(jax.lax.slice(padded.array, (0,) * len(padded.shape), padded.shape))

    def leave(self, x: jax.Array) -> Padded:
        """Inside a program: padded, so that it can leave the program in its shards."""
        x = self.constrain(x)
        return Padded(self.constrain(jnp.pad(x, self.padding(x.shape))), x.shape)

    def put(self, chunk: torch.Tensor) -> Padded:
        """A chunk from the host, or from wherever on JAX it lies, split over the mesh."""
        shape = tuple(chunk.shape)
        if runtime.on_jax(chunk):
            array, pad = runtime.array_of(chunk), jnp.pad
        else:
            array, pad = runtime.host_array(chunk), np.pad
        padding = self.padding(shape)
        array = pad(array, padding) if any(after for _, after in padding) else array
        return Padded(jax.device_put(array, self.sharding(shape)), shape)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> Padded:
        """What stands for `put`'s result when a program is compiled without data."""
        padded = tuple(size + after for size, (_, after) in zip(shape, self.padding(shape), strict=True))
        return Padded(jax.ShapeDtypeStruct(padded, dtype, sharding=self.sharding(shape)), shape)

    def result_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How a result is split that a user gets, and so cannot be padded: by width as everything else, or,
        where the width does not divide, by rows or by channels.

        Raises:
            ValueError: none of them divides; the message names the sizes that would.
        """
        spec = self.spec(shape)
        batch, width, parts = spec[BATCH], spec[COLUMN], self.parts(spec)[COLUMN]
        for axis in (COLUMN, ROW, CHANNEL):
            if shape[axis] % parts == 0:
                return PartitionSpec(
                    *(batch if i == BATCH else width if i == axis else None for i in range(5))
                )
        raise ValueError(
            f"got a result of {shape[ROW]} x {shape[COLUMN]} pixels (height x width), {shape[CHANNEL]} "
            f"channels: it cannot be split over {parts} devices; make its height or width a multiple of "
            f"{parts}, or the mesh smaller"
        )


@dataclass
class Layer:
    """The activations (N, C, T, H, W) that a module took and gave while a program was traced."""

    shapes: set[tuple[int, ...]]

    @property
    def largest(self) -> tuple[int, ...]:
        return max(self.shapes, key=math.prod)


@contextlib.contextmanager
def constrained(network: nn.Module, placement: Placement) -> Iterator[dict[str, Layer]]:
    """While a program is traced: every ported module takes and gives activations split over the mesh.

    The modules know nothing of it. Their instructions are named after them, which `report` reads.

    Yields:
        The layers by name, filled in as they are traced.
    """
    scopes: list[Any] = []
    names: list[str] = []
    layers: dict[str, Layer] = {}
    constrain = runtime.torch_view(placement.constrain)

    def split(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim != 5 or not runtime.on_jax(value):
                return value
            layers.setdefault(names[-1], Layer(set())).shapes.add(tuple(value.shape))
            return constrain(value)
        if isinstance(value, dict):
            return {key: split(part) for key, part in value.items()}
        return tuple(map(split, value)) if isinstance(value, tuple) else value

    def before(name: str):
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            names.append(name)
            scopes.append(jax.named_scope(name))
            scopes[-1].__enter__()
            return split(args), split(kwargs)

        return hook

    def after(_module: nn.Module, _args: Any, result: Any) -> Any:
        result = split(result)
        scopes.pop().__exit__(None, None, None)
        names.pop()
        return result

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if type(module) in PORTED.values():
                hooks.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
        yield layers


class ShardedProgram(runtime.ChunkProgram):
    """A chunk program over a mesh: chunks, caches and results cross its border in shards."""

    def __init__(self, network: nn.Module, placement: Placement):
        super().__init__(network)
        self.placement = placement
        self.layers: dict[str, Layer] = {}

    def _trace(self, weights: dict[str, Any], chunk: Padded, cache: Any) -> Any:
        place = self.placement
        chunk_NCTHW = place.enter(chunk)
        cache = jax.tree.map(place.enter, cache, is_leaf=lambda part: isinstance(part, Padded))
        # The kernels ask for it: what is fastest on one device may gather on several.
        with (
            jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh),
            constrained(self.network, place) as self.layers,
        ):
            result, cache = self._apply(weights, chunk_NCTHW, cache)
        sharding = NamedSharding(place.mesh, place.result_spec(result.shape))
        return jax.lax.with_sharding_constraint(result, sharding), jax.tree.map(place.leave, cache)

    def weights(self) -> dict[str, Any]:
        runtime.move_weights(self.network, self.placement.replicated)
        return super().weights()

    def put(self, chunk: torch.Tensor) -> Padded:
        return self.placement.put(chunk)

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        weights, _ = super().structs(chunk, dtype)
        weights = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self.placement.replicated)
            for name, value in weights.items()
        }
        return weights, self.placement.struct(chunk, dtype)

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        return jax.tree.map(
            lambda part: self.placement.struct(part.shape, part.array.dtype),
            super().cache_structs(weights, chunk),
            is_leaf=lambda part: isinstance(part, Padded),
        )
