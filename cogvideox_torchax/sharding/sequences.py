"""Where the weights and the activations of the transformer and of the text encoder lie on a mesh.

The batch, which holds the two halves of classifier-free guidance, is split over "dp". Weights are split over
"tp": the first of two matrices by its columns, the second by its rows, so that what lies between them stays
where it is and one sum over "tp" follows (Shoeybi et al. 2019, "Megatron-LM"). Attention has its heads over
"tp"; heads that it does not divide leave it to the queries (`jax_kernels.attention`).
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.layers import watched
from cogvideox_torchax.sharding.programs import Layer

COLUMNS = re.compile(
    r"(attn1\.to_(q|k|v|qkv)|ff\.net\.0\.proj|SelfAttention\.(q|k|v)|DenseReluDense\.wi(_[01])?)(\.base_layer)?\.(weight|bias)$"
)
"""Matrices (out, in) whose outputs are split, with their biases."""

ROWS = re.compile(
    r"(attn1\.to_out\.0|ff\.net\.2|norm[12]\.linear"
    r"|SelfAttention\.o|DenseReluDense\.wo)(\.base_layer)?\.weight$"
)
"""Matrices (out, in) whose inputs are split; their biases are added once, after the sum.

Those of the modulation are among them because what comes out is cut into six parts, which shards of its
columns would straddle.
"""

TABLES = re.compile(r"(shared|embed_tokens|relative_attention_bias)\.weight$")
"""Tables (entries, channels) split by channels."""


def weight_spec(name: str, rank: int) -> PartitionSpec:
    """How the weight of a transformer or a text encoder is split, by its name."""
    if COLUMNS.search(name):
        return PartitionSpec("tp") if rank == 1 else PartitionSpec("tp", None)
    if ROWS.search(name) or TABLES.search(name):
        return PartitionSpec(None, "tp")
    return PartitionSpec()


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where a weight lies.

    Raises:
        ValueError: "tp" does not divide the axis that it is to be split by.
    """
    spec = weight_spec(name, len(shape))
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"got a mesh with tp={mesh.shape[axis]}: it does not divide the {size} channels of {name}; "
                f"choose tp among {[n for n in range(1, size + 1) if size % n == 0][:12]}"
            )
    return NamedSharding(mesh, spec)


def check_weights(module: nn.Module, mesh: Mesh) -> None:
    """Raises `ValueError` unless a mesh divides a network's weights."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        weight_sharding(mesh, name, tuple(tensor.shape))


def put_weights(module: nn.Module, mesh: Mesh) -> None:
    """Puts a network's weights on a mesh, every device's part straight from where they are."""
    runtime.put_weights(
        module, lambda name, array: jax.device_put(array, weight_sharding(mesh, name, array.shape))
    )


@dataclass(frozen=True)
class SequencePlacement:
    """Where sequences (N, S, C) lie: split by batch over "dp" where it divides."""

    mesh: Mesh

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        batch = "dp" if shape[0] % self.mesh.shape["dp"] == 0 else None
        return PartitionSpec(batch, *(None,) * (len(shape) - 1))

    def parts(self, spec: PartitionSpec) -> list[int]:
        """Over how many devices each axis is split."""
        return [1 if name is None else self.mesh.shape[name] for name in spec]

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array) -> jax.Array:
        """Inside a program: `x` split by its spec."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(x.shape)))


class ShardedModuleProgram(runtime.ModuleProgram):
    """A network's program over a mesh: weights split, sequences constrained, the result everywhere.

    Args:
        network: as `ModuleProgram` takes it.
        placement: of its sequences.
        layers: the types of the modules that take and give sequences split over the mesh; `report` tells them
            apart.
    """

    def __init__(self, network: nn.Module, placement: SequencePlacement, layers: tuple[type[nn.Module], ...]):
        super().__init__(network)
        self.placement = placement
        self.layers: dict[str, Layer] = {}
        self._types = layers

    def _trace(self, options: Any, weights: dict[str, Any], tensors: dict[str, Any]) -> Any:
        self.layers = {}
        # The attention kernel asks for it: a kernel has to be split by hand.
        with jax.sharding.use_abstract_mesh(self.placement.mesh.abstract_mesh):
            result = super()._trace(options, weights, tensors)
        return jax.lax.with_sharding_constraint(result, self.placement.replicated)

    def _call(self, network: nn.Module, *inputs: Any) -> Any:
        with watched(network, self._is_layer, taken=self._split, given=self._split):
            return super()._call(network, *inputs)

    def _is_layer(self, _name: str, module: nn.Module) -> bool:
        return type(module) in self._types

    def _split(self, name: str, value: Any) -> Any:
        """The sequences in a value, which may be nested, split over the mesh."""
        if isinstance(value, torch.Tensor):
            if value.ndim != 3 or not runtime.on_jax(value):
                return value
            self.layers.setdefault(name, Layer()).shapes.add(tuple(value.shape))
            return runtime.torch_view(self.placement.constrain)(value)
        if isinstance(value, dict):
            return {key: self._split(name, part) for key, part in value.items()}
        return tuple(self._split(name, part) for part in value) if isinstance(value, tuple) else value

    def put(self, tensor: Any) -> Any:
        array = runtime.array_of(tensor) if runtime.on_jax(tensor) else runtime.host_array(tensor)
        return jax.device_put(array, self.placement.replicated)

    def weight_struct(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=weight_sharding(self.placement.mesh, name, shape))

    def struct(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.placement.replicated)
