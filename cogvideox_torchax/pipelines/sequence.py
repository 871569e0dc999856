"""Text and patches as one sequence on a mesh: the placement of its tokens, and the communication.

The tokens of a sequence are the prompt's text, then the patches, then padding. A batch, which with guidance
has each video twice, is split over "dp". How "tp" is used depends on `sharding.Parallelism`:

    context: the tokens are split. The local tokens are those that one device computes. Attention needs all
        tokens: before it the devices exchange tokens for heads, so that each device has all tokens of some
        heads, and after it they exchange heads for tokens (Jacobs et al. 2023, "DeepSpeed Ulysses").
    tensor: the channels of weights are split. XLA's partitioner shards the layers, except for kernels, which
        it cannot shard: each kernel is sharded here, by a `shard_map`.

Axis letters: N videos, S positions of a sequence, C channels, H heads, D channels of a head, P parts of the
channels or of the tokens, one for each device that shares a video's tokens. In names with PSC, S is the
tokens of all videos, one video's after the other's.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn
from torch.utils import _pytree as pytree

from cogvideox_torchax import runtime
from cogvideox_torchax.pipelines.sharding import (
    BY_INPUTS,
    TENSOR,
    Parallelism,
    weight_sharding,
    weight_spec,
)
from cogvideox_torchax.runtime.layers import watched
from cogvideox_torchax.sharding import MeshPlace

LANES = 128
"""Lanes of a TPU's tile. The number of local tokens is a multiple of it (but see `_padded_length`)."""


