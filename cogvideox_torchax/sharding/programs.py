"""The placement of a chunk program that also records the activations of its layers."""

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import jax
from torch import nn

from cogvideox_torchax.runtime.layers import watched
from cogvideox_torchax.sharding.placement import Placement
from cogvideox_torchax.vae.columns import set_split
from jax_kernels.common.columns import Split


@dataclass
class Layer:
    """The activations, arrays of one rank, that a module took and gave while a program was traced."""

    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def largest(self) -> tuple[int, ...]:
        return max(self.shapes, key=math.prod)


@dataclass(frozen=True)
class ChunksOnMesh(Placement):
    """The placement of a torch network's chunks, and of its layers' activations, on a mesh.

    Attributes:
        types: of the modules that `plan.report` tells apart.
        layers: the activations of each of those modules, by name, as last traced.
    """

    types: tuple[type[nn.Module], ...] = ()
    layers: dict[str, Layer] = field(default_factory=dict, compare=False)

    @property
    def placement(self) -> Placement:
        """The placement of the layers' activations."""
        return self

    def watching(self, network: nn.Module, *, split: Split) -> contextlib.AbstractContextManager[Any]:
        self.layers.clear()
        set_split(network.modules(), split)
        # `_record` changes nothing: so a norm and a convolution run as one, in the name of their block.
        return watched(
            network,
            lambda _, module: type(module) in self.types,
            taken=self._record,
            given=self._record,
            names_only=True,
        )

    def _record(self, name: str, values: Any) -> Any:
        for value in jax.tree.leaves(values):
            if getattr(value, "ndim", 0) == 5:
                self.layers.setdefault(name, Layer()).shapes.add(tuple(value.shape))
        return values
