"""Compiled programs of torch modules: of a chunk of a video, and of tensors to a tensor."""

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from cogvideox_torchax.runtime.arrays import jax_dtype
from cogvideox_torchax.runtime.bridge import array_of, host_array, import_torchax, on_jax, tensor_of, to_jax
from cogvideox_torchax.runtime.compile_cache import configure_compile_cache
from cogvideox_torchax.runtime.models import PROGRAMS
from cogvideox_torchax.runtime.profiling import is_profiling, named_layers
from cogvideox_torchax.runtime.skeleton import skeleton, weightless
from cogvideox_torchax.runtime.snapshot import Snapshot
from cogvideox_torchax.runtime.weights import weights_of

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
TRACING = threading.RLock()
"""Held while a network is traced: torchax's modes and its environment are not made for two traces at once."""

Program = TypeVar("Program")


class Programs:
    """The programs of one model, each for the module tree that it was traced from; any thread may ask."""

    KEPT = 4
    """Programs of one kind, for trees that take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, list[tuple[Snapshot, Any]]] = {}

    def get(self, kind: Hashable, network: nn.Module, build: Callable[[nn.Module], Program]) -> Program:
        """The program of a network: the one that was built for this very tree, or a new one.

        Args:
            kind: which of the model's programs.
            network: as it is now.
            build: from the network to its program.
        """
        from jax_kernels.common.tiles import pallas_is_on

        with self._lock:
            kept = self._kept.setdefault((kind, is_profiling(), pallas_is_on()), [])
            for snapshot, program in kept:
                if snapshot.holds(network):
                    return program
            kept.insert(0, (Snapshot(network), build(network)))
            del kept[self.KEPT :]
            return kept[0][1]


def programs_of(model: nn.Module) -> Programs:
    """The programs of a model: neither part of it nor of its copies, and gone when it is.

    They lie in the model: a hook that they were traced with may refer to it, and then only Python's collector
    finds that nobody else does.
    """
    return vars(model).setdefault(PROGRAMS, Programs())  # at once, whatever other threads do


def forget_programs(model: nn.Module) -> None:
    """Drops what was compiled of a model."""
    vars(model).pop(PROGRAMS, None)


def _without_chance(network: nn.Module) -> nn.Module:
    """The network; `ValueError` where something in it drops values by chance, which a program would draw once
    and for all."""
    for name, module in network.named_modules():
        if isinstance(module, DROPOUTS) and module.training and module.p > 0:
            raise ValueError(
                f"{name} drops values by chance (p={module.p}), which no program on JAX does: set its p to "
                "0, or call its eval()"
            )
    return network


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name for its program, in a profile and in the compile cache."""
    function.__name__ = name
    return function


