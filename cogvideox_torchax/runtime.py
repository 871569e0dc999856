"""torchax at the edge: enabling it, calling JAX from torch modules, compiling chunk programs, the compile
cache.

The only module that imports torchax. Everything it does is lazy: importing the package costs no JAX start-up,
and a user who stays in native PyTorch never pays for it.
"""

import functools
import os
import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack  # the public API has no way to ask

COMPILE_CACHE_VARIABLE = "COGVIDEOX_TORCHAX_COMPILE_CACHE"
_cache_lock = threading.Lock()
_cache_configured = False


def _torchax():
    try:
        import torchax.interop
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"torchax does not import with torch {torch.__version__} ({error}); "
            "install a matching pair: pip install 'torchax>=0.0.14.dev20261026' 'torch>=2.11'"
        ) from error
    return torchax


def enable() -> None:
    """Turns torchax on for this thread, once; calling it again, or after `torchax.enable_globally()`, does
    nothing."""
    torchax = _torchax()
    if not is_enabled():
        torchax.enable_globally()
    configure_compile_cache()


def is_enabled() -> bool:
    """Whether this thread's torch calls go through torchax.

    torchax's own `enabled` flag turns false after the first function that runs through `jax_view`, so the
    active modes are asked instead.
    """
    return any(type(mode).__name__ == "XLAFunctionMode" for mode in _get_current_function_mode_stack())


