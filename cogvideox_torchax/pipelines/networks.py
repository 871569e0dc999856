"""Networks as compiled programs: networks of any class, and of the classes whose layers this package knows.

A ported class is a subclass of the stock class, the class of diffusers or of another library that it
replaces. It adds a second way to run: plain torch tensors run the inherited forward, torchax tensors run a
compiled program.
"""

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import torch
from diffusers.models.activations import GELU as DiffusersGELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.embeddings import CogVideoXPatchEmbed
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from jax.sharding import Mesh
from torch import nn
from torch.utils import _pytree as pytree
from transformers.models.t5.modeling_t5 import T5LayerFF, T5LayerSelfAttention

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files.models import saved_from_host
from cogvideox_torchax.pipelines import loras, sharding
from cogvideox_torchax.pipelines.blocks import GELU, Block
from cogvideox_torchax.pipelines.layers import (
    AttnProcessor,
    FusedAttnProcessor,
    LayerNorm,
    Linear,
    PatchEmbed,
)
from cogvideox_torchax.pipelines.sequence import SequencePlacement
from cogvideox_torchax.runtime.models import PortedModel
from cogvideox_torchax.runtime.trees import change_in
from cogvideox_torchax.runtime.weights import weight_slots
from cogvideox_torchax.sharding import BatchPlacement, Parallel, check_mesh
from cogvideox_torchax.vae.torchax.modules import SiLU

LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.LayerNorm: LayerNorm,
    nn.SiLU: SiLU,
    DiffusersGELU: GELU,
    CogVideoXBlock: Block,
    CogVideoXPatchEmbed: PatchEmbed,
}
"""The class that each layer of a network becomes."""

PROCESSORS: dict[Any, Any] = {
    CogVideoXAttnProcessor2_0: AttnProcessor,
    FusedCogVideoXAttnProcessor2_0: FusedAttnProcessor,
}
"""The class that each attention processor becomes."""

SPLIT_LAYERS = (PatchEmbed, Block, Attention, FeedForward, T5LayerSelfAttention, T5LayerFF)
"""The layers whose inputs and outputs are sequences, which a mesh may split."""


def tie_weights(network: Any) -> None:
    """Tie a network's weights as its class does, as far as they were tied: if they are equal on JAX.

    Torch's own `to` unties those that it moves there. A weight on "meta", for which no file had a tensor,
    becomes the one that it is to be tied to.
    """
    slots = [(owner, key, owner[key]) for _name, owner, key in weight_slots(network)]
    network.tie_weights()
    for owner, key, old in slots:
        new = owner[key]
        if new.is_meta and not old.is_meta:  # a file has it under this name alone
            for other, other_key, _old in slots:
                if other[other_key] is new:
                    other[other_key] = old
        elif not (new is old or old.is_meta or _are_equal_on_jax(new, old)):
            owner[key] = old


def _are_equal_on_jax(*tensors: torch.Tensor) -> bool:
    return all(map(runtime.on_jax, tensors)) and bool(jnp.array_equal(*map(runtime.array_of, tensors)))


def port_layers(network: nn.Module) -> None:
    """Give the layers of a network, and their attention processors, their ported classes, in place."""
    for module in network.modules():
        module.__class__ = LAYERS.get(type(module), type(module))
        processor = getattr(module, "processor", None)
        if type(processor) in PROCESSORS:
            processor.__class__ = PROCESSORS[type(processor)]


def _comes_from_input(tensor: torch.Tensor) -> bool:
    """Return whether a backward pass from a tensor leads to a tensor of the user's, not to weights alone.

    A tensor that is no result of an operation leads to itself, if it requires a gradient.
    """
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    for node in nodes:  # which grows meanwhile
        if node not in seen and not hasattr(node, "why"):  # that of `runtime.without_gradient` ends a pass
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
    # Where a pass ends at a tensor, with its gradient, the node has that tensor as `variable`.
    return (tensor.requires_grad and tensor.is_leaf) or any(
        hasattr(node, "variable") and not isinstance(node.variable, nn.Parameter) for node in seen
    )