class ChunkProgram:
    """A network that takes (chunk, cache) and returns (result, cache), compiled once for all chunks of one
    shape.

    The first chunk, which has no cache, is one program; every later chunk runs the other, whose cache is
    donated. Weights are arguments of both, and none are kept. Any thread may run it. `compilations` counts
    the programs traced so far.
    """

    def __init__(self, network: nn.Module):
        import jax

        self.network = weightless(network)
        self.compilations = 0

        def first(weights: dict[str, Any], chunk: Any) -> Any:
            return self._trace(weights, chunk, None)

        def later(weights: dict[str, Any], chunk: Any, cache: Any) -> Any:
            return self._trace(weights, chunk, cache)

        name = type(network).__name__
        self._first = jax.jit(_named(f"{name}_first", first))
        self._later = jax.jit(_named(f"{name}_later", later), donate_argnums=2)
        # Nothing is donated: a backward pass reads a cache again.
        self._differentiable = jax.jit(self._trace_for_gradients)

    def _trace(self, weights: dict[str, Any], chunk: Any, cache: Any, **place: Any) -> Any:
        import jax

        # Between two chunks a cache lies as (H, W, N, T, C), as a TPU holds it while it computes: in any
        # other order each program would rearrange it on its way in and out.
        cache = jax.tree.map(lambda stored: stored.transpose(2, 4, 3, 0, 1), cache)
        result, cache = self._apply(weights, chunk, cache, **place)
        return result, jax.tree.map(lambda cache_NCTHW: cache_NCTHW.transpose(3, 4, 0, 2, 1), cache)

    def _trace_for_gradients(self, weights: dict[str, Any], chunk: Any, cache: Any) -> Any:
        with torch.enable_grad():  # where it is off, modules leave gradient checkpointing out
            return self._trace(weights, chunk, cache)

    def _apply(self, weights: dict[str, Any], chunk: Any, cache: Any, **place: Any) -> Any:
        network = _without_chance(skeleton(self.network))
        with TRACING, named_layers(network):
            self.compilations += 1
            return self._call(network, weights, chunk, cache, **place)

    def _call(self, network: nn.Module, weights: dict[str, Any], chunk: Any, cache: Any) -> Any:
        """The network, a copy of its own, run on arrays."""
        call = functools.partial(torch.func.functional_call, network)
        return import_torchax().interop.jax_view(call)(weights, (chunk, cache))

    def lower(self, weights: Any, chunk: Any, cache: Any = None) -> Any:
        """The program lowered for arrays, or for `jax.ShapeDtypeStruct`s that stand for them."""
        return (
            self._first.lower(weights, chunk) if cache is None else self._later.lower(weights, chunk, cache)
        )

    def weights(self, network: nn.Module) -> dict[str, Any]:
        """The weights of a network like the one that this is compiled of, where the program takes them."""
        return weights_of(network)

    def put(self, chunk: torch.Tensor) -> Any:
        """A chunk, where the program takes it."""
        return self.put_array(array_of(to_jax(chunk)))

    def put_array(self, chunk: Any) -> Any:
        """As `put`, of an array on JAX, which may be traced."""
        return chunk

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """What stands for the weights and a chunk (N, C, T, H, W) when nothing but compiling is wanted."""
        import jax

        named = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        weights = {
            name: jax.ShapeDtypeStruct(tuple(value.shape), jax_dtype(value.dtype))
            for name, value in named.items()
        }
        return weights, jax.ShapeDtypeStruct(chunk, dtype)

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        """What stands for the cache that the first chunk's program gives."""
        import jax

        return jax.eval_shape(self._first, weights, chunk)[1]

    def run(self, weights: Any, chunk: Any, cache: Any) -> tuple[Any, Any]:
        return self._first(weights, chunk) if cache is None else self._later(weights, chunk, cache)

    def run_video(self, weights: Any, video: Any, lengths: Sequence[int]) -> Any:
        """All chunks of a video, a JAX array (N, C, T, H, W), for `jax.vjp`: a later frame's gradient goes
        through the caches to earlier ones.

        Args:
            weights: where the program takes them.
            video: frames or latents.
            lengths: of the chunks, in frames.
        """
        import jax.numpy as jnp

        results, cache, start = [], None, 0
        for length in lengths:
            chunk = self.put_array(video[:, :, start : start + length])
            result, cache = self._differentiable(weights, chunk, cache)
            results.append(result)
            start += length
        return jnp.concatenate(results, axis=2)


