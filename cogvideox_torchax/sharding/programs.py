"""Where a chunk program runs over a mesh, and the activations of its layers."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.layers import watched
from cogvideox_torchax.sharding.placement import HWNTC, NCTHW, PaddedChunk, Placement, spread
from cogvideox_torchax.vae.columns import set_split
from jax_kernels.common.columns import Split


@dataclass
class Layer:
    """The activations, arrays of one rank, that a module took and gave while a program was traced."""

    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def largest(self) -> tuple[int, ...]:
        return max(self.shapes, key=math.prod)


class ChunksOnMesh(runtime.Place):
    """Over a mesh: chunks, caches and results cross a program's border in shards.

    Args:
        mesh: of `make_mesh`.
        layers: the types of the modules that `report` tells apart.
        unit: columns of a chunk that stay together: those of one latent pixel.

    Attributes:
        layers: the activations of each of those modules, by name, as last traced.
    """

    def __init__(self, mesh: Mesh, layers: tuple[type[nn.Module], ...], unit: int = 1):
        self.placement = Placement(mesh, NCTHW, cache_layout=HWNTC, unit=unit)
        self.layers: dict[str, Layer] = {}
        self._types = layers

    def put(self, array: Any) -> PaddedChunk:
        return self.placement.put(array)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> PaddedChunk:
        return self.placement.struct(shape, dtype)

    def cache_structs(self, cache: Any) -> Any:
        return self.placement.cache_structs(cache)

    def weight(self, name: str, array: Any) -> jax.Array:
        return spread(array, self.placement.replicated)

    def weight_struct(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.placement.replicated)

    def trace(self, run: Callable[..., Any], inputs: PaddedChunk, cache: Any) -> Any:
        self.layers = {}
        return self.placement.trace(run, inputs, cache)

    def watching(self, network: nn.Module, *, split: Split) -> contextlib.AbstractContextManager[Any]:
        set_split(network.modules(), split)
        # `_record` changes nothing: so a norm and a convolution run as one, in the name of their block.
        return watched(
            network,
            lambda _, module: type(module) in self._types,
            taken=self._record,
            given=self._record,
            names_only=True,
        )

    def _record(self, name: str, values: Any) -> Any:
        for value in jax.tree.leaves(values):
            if getattr(value, "ndim", 0) == 5:
                self.layers.setdefault(name, Layer()).shapes.add(tuple(value.shape))
        return values