class CompiledNetwork(PortedModel):
    """Mixin for a stock class of any network: on JAX, a call runs a compiled program of that class's forward.

    Attributes:
        component: the network's name in its pipeline.
        parallelism: how the network uses the mesh, as `choose_parallelism` returns it; None without a mesh.
    """

    component = "network"
    parallelism: Any = None

    @property
    def placement(self) -> Any:
        """The sharding of inputs and weights, a `sharding.MeshPlace`; None without a mesh."""
        return None if self.mesh is None else BatchPlacement(self.mesh, split=self.parallelism.split)

    def run_as_it_is(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the stock class's `method`; with weights on JAX it runs as a program."""
        if not runtime.is_on_jax(self):
            return method(self, *args, **kwargs)
        with self.in_use():
            return runtime.run_method(
                self, method, *args, place=self.placement, name=self.component, **kwargs
            )

    def enable_parallelism(self, **_options: Any) -> None:
        raise ValueError(
            f"{self.component}: enable_parallelism is for PyTorch on several GPUs: leave it out, and pass "
            "mesh=make_mesh(dp=..., tp=...) to port or load_pipeline, which splits the work over devices"
        )

    def __init_subclass__(cls, **options: Any) -> None:
        """Have those methods of the stock class, the last base, that read weights find them in PyTorch."""
        super().__init_subclass__(**options)
        stock: Any = cls.__bases__[-1]
        for name in filter(functools.partial(hasattr, stock), loras.METHODS):
            setattr(cls, name, loras.in_pytorch(getattr(stock, name)))
        if hasattr(stock, "save_pretrained"):
            cls.save_pretrained = saved_from_host(stock.save_pretrained)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network; on JAX, a `forward` set on this object runs operation by operation.

        Raises:
            ValueError: on JAX, an input through which a gradient of a user's tensor is wanted.
        """
        if (
            torch.is_grad_enabled()
            and runtime.is_on_jax(self)
            and any(
                isinstance(leaf, torch.Tensor) and _comes_from_input(leaf)
                for leaf in pytree.tree_leaves((args, kwargs))
            )
        ):
            raise ValueError(
                f"got an input with requires_grad: on JAX the {self.component} has no gradients; call it in "
                "torch.no_grad(), and take gradients through the VAE alone, which has them"
            )
        if "forward" in vars(self) and runtime.is_on_jax(self):
            # Another library has set `forward`. It is not compiled, as it may keep tensors from one call for
            # the next: in a program these would be tensors of a trace, which have no values after the trace.
            setter = upstream.module_of(vars(self)["forward"])
            runtime.warn_once(
                self, f"{self.component}: the forward set by {setter} runs operation by operation"
            )
        return super().__call__(*args, **kwargs)

    def place(self) -> None:
        """Port layers that were added since `port`, and put all weights on JAX."""
        port_layers(self)
        self.put_weights()

    def put_weight(self, name: str, array: Any) -> Any:
        if self.mesh is None:
            return super().put_weight(name, array)
        return self.placement.weight(name, array)

    def place_on(self, mesh: Mesh, parallel: Parallel | None = None, memory: float | None = None) -> None:
        """Compile for a mesh from now on, without moving the weights; programs for another mesh are dropped.

        `parallel` and `memory` are the last two arguments of `choose_parallelism`. On the present mesh, None
        for both keeps the earlier choice.

        Raises:
            ValueError: `choose_parallelism` raises it, or `make_mesh` did not make the mesh.
        """
        if mesh == self._mesh and parallel is None and memory is None:
            return
        # A static method, which also takes networks that are not ported: `self` is its first argument.
        chosen = self.choose_parallelism(self, check_mesh(mesh), parallel, memory)
        if (mesh, chosen) != (self._mesh, self.parallelism):
            self._mesh, self.parallelism = mesh, chosen
            runtime.forget_programs(self)

    @staticmethod
    def choose_parallelism(
        network: Any, mesh: Mesh, requested: Parallel | None = None, memory: float | None = None
    ) -> Any:
        """Return how a network of this class, ported or not, uses the mesh's axis "tp".

        Args:
            network: the network; only the shapes and the bytes of its weights are read.
            mesh: a mesh of `make_mesh`.
            requested: what "tp" has to split: "context" for tokens, "tensor" for weights' channels. None lets
                this method choose; only a transformer has a choice.
            memory: bytes of memory of a device; None asks the device.

        Raises:
            ValueError: a mesh that does not divide the weights, or a request that this class cannot fulfil.
        """
        if requested is not None:
            raise ValueError(
                f"got parallel={requested!r} for a {type(network).__name__}, whose tokens and channels are "
                "not split: pass parallel=None"
            )
        return sharding.BatchParallelism(split=sharding.exceed_share(bytes_of(network), mesh, memory))


def bytes_of(network: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in network.parameters())


class KnownNetwork(CompiledNetwork):
    """Base of the networks whose layers this package knows, and whose sequences it can split over a mesh.

    A program is compiled from an instance of `network_class`, a module around the model and a call's options.
    """

    network_class: Any

    @property
    def placement(self: Any) -> Any:
        """The sharding of the sequences, a `pipelines.sequence.SequencePlacement`; None without a mesh."""
        if self.mesh is None:
            return None
        return SequencePlacement(self.mesh, self.parallelism, self.config.num_attention_heads)

    @property
    def program(self) -> runtime.Program:
        """The program of a call without options, to read its count of compilations or to `lower` it."""
        return self.program_of(self.network_class(self))

    def program_of(self, network: nn.Module) -> Any:
        """Return the program of `network`, an instance of `network_class` or `CachedStep` around this model.

        Programs are found again by the network's form, if it has one, and by the modules that it holds. The
        result is None if this model is not stock (`runtime.trees`), and has to run as it is.
        """
        return runtime.programs_of(self).get(getattr(network, "form", None), network, self._compile_for)

    def _compile_for(self, network: Any) -> runtime.Program | None:
        if not self.is_stock() and network.is_for_stock:
            return None
        if self.mesh is None:
            return runtime.Program(network)
        types = SPLIT_LAYERS
        if self.parallelism.kind == sharding.CONTEXT:
            # Only blocks take and return tokens that are split over devices, and only in a network that joins
            # text and patches to one sequence (`joined`).
            types = (Block,) if network.joined else ()
        return runtime.Program(network, replace(self.placement, types=types))

    def is_stock(self) -> bool:
        """Return whether this network is as its library ships it; if not, log the first change once."""
        change = change_in(self)
        if change is not None:
            runtime.warn_once(
                self, f"{self.component}: {change}, so it is compiled as it is, and takes longer"
            )
        return change is None

    def run_program(self, network: nn.Module, tensors: dict[str, Any]) -> torch.Tensor | None:
        """Run the program of `network`, which has no cache, on tensors by name; None if there is none."""
        program = self.program_of(network)
        if program is None:
            return None
        result, _cache = program.run(program.weights(network), program.put(tensors))
        return runtime.tensor_of(result)

    @staticmethod
    def choose_parallelism(
        network: Any, mesh: Mesh, requested: Parallel | None = None, memory: float | None = None
    ) -> Any:
        # For the text encoder alone, as the transformer's class has a choice of its own. Its sequences are
        # short, so its weights' channels are split (`Parallelism` without arguments), whatever is requested.
        return check_split(network, mesh, sharding.Parallelism())


def check_split(network: nn.Module, mesh: Mesh, parallelism: Any) -> Any:
    """Return `parallelism`, or raise `ValueError` if "tp" does not divide a weight that it splits."""
    for name, weight in runtime.named_tensors(network).items():
        # Only called for its error.
        sharding.weight_sharding(mesh, name, tuple(weight.shape), parallelism)
    return parallelism
