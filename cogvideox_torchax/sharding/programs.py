"""A chunk program over a mesh, and the activations of its layers."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
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


class ShardedProgram(runtime.ChunkProgram):
    """A chunk program over a mesh: chunks, caches and results cross its border in shards.

    Args:
        network: as `ChunkProgram` takes it.
        mesh: of `make_mesh`.
        layers: the types of the modules that `report` tells apart.
        unit: columns of a chunk that stay together: those of one latent pixel.
    """

    def __init__(self, network: nn.Module, mesh: Mesh, layers: tuple[type[nn.Module], ...], unit: int = 1):
        super().__init__(network)
        self.placement = Placement(mesh, NCTHW, cache_layout=HWNTC, unit=unit)
        self.layers: dict[str, Layer] = {}
        self._types = layers

    def _trace(self, weights: dict[str, Any], chunk: PaddedChunk, cache: Any) -> Any:
        self.layers = {}
        return self.placement.trace(functools.partial(super()._trace, weights), chunk, cache)

    def _call(
        self, network: nn.Module, weights: dict[str, Any], chunk: Any, cache: Any, *, split: Split
    ) -> Any:
        set_split(network.modules(), split)
        # `_record` changes nothing: so a norm and a convolution run as one, in the name of their block.
        with watched(network, self._is_layer, taken=self._record, given=self._record, names_only=True):
            return super()._call(network, weights, chunk, cache)

    def _is_layer(self, _name: str, module: nn.Module) -> bool:
        return type(module) in self._types

    def _record(self, name: str, values: Any) -> Any:
        for value in jax.tree.leaves(values):
            if getattr(value, "ndim", 0) == 5:
                self.layers.setdefault(name, Layer()).shapes.add(tuple(value.shape))
        return values

    def weights(self, network: nn.Module) -> dict[str, Any]:
        runtime.move_weights(network, functools.partial(spread, sharding=self.placement.replicated))
        return super().weights(network)

    def put(self, chunk: torch.Tensor) -> PaddedChunk:
        on_jax = runtime.on_jax(chunk)
        return self.put_array(runtime.array_of(chunk) if on_jax else runtime.host_array(chunk))

    def put_array(self, chunk: Any) -> PaddedChunk:
        return self.placement.put(chunk)

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        weights, _ = super().structs(chunk, dtype)
        weights = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self.placement.replicated)
            for name, value in weights.items()
        }
        return weights, self.placement.struct(chunk, dtype)

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        return self.placement.cache_structs(super().cache_structs(weights, chunk))
