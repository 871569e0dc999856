"""Text and patches as one sequence on a mesh: where its tokens lie, and what devices exchange.

The batch, which holds the two halves of classifier-free guidance, is split over "dp". By tokens, all that is
done to a token is done where it lies. For attention, which alone looks at several, every device gets all
tokens of some heads, and gives them back after it (Jacobs et al. 2023, "DeepSpeed Ulysses").
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.pipelines.sharding import (
    BY_INPUTS,
    TENSOR,
    Parallelism,
    put_weight,
    weight_sharding,
    weight_spec,
)
from cogvideox_torchax.runtime.layers import watched
from cogvideox_torchax.sharding import MeshPlace

LANES = 128
"""Tokens of each device are a multiple of it where there are many, for the kernels' sake."""


@dataclass(frozen=True)
class Sequence:
    """Text and patches as one sequence: how long it is, and over which devices its tokens are split.

    Attributes:
        text: tokens of the prompt, which come first.
        tokens: tokens of prompt and patches.
        length: tokens with padding, to which no token attends.
        batch: the mesh axis that the videos are split over, or None.
        axes: the mesh axes that the tokens are split over; attention has its heads there.
        mesh: the mesh that tokens are split over; None if they are not.
        shared: the placement if XLA shards the computation; None if each device runs on local tokens.
    """

    text: int
    tokens: int
    length: int
    batch: str | None = None
    axes: tuple[str, ...] = ()
    mesh: Mesh | None = None
    shared: "SequencePlacement | None" = None

    @classmethod
    def from_placement(
        cls, placement: "SequencePlacement | None", *, videos: int, text: int, tokens: int
    ) -> "Sequence":
        """Return the layout of so many videos' sequences, sharded by a placement; whole without one."""
        if placement is None or placement.parallelism.kind == TENSOR:
            parts = placement.mesh.shape["tp"] if placement else 1
            return cls(text, tokens, _filled(tokens, parts), shared=placement)
        mesh, axes = placement.mesh, placement.token_axes(videos)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        return cls(text, tokens, _filled(tokens, parts), placement.batch_axis(videos), axes, mesh)

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of its tokens (N, S, C)."""
        return PartitionSpec(self.batch, self.axes or None, None)

    @property
    def parts(self) -> int:
        """Number of devices that share a video's tokens."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes) if self.mesh is not None else 1

    def fill_up(self, x_NSC: jax.Array) -> jax.Array:
        """Return the tokens padded with zeros to `length`, and sharded over the mesh."""
        padded = jnp.pad(x_NSC, ((0, 0), (0, self.length - self.tokens), (0, 0)))
        if self.mesh is None:
            return padded
        return jax.lax.with_sharding_constraint(padded, NamedSharding(self.mesh, self.spec))

    def fill_table(self, table_PD: jax.Array, value: float) -> jax.Array:
        """Pad a table of patches (P, D) to all tokens (S, D) with `value`."""
        before, after = self.tokens - table_PD.shape[0], self.length - self.tokens
        return jnp.pad(table_PD, ((before, after), (0, 0)), constant_values=value)

    def map_local_tokens(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Run a function of tokens (N, S, C), vectors (N, C) and tables (S, D) on each device's local tokens.

        Tables and further arguments, such as weights, are whole on every device.
        """
        if self.mesh is None:
            return function
        tables = PartitionSpec()
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.spec, PartitionSpec(self.batch, None), tables),
            out_specs=self.spec,
            check_vma=False,
        )

    def shard_heads(self, qk_norm_rope: Callable[..., jax.Array], heads: int) -> Callable[..., jax.Array]:
        """Return `jax_kernels.qk_norm_rope` for (N, S, C), vectors (D,) and tables (S, D), sharded.

        XLA cannot shard a kernel, so it is sharded by hand where XLA shards the rest: by heads, or by tokens
        if "tp" does not divide them, as attention is.
        """
        if self.shared is None:
            return functools.partial(qk_norm_rope, heads=heads // self.parts)
        placement, tp = self.shared, self.shared.mesh.shape["tp"]

        def split(x_NSC: jax.Array, *others: jax.Array, **options: Any) -> jax.Array:
            """Run `qk_norm_rope` on each device's heads, or tokens, of its videos."""
            batch, by_heads = placement.batch_axis(x_NSC.shape[0]), heads % tp == 0
            batch_spec, replicated = functools.partial(PartitionSpec, batch), PartitionSpec()
            tables = replicated if by_heads else PartitionSpec("tp", None)
            return jax.shard_map(
                functools.partial(qk_norm_rope, heads=heads // tp if by_heads else heads, **options),
                mesh=placement.mesh,
                in_specs=(
                    batch_spec(None, "tp") if by_heads else batch_spec("tp", None),
                    *(replicated if other.ndim == 1 else tables for other in others),
                ),
                out_specs=batch_spec("tp", None, None) if by_heads else batch_spec(None, None, "tp"),
                check_vma=False,
            )(x_NSC, *others)

        return split

    def shard_tokens(self, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return a kernel of tokens (N, S, C), vectors (N, 2, C) and weights, for `map_local_tokens`.

        XLA cannot shard a kernel, so where XLA shards the rest each device has whole videos.
        """
        if self.shared is None:
            return kernel
        placement = self.shared

        def split(x_NSC: jax.Array, *others: Any) -> jax.Array:
            """Run the kernel with arrays of three axes split by video, other arrays whole."""
            batch_spec = PartitionSpec(placement.batch_axis(x_NSC.shape[0]))
            specs = (batch_spec if np.ndim(other) == 3 else PartitionSpec() for other in others)
            return jax.shard_map(
                kernel,
                mesh=placement.mesh,
                in_specs=(batch_spec, *specs),
                out_specs=batch_spec,
                check_vma=False,
            )(x_NSC, *others)

        return split

    def first_patch(self) -> Any:
        """Return the index of the first local token that is not text; inside `map_local_tokens`."""
        local_tokens = self.length // self.parts
        return self.text - (jax.lax.axis_index(self.axes) * local_tokens if self.axes else 0)

    def to_heads(self, x_PNC: jax.Array, videos: int) -> jax.Array:
        """Exchange all channels of local tokens for all tokens of local channels; inside `map_local_tokens`.

        Args:
            x_PNC: local tokens of all videos (N * S), channels in one part per device.
            videos: number of videos.

        Returns:
            (N, S, C) of all tokens and of one part of the channels.
        """
        if self.axes:
            # Without the barrier the communication is float32, not the rounded values.
            sent = jax.lax.optimization_barrier(x_PNC)
            x_PNC = jax.lax.all_to_all(sent, self.axes, split_axis=0, concat_axis=0, tiled=True)
        parts, _, channels = x_PNC.shape  # of tokens now
        if videos == 1:  # no axis of one in the middle: it would be kept, and filled up to a tile
            return x_PNC.reshape(1, -1, channels)
        return x_PNC.reshape(parts, videos, -1, channels).swapaxes(0, 1).reshape(videos, -1, channels)

    def to_tokens(self, y_NCS: jax.Array) -> jax.Array:
        """Exchange all tokens of local channels for local tokens (N, C, S); inside `map_local_tokens`."""
        videos, channels, _ = y_NCS.shape
        if not self.axes:
            return y_NCS
        if videos == 1:
            y_PCS = y_NCS.reshape(channels, self.parts, -1).swapaxes(0, 1)
            y_PCS = jax.lax.all_to_all(y_PCS, self.axes, split_axis=0, concat_axis=0, tiled=True)
            return y_PCS.reshape(1, self.parts * channels, -1)
        y_PNCS = jnp.moveaxis(y_NCS.reshape(videos, channels, self.parts, -1), 2, 0)
        y_PNCS = jax.lax.all_to_all(y_PNCS, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return y_PNCS.swapaxes(0, 1).reshape(videos, self.parts * channels, -1)


def _filled(tokens: int, parts: int) -> int:
    """Return the tokens padded to whole shards of so many devices."""
    unit = parts * (LANES if tokens > LANES * parts else 1)
    return -(-tokens // unit) * unit


@dataclass(frozen=True)
class SequencePlacement(MeshPlace):
    """The sharding of sequences (N, S, C): by batch over "dp" where it divides, over "tp" by `parallelism`.

    Weights are sharded, a program's inputs and its result are whole on every device.

    Attributes:
        parallelism: what is split over "tp".
        heads: of attention.
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    heads: int = 1

    def batch_axis(self, videos: int) -> str | None:
        """Return the mesh axis that splits so many videos, or None."""
        return "dp" if videos % self.mesh.shape["dp"] == 0 else None

    def token_axes(self, videos: int) -> tuple[str, ...]:
        """Return the mesh axes that split a video's tokens: "dp" too if it divides heads and no videos."""
        if self.parallelism.kind == TENSOR:
            return ()
        both = self.batch_axis(videos) is None and self.heads % self.mesh.size == 0
        axes = ("dp", "tp") if both else ("tp",)
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the sharding of sequences (N, S, C), or of another array whose first axis is the videos."""
        tokens = (self.token_axes(shape[0]) or None,) if len(shape) == 3 else ()
        rest = (None,) * (len(shape) - 1 - len(tokens))
        return PartitionSpec(self.batch_axis(shape[0]), *tokens, *rest)

    def compiler_options(self) -> dict[str, str]:
        """Return XLA's options for a program over the mesh."""
        # Let a TPU compute while tokens are exchanged for heads; by default it waits.
        on_tpu = self.mesh.devices.flat[0].platform == "tpu"
        return {"xla_tpu_enable_async_all_to_all": "true"} if on_tpu else {}

    def trace(self, run: Callable[..., Any], inputs: Any, cache: Any) -> Any:
        """Return `run(inputs, cache)`, (result, cache), in a program, with the results' shardings."""
        # The attention kernel reads the mesh: it splits itself, as XLA cannot split a kernel.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            result, cache = run(inputs, cache)
        return jax.lax.with_sharding_constraint(result, self.replicated), jax.tree.map(
            lambda part: jax.lax.with_sharding_constraint(part, self._kept(part.shape)), cache
        )

    def _kept(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array that a step keeps for the next: sequences as layers have them."""
        spec = self.spec(shape) if len(shape) == 3 else PartitionSpec()
        divides = all(size % parts == 0 for size, parts in zip(shape, self.parts(spec), strict=False))
        return NamedSharding(self.mesh, spec if divides else PartitionSpec())

    def cache_struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._kept(shape))

    def watching(self, network: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a network's layers have their sequences constrained to the sharding.

        With "tensor", linear layers are told whether their inputs' channels are split.
        """
        self.layers.clear()
        if self.parallelism.kind == TENSOR:
            for name, module in network.named_modules():
                vars(module)["inputs_split"] = weight_spec(f"{name}.weight") == BY_INPUTS
        return watched(
            network, lambda _, module: type(module) in self.types, taken=self._split, given=self._split
        )

    def _split(self, name: str, value: Any) -> Any:
        """Constrain the sequences in a value, which may be nested."""
        if isinstance(value, torch.Tensor):
            if value.ndim != 3 or not runtime.on_jax(value):
                return value
            self._note(name, value)
            return runtime.torch_view(self.constrain)(value)
        if isinstance(value, dict):
            return {key: self._split(name, part) for key, part in value.items()}
        return tuple(self._split(name, part) for part in value) if isinstance(value, tuple) else value

    def weight(self, name: str, array: Any) -> jax.Array:
        """Return a weight with its sharding, moved if it has another."""
        wanted = weight_sharding(self.mesh, name, array.shape, self.parallelism)
        is_placed = array.sharding.is_equivalent_to(wanted, array.ndim)
        return array if is_placed else put_weight(self.mesh, name, array, self.parallelism)

    def weight_struct(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = weight_sharding(self.mesh, name, shape, self.parallelism)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def put(self, array: Any) -> jax.Array:
        return jax.device_put(array, self.replicated)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)