def without_torchax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` where torchax is off: its modes belong to a thread, so a fresh thread has none.

    Loading safetensors and building on `torch.device("meta")` go wrong while torchax is on.
    """
    if not is_enabled():
        return function(*args, **kwargs)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def on_jax(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on JAX (a torchax tensor or a view of one) rather than in PyTorch itself."""
    return tensor.device.type == "jax"


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a torch function: `torchax.interop.torch_view`, imported at the first call."""

    @functools.wraps(jax_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _torchax().interop.call_jax(jax_function, *args, **kwargs)

    return call


def to_jax(tensor: torch.Tensor) -> torch.Tensor:
    """A plain torch tensor on JAX's default device; a torchax tensor as it is."""
    return tensor if on_jax(tensor) else _torchax().default_env().to_xla(tensor.detach())


def to_torch(tensor: torch.Tensor) -> torch.Tensor:
    """A torchax tensor as a plain CPU tensor of its own (this waits for its value); a plain tensor as it
    is."""
    return plain_tensor(np.array(array_of(tensor))) if on_jax(tensor) else tensor


def plain_tensor(host: np.ndarray) -> torch.Tensor:
    """A NumPy array as a plain torch tensor, without a copy: the inverse of `host_array`."""
    if host.dtype.name == "bfloat16":  # ml_dtypes', which torch does not take
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def array_of(tensor: torch.Tensor) -> Any:
    """The `jax.Array` inside a torchax tensor."""
    return _torchax().interop.jax_view(tensor)


def tensor_of(array: Any) -> torch.Tensor:
    """A `jax.Array` as a torchax tensor, without a copy."""
    return _torchax().interop.torch_view(array)


def fetch_async(tensor: torch.Tensor) -> None:
    """Starts the copy of a result to the host, to be there when `to_torch` asks for it."""
    if on_jax(tensor):
        array_of(tensor).copy_to_host_async()


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Returns when the tensor's value has been computed; a native tensor always has been."""
    if on_jax(tensor):
        array_of(tensor).block_until_ready()
    return tensor


def weights_of(network: nn.Module) -> dict[str, Any]:
    """The network's parameters and buffers as JAX arrays, by name."""
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: array_of(tensor) for name, tensor in named.items()}


def move_weights(network: nn.Module, move: Callable[[Any], Any]) -> None:
    """Replaces the array in each of the network's parameters and buffers by what `move` makes of it; traced
    ones stay."""
    from jax.core import Tracer

    for tensor in (*network.parameters(), *network.buffers()):
        if not isinstance(array_of(tensor), Tracer):
            tensor.apply_jax_(move)  # pyright: ignore[reportAttributeAccessIssue]


def put_weights(module: nn.Module, place: Callable[[str, Any], Any]) -> None:
    """Puts a module's parameters and buffers on JAX, each once and under its name: what is tied stays tied.

    Args:
        module: in PyTorch, on JAX already, or in part.
        place: a name and a NumPy or JAX array to the JAX array that takes its place.
    """
    put: dict[int, torch.Tensor] = {}
    for prefix, owner in module.named_modules():
        held: Any
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in put:
                    put[id(tensor)] = _put(tensor, functools.partial(place, f"{prefix}.{name}".lstrip(".")))
                held[name] = put[id(tensor)]


def _put(tensor: torch.Tensor, place: Callable[[Any], Any]) -> torch.Tensor:
    if on_jax(tensor):
        return tensor.apply_jax_(place)  # pyright: ignore[reportAttributeAccessIssue]
    moved = tensor_of(place(host_array(tensor)))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """A plain torch tensor as a NumPy array, without a copy where there is one."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def jax_dtype(dtype: torch.dtype) -> Any:
    """torch's dtype as JAX's."""
    import jax.numpy as jnp

    return jnp.dtype(str(dtype).removeprefix("torch."))


def first_nonfinite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The index of the first NaN or Inf, or None; a tensor that is being traced has no values to look at."""
    if not on_jax(tensor):
        finite = torch.isfinite(tensor)
        return None if bool(finite.all()) else tuple(int(i) for i in (~finite).nonzero()[0])
    from jax.core import Tracer

    array = array_of(tensor)
    if isinstance(array, Tracer):
        return None
    if bool(_jitted_all_finite()(array)):
        return None
    # On the host, and only now: to find the index on the devices would gather a sharded array on each.
    if array.is_fully_addressable:
        return tuple(int(i) for i in np.argwhere(~np.isfinite(np.asarray(array)))[0])
    for shard in array.addressable_shards:
        for index in np.argwhere(~np.isfinite(np.asarray(shard.data))):
            return tuple(int(i) + (s.start or 0) for i, s in zip(index, shard.index, strict=True))
    raise ValueError("got NaN or Inf in the part of the input that another process holds, which says where")


@functools.cache
def _jitted_all_finite():
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda x: jnp.isfinite(x).all())


def take_frames(x: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """`x[:, :, start : start + length]`; on JAX one small program serves every start."""
    if not on_jax(x):
        return x[:, :, start : start + length]
    return tensor_of(_jitted_take()(array_of(x), start, length))


@functools.cache
def _jitted_take():
    import jax

    return jax.jit(
        lambda x, start, length: jax.lax.dynamic_slice_in_dim(x, start, length, 2), static_argnums=2
    )


class ChunkProgram:
    """A network that takes (chunk, cache) and returns (result, cache), compiled once for all chunks of one
    shape.

    The first chunk, which has no cache, is one program; every later chunk runs the other, whose cache is
    donated. Weights are arguments of both. `compilations` counts the programs traced so far.
    """

    def __init__(self, network: nn.Module):
        import jax

        self.network = network
        self.compilations = 0
        self._first = jax.jit(lambda weights, chunk: self._trace(weights, chunk, None))
        self._later = jax.jit(self._trace, donate_argnums=2)

    def _trace(self, weights: dict[str, Any], chunk: Any, cache: Any) -> Any:
        import jax

        # Between two chunks a cache lies as (H, W, N, T, C), as a TPU holds it while it computes: in any
        # other order each program would rearrange it on its way in and out.
        cache = jax.tree.map(lambda stored: stored.transpose(2, 4, 3, 0, 1), cache)
        result, cache = self._apply(weights, chunk, cache)
        return result, jax.tree.map(lambda cache_NCTHW: cache_NCTHW.transpose(3, 4, 0, 2, 1), cache)

    def _apply(self, weights: dict[str, Any], chunk: Any, cache: Any) -> Any:
        self.compilations += 1
        call = functools.partial(torch.func.functional_call, self.network)
        return _torchax().interop.jax_view(call)(weights, (chunk, cache))

    def lower(self, weights: Any, chunk: Any, cache: Any = None) -> Any:
        """The program lowered for arrays, or for `jax.ShapeDtypeStruct`s that stand for them."""
        return (
            self._first.lower(weights, chunk) if cache is None else self._later.lower(weights, chunk, cache)
        )

    def weights(self) -> dict[str, Any]:
        """The network's weights, where the program takes them."""
        return weights_of(self.network)

    def put(self, chunk: torch.Tensor) -> Any:
        """A chunk, where the program takes it."""
        return array_of(to_jax(chunk))

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """What stands for the weights and for a chunk (N, C, T, H, W) when nothing but compiling is wanted.

        The network may be in PyTorch, or on torch's "meta" device, with no weights at all.
        """
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


class ModuleProgram:
    """A network of tensors to a tensor, compiled once for each set of shapes and options.

    Weights are arguments. `compilations` counts the programs traced so far.
    """

    def __init__(self, network: nn.Module):
        import jax

        self.network = network
        self.compilations = 0
        self._compiled = jax.jit(self._trace, static_argnums=0)

    def _trace(self, options: Hashable, weights: dict[str, Any], tensors: dict[str, Any]) -> Any:
        return self._apply(options, weights, tensors)

    def _apply(self, options: Hashable, weights: dict[str, Any], tensors: dict[str, Any]) -> Any:
        import jax

        self.compilations += 1
        call = functools.partial(torch.func.functional_call, self.network)
        # By default a TPU multiplies float32 in bfloat16, and a recent GPU in TF32.
        exact = any(array.dtype == "float32" for array in weights.values() if array.ndim > 1)
        precision = "highest" if exact else "default"
        with warnings.catch_warnings(), jax.default_matmul_precision(precision):
            # What torch counts in 64 bits, JAX counts in 32: positions and token ids fit.
            warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
            return _torchax().interop.jax_view(call)(weights, (options,), tensors)

    def weights(self) -> dict[str, Any]:
        """The network's weights, where the program takes them."""
        return weights_of(self.network)

    def put(self, tensor: torch.Tensor) -> Any:
        """An argument, where the program takes it."""
        return array_of(to_jax(tensor))

    def weight_struct(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """What stands for a weight when nothing but compiling is wanted."""
        import jax

        return jax.ShapeDtypeStruct(shape, dtype)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What stands for an argument when nothing but compiling is wanted."""
        import jax

        return jax.ShapeDtypeStruct(shape, dtype)

    def weight_structs(self) -> dict[str, Any]:
        """What stands for the weights; the network may be on torch's "meta" device, with none at all."""
        named = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        return {
            name: self.weight_struct(name, tuple(value.shape), jax_dtype(value.dtype))
            for name, value in named.items()
        }

    def __call__(self, options: Hashable, **tensors: Any) -> torch.Tensor:
        """Runs on tensors, or nested tuples of them; what is None stays out.

        Args:
            options: what the network takes besides tensors: another value is another program.
            tensors: on JAX or plain.
        """
        import jax

        configure_compile_cache()
        given = {name: value for name, value in tensors.items() if value is not None}
        arrays = jax.tree.map(self.put, given)
        return tensor_of(self._compiled(options, self.weights(), arrays))

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
    """One pass over a video with a compiled network: carries the cache from chunk to chunk."""

    def __init__(self, program: ChunkProgram):
        configure_compile_cache()
        self._program = program
        self._weights = program.weights()
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


def jit_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A torch function of tensors compiled by JAX; its first argument is static and hashable, the rest are
    tensors."""
    import jax

    compiled = jax.jit(
        lambda static, *args: _torchax().interop.jax_view(functools.partial(function, static))(*args),
        static_argnums=0,
    )
    return lambda static, *args: tensor_of(compiled(static, *_torchax().interop.jax_view(args)))


def default_compile_cache() -> Path:
    """`$XDG_CACHE_HOME/cogvideox-torchax/xla`, in `~/.cache` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cogvideox-torchax" / "xla"


def configure_compile_cache(directory: str | Path | None = None) -> None:
    """Points JAX's persistent compile cache at the user's cache directory, once.

    A directory given here wins; a cache that JAX is already configured with (`JAX_COMPILATION_CACHE_DIR`, or
    `jax_compilation_cache_dir`) is left alone; `COGVIDEOX_TORCHAX_COMPILE_CACHE` names another directory, or
    "off".
    """
    global _cache_configured
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    with _cache_lock:
        if directory is None and (_cache_configured or jax.config.jax_compilation_cache_dir):  # pyright: ignore
            return
        _cache_configured = True
        chosen = str(directory or os.environ.get(COMPILE_CACHE_VARIABLE) or default_compile_cache())
        if chosen == "off":
            jax.config.update("jax_compilation_cache_dir", None)
            return
        jax.config.update("jax_compilation_cache_dir", chosen)
        # JAX decides at its first compilation whether there is a cache: make it decide again.
        compilation_cache.reset_cache()