class ModuleProgram:
    """A network of tensors to a tensor, compiled once for each set of shapes and options.

    Weights are arguments, and none are kept. Any thread may run it. `compilations` counts the programs traced
    so far.
    """

    def __init__(self, network: nn.Module):
        import jax

        self.network = weightless(network)
        self.compilations = 0

        def run(options: Hashable, weights: dict[str, Any], tensors: dict[str, Any]) -> Any:
            return self._trace(options, weights, tensors)

        self._compiled = jax.jit(_named(type(network).__name__, run), static_argnums=0)

    def _trace(self, options: Hashable, weights: dict[str, Any], tensors: dict[str, Any]) -> Any:
        return self._apply(options, weights, tensors)

    def _apply(self, options: Hashable, weights: dict[str, Any], tensors: dict[str, Any]) -> Any:
        with TRACING:
            self.compilations += 1
            return self._call(_without_chance(skeleton(self.network)), options, weights, tensors)

    def _call(
        self, network: nn.Module, options: Hashable, weights: dict[str, Any], tensors: dict[str, Any]
    ) -> Any:
        """The network, a copy of its own, run on arrays."""
        import jax

        call = functools.partial(torch.func.functional_call, network)
        # By default a TPU multiplies float32 in bfloat16, and a recent GPU in TF32.
        exact = any(array.dtype == "float32" for array in weights.values() if array.ndim > 1)
        precision = "highest" if exact else "default"
        with warnings.catch_warnings(), jax.default_matmul_precision(precision):
            # What torch counts in 64 bits, JAX counts in 32: positions and token ids fit.
            warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
            return import_torchax().interop.jax_view(call)(weights, (options,), tensors)

    def weights(self, network: nn.Module) -> dict[str, Any]:
        """The weights of a network like the one that this is compiled of, where the program takes them."""
        return weights_of(network)

    def put(self, tensor: torch.Tensor) -> Any:
        """An argument, where the program takes it."""
        return array_of(tensor) if on_jax(tensor) else host_array(tensor)

    def weight_struct(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """What stands for a weight when nothing but compiling is wanted."""
        import jax

        return jax.ShapeDtypeStruct(shape, dtype)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What stands for an argument when nothing but compiling is wanted."""
        import jax

        return jax.ShapeDtypeStruct(shape, dtype)

    def weight_structs(self) -> dict[str, Any]:
        """What stands for the weights when nothing but compiling is wanted."""
        named = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        return {
            name: self.weight_struct(name, tuple(value.shape), jax_dtype(value.dtype))
            for name, value in named.items()
        }

    def __call__(self, weights: dict[str, Any], options: Hashable, **tensors: Any) -> torch.Tensor:
        """Runs on tensors, or nested tuples of them; what is None stays out.

        Args:
            weights: of `weights`.
            options: what the network takes besides tensors: another value is another program.
            tensors: on JAX or plain.
        """
        import jax

        configure_compile_cache()
        given = {name: value for name, value in tensors.items() if value is not None}
        arrays = jax.tree.map(self.put, given)
        return tensor_of(self._compiled(options, weights, arrays))

    def _structs(self, described: Any) -> Any:
        shape, dtype = described
        several = isinstance(dtype, tuple)  # a pair of tensors, each with its shape and dtype
        return tuple(map(self._structs, described)) if several else self.struct(shape, dtype)

    def lower_structs(self, options: Hashable, tensors: dict[str, Any]) -> Any:
        """The program lowered for arguments of these shapes and JAX dtypes, with no data and no weights.

        Args:
            options: as a call takes them.
            tensors: (shape, dtype) of each argument, or a tuple of such pairs, by name.
        """
        structs = {name: self._structs(described) for name, described in tensors.items()}
        return self._compiled.lower(options, self.weight_structs(), structs)


class JaxRun:
    """One pass over a video with a compiled network: carries the cache from chunk to chunk.

    Args:
        program: of the network, or of one like it.
        network: whose weights are taken, as they are now.
    """

    def __init__(self, program: ChunkProgram, network: nn.Module):
        configure_compile_cache()
        self._program = program
        self._weights = program.weights(network)
        self._cache = None

    def __call__(self, chunk: torch.Tensor) -> torch.Tensor:
        result, self._cache = self._program.run(self._weights, self._program.put(chunk), self._cache)
        return tensor_of(result)


class NativeRun:
    """One pass over a video in PyTorch itself."""

    def __init__(self, network: nn.Module):
        self._network = network
        self._cache = None

    def __call__(self, chunk: torch.Tensor) -> torch.Tensor:
        result, self._cache = self._network(chunk, self._cache)
        return result