@dataclass(frozen=True)
class Sequence:
    """The layout of text and patches as one sequence: its length, and the devices that share its tokens.

    Attributes:
        text: number of the prompt's tokens, which come first.
        tokens: number of the tokens of prompt and patches.
        length: number of all tokens, with the padding, to which no token attends.
        batch: the mesh axis that the videos are split over, or None.
        axes: the mesh axes that the tokens are split over, and inside attention the heads; () for no split.
        mesh: the mesh with "context", where a block runs on each device's local tokens; else None.
        shared: the mesh with "tensor", where XLA's partitioner shards the layers; else None. On one device
            both are None.
    """

    text: int
    tokens: int
    length: int
    batch: str | None = None
    axes: tuple[str, ...] = ()
    mesh: Mesh | None = None
    shared: Mesh | None = None

    @classmethod
    def from_placement(
        cls, placement: "SequencePlacement | None", *, videos: int, text: int, tokens: int
    ) -> "Sequence":
        """Return the layout for numbers of videos and tokens; on one device `placement` is None."""
        if placement is None:  # one device
            return cls(text, tokens, _padded_length(tokens, 1))
        mesh, token_axes = placement.mesh, placement.token_axes(videos)
        is_tensor = placement.parallelism.kind == TENSOR
        # With "tensor" tokens are not split, but attention may split them inside, over "tp" (`shard_heads`).
        parts = mesh.shape["tp"] if is_tensor else math.prod(mesh.shape[axis] for axis in token_axes)
        return cls(
            text,
            tokens,
            _padded_length(tokens, parts),
            batch=placement.batch_axis(videos),
            axes=token_axes,
            mesh=None if is_tensor else mesh,
            shared=mesh if is_tensor else None,
        )

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of the sequence (N, S, C)."""
        return PartitionSpec(self.batch, self.axes or None, None)

    @property
    def parts(self) -> int:
        """Number of devices that share a video's tokens."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes) if self.mesh is not None else 1

    def pad_tokens(self, x_NSC: jax.Array) -> jax.Array:
        """Return the tokens (N, S, C) padded with zeros to `length`; with "context" they are sharded."""
        padded = jnp.pad(x_NSC, ((0, 0), (0, self.length - self.tokens), (0, 0)))
        if self.mesh is None:
            return padded
        return jax.lax.with_sharding_constraint(padded, NamedSharding(self.mesh, self.spec))

    def pad_table(self, patch_table: jax.Array, value: float) -> jax.Array:
        """Return a rotary table (S, D) of all tokens, from one (patches, D), with `value` for the others."""
        text = self.tokens - patch_table.shape[0]  # number of rows before those of the patches
        return jnp.pad(patch_table, ((text, self.length - self.tokens), (0, 0)), constant_values=value)

    def map_local_tokens(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return a function of whole arrays that calls `function` on each device with its local arrays.

        Both have three arguments, which may be nested: tokens (N, S, C), split by videos and tokens;
        vectors (N, C), split by videos; rotary tables (S, D), whole on every device. Both return tokens,
        which may be nested too. Without "context" no tokens are local, and `function` itself is returned.
        """
        if self.mesh is None:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.spec, PartitionSpec(self.batch, None), PartitionSpec()),
            out_specs=self.spec,
            check_vma=False,  # the kernels inside do not declare over which mesh axes their results vary
        )

    def shard_heads(self, qk_norm_rope: Callable[..., jax.Array], heads: int) -> Callable[..., jax.Array]:
        """Return the kernel `qk_norm_rope`, sharded as the attention after it, for `heads` heads in all.

        With "context" the kernel is called on each device, after the exchange: it gets all tokens of the
        device's heads, and only needs their number. With "tensor" it is sharded here: by heads, or by tokens
        if "tp" does not divide the heads.

        The function that is returned takes tokens (N, S, C) and the kernel's other arguments, except for
        `heads`, which is set to the number of heads on a device. It returns (N, H, D, S).
        """
        if self.shared is None:  # "context", or one device, where `parts` is 1
            return functools.partial(qk_norm_rope, heads=heads // self.parts)
        tp = self.shared.shape["tp"]
        whole = PartitionSpec()
        if heads % tp == 0:  # a device has all tokens of some heads
            local_heads, table_spec = heads // tp, whole
            x_spec = PartitionSpec(self.batch, None, "tp")  # (N, S, C)
            result_spec = PartitionSpec(self.batch, "tp", None, None)  # (N, H, D, S)
        else:  # a device has some tokens of all heads
            local_heads, table_spec = heads, PartitionSpec("tp", None)
            x_spec = PartitionSpec(self.batch, "tp", None)
            result_spec = PartitionSpec(self.batch, None, None, "tp")

        # The other arguments are a norm's weight and bias (D), and rotary tables (S, D).
        def sharded_qk_norm_rope(x_NSC: jax.Array, *others: jax.Array, **options: Any) -> jax.Array:
            return jax.shard_map(
                functools.partial(qk_norm_rope, heads=local_heads, **options),
                mesh=self.shared,
                in_specs=(x_spec, *(whole if other.ndim == 1 else table_spec for other in others)),
                out_specs=result_spec,
                check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
            )(x_NSC, *others)

        return sharded_qk_norm_rope

    def shard_norm(self, adaptive_layer_norm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return the norm kernel, which with "tensor" is sharded by videos: each device has all tokens."""
        if self.shared is None:
            return adaptive_layer_norm
        by_video, whole = PartitionSpec(self.batch), PartitionSpec()
        return jax.shard_map(
            adaptive_layer_norm,
            mesh=self.shared,
            # (tokens, weight, bias, scale, shift, index of the first patch)
            in_specs=(by_video, whole, whole, by_video, by_video, whole),
            out_specs=by_video,
            check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
        )

    def first_patch(self) -> Any:
        """Return the index of the first patch, counted from this device's first token.

        It is 0 or negative on a device that has no text, and the number of local tokens or more on a device
        that has no patches. If tokens are split, call it inside `map_local_tokens`.
        """
        if not self.axes:
            return self.text
        local_tokens = self.length // self.parts
        return self.text - jax.lax.axis_index(self.axes) * local_tokens

    def to_heads(self, x_PSC: jax.Array, videos: int) -> jax.Array:
        """Exchange local tokens of all heads for all tokens of some whole heads.

        (P, N * S, C / P) becomes (N, P * S, C / P), where S is the number of a video's local tokens. If
        tokens are split, call it inside `map_local_tokens`; else P is 1, and nothing is exchanged.
        """
        if self.axes:
            # Without the barrier XLA moves the rounding of the float32 products behind the exchange, which
            # then sends twice the bytes.
            x_PSC = jax.lax.optimization_barrier(x_PSC)
            # Before the exchange axis 0 is the parts of the channels, one for each device that receives them;
            # after it, axis 0 is the devices that the tokens come from.
            x_PSC = jax.lax.all_to_all(x_PSC, self.axes, split_axis=0, concat_axis=0, tiled=True)
        parts, _, channels = x_PSC.shape
        if videos == 1:  # XLA would keep an axis of 1 in the middle, and pad it to a tile
            return x_PSC.reshape(1, -1, channels)
        x_NPSC = x_PSC.reshape(parts, videos, -1, channels).swapaxes(0, 1)
        return x_NPSC.reshape(videos, -1, channels)

    def to_tokens(self, y_NCS: jax.Array) -> jax.Array:
        """Exchange all tokens of some heads for the local tokens of all heads, after attention.

        (N, C / P, P * S) becomes (N, C, S). This reverses `to_heads`, but attention has channels first.
        """
        if not self.axes:
            return y_NCS
        videos, channels, _ = y_NCS.shape
        # Before the exchange axis P is the parts of the tokens, one for each device that receives them; after
        # it, axis P is the parts of the channels.
        if videos == 1:  # XLA would keep the axis of 1 in the middle, and pad it to a tile
            y_PCS = y_NCS.reshape(channels, self.parts, -1).swapaxes(0, 1)
            y_PCS = jax.lax.all_to_all(y_PCS, self.axes, split_axis=0, concat_axis=0, tiled=True)
            return y_PCS.reshape(1, self.parts * channels, -1)
        y_PNCS = jnp.moveaxis(y_NCS.reshape(videos, channels, self.parts, -1), 2, 0)
        y_PNCS = jax.lax.all_to_all(y_PNCS, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return y_PNCS.swapaxes(0, 1).reshape(videos, self.parts * channels, -1)


def _padded_length(tokens: int, parts: int) -> int:
    """Return the length to which a sequence of `tokens` is padded, so that `parts` devices get equal shards.

    A shard is a multiple of `LANES` tokens. If that would lengthen the sequence by more than half, as it does
    a short one, shards are only equal.
    """

    def next_multiple(divisor: int) -> int:
        return -(-tokens // divisor) * divisor  # rounded up

    length_in_tiles = next_multiple(parts * LANES)
    return length_in_tiles if length_in_tiles <= 1.5 * tokens else next_multiple(parts)


@dataclass(frozen=True)
class SequencePlacement(MeshPlace):
    """The sharding of sequences (N, S, C) and of weights over a mesh; inputs and results are on every device.

    Attributes:
        parallelism: the use of "tp". Over "dp" the videos are split, if "dp" divides their number.
        heads: number of attention's heads.
        types: the types of the modules whose inputs and results get the sharding of sequences.
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    heads: int = 1
    types: tuple[type[nn.Module], ...] = ()

    def batch_axis(self, videos: int) -> str | None:
        return "dp" if videos % self.mesh.shape["dp"] == 0 else None

    def token_axes(self, videos: int) -> tuple[str, ...]:
        """Return the mesh axes that split a video's tokens; an axis of one device is left out.

        "tp" splits tokens, unless it splits the weights' channels. "dp" splits tokens too, if it does not
        divide the number of `videos` and the whole mesh divides the heads.
        """
        if self.parallelism.kind == TENSOR:
            return ()
        # Inside attention the same axes split the heads.
        over_both = self.batch_axis(videos) is None and self.heads % self.mesh.size == 0
        axes = ("dp", "tp") if over_both else ("tp",)
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the sharding of a sequence of this shape (N, S, C)."""
        videos = shape[0]
        return PartitionSpec(self.batch_axis(videos), self.token_axes(videos) or None, None)

    def compiler_options(self) -> dict[str, str]:
        # With this option a TPU computes while tokens are exchanged for heads; by default it waits.
        exchange = {"xla_tpu_enable_async_all_to_all": "true"} if self.platform == "tpu" else {}
        return {**super().compiler_options(), **exchange}

    def trace(self, run: Callable[..., Any], inputs: Any, cache: Any) -> Any:
        """Call `run(inputs, cache)` while a program is traced; constrain its (result, cache) to shardings.

        The result is whole on every device; an array of the cache gets its `cache_sharding`.
        """
        # The attention kernel reads the mesh from this context, and maps itself over the devices.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            result, cache = run(inputs, cache)
        return jax.lax.with_sharding_constraint(result, self.replicated), jax.tree.map(
            lambda array: jax.lax.with_sharding_constraint(array, self.cache_sharding(array.shape)), cache
        )

    def cache_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a kept array: that of a sequence (N, S, C) if the mesh divides it."""
        if len(shape) != 3:
            return self.replicated
        spec = self.spec(shape)
        # `self.parts` returns the number of devices along each axis.
        divides = all(size % devices == 0 for size, devices in zip(shape, self.parts(spec), strict=True))
        return NamedSharding(self.mesh, spec) if divides else self.replicated

    def watching(self, network: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which sequences that enter or leave the network's layers get their sharding.

        The layers are the modules of `self.types`. The network, a program's own copy, is changed: with
        "tensor" each module gets an attribute `inputs_split`, whether its weight is split by inputs.
        """
        if self.parallelism.kind == TENSOR:
            for name, module in network.named_modules():
                vars(module)["inputs_split"] = weight_spec(f"{name}.weight") == BY_INPUTS
        return watched(
            network,
            lambda _name, module: type(module) in self.types,
            on_arguments=self._constrain_sequences,
            on_result=self._constrain_sequences,
        )

    def _constrain_sequences(self, _name: str, value: Any) -> Any:
        """Return a layer's arguments or result with its sequences, tensors of three axes on JAX, sharded."""
        constrain = runtime.torch_view(self.constrain)

        def constrained(tensor: torch.Tensor) -> torch.Tensor:
            return constrain(tensor) if tensor.ndim == 3 and runtime.on_jax(tensor) else tensor

        return pytree.tree_map_only(torch.Tensor, constrained, value)

    def weight_sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        return weight_sharding(self.mesh, name, shape, self.parallelism)
