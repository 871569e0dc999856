"""Programs of arrays, without torch: pure functions of weights, inputs and a cache, each for a place.

A place is the devices that a program runs on, and how its arrays are sharded over them. A cache is a tree of
arrays that a call returns and the next call takes: a VAE's convolutions keep frames of a chunk in it for the
next chunk. A struct is a `jax.ShapeDtypeStruct`: an array's shape, dtype and sharding.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cogvideox_torchax.arrays import exported
from cogvideox_torchax.arrays.compile_cache import configure_compile_cache
from cogvideox_torchax.arrays.forks import check_not_forked
from cogvideox_torchax.upstream import is_tracing

_CPU_OPTIONS = {}
if jax.__version_info__ >= (0, 9, 1):  # the first version with this option
    # By default XLA orders a CPU's operations so that many can run side by side. It begins with those that
    # need only weights, and so holds the transformed weights of all layers at once.
    _CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


class Place:
    """The devices of a program: here one device, JAX's default if None. A subclass is for a mesh."""

    def __init__(self, device: Any = None):
        self._device = device

    @property
    def platform(self) -> str:
        """JAX's name of the devices' kind, such as "tpu" or "cpu"."""
        return self._device.platform if self._device else jax.default_backend()

    def weight(self, name: str, array: Any) -> Any:
        """Return a weight, an array on JAX, on the program's devices; without a mesh, unchanged."""
        return array

    def put(self, array: Any) -> Any:
        """Return an input, a NumPy or a JAX array, even a traced one, on the program's devices.

        Without a mesh it is returned unchanged: the program's call moves it.
        """
        return array

    def struct(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the result of `put` for an input of this shape, with structs in place of arrays."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.input_sharding(shape))

    def input_sharding(self, shape: tuple[int, ...]) -> Any:
        """Return the sharding of an input of this shape; None is JAX's default device."""
        return None if self._device is None else jax.sharding.SingleDeviceSharding(self._device)

    def weight_sharding(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return the sharding of a weight, which a subclass may choose by its name."""
        return self.input_sharding(shape)

    def cache_sharding(self, shape: tuple[int, ...]) -> Any:
        """Return the sharding of one of a cache's arrays."""
        return self.input_sharding(shape)

    def trace(self, run: Callable[..., Any], inputs: Any, cache: Any) -> Any:
        """Return `run(inputs, cache)`, the result and the next cache; called while a program is traced.

        A subclass may shard the arguments and results. It may also pass keywords, as `vae.placement`
        passes `split`: `run` hands them to the program's network, and a `TorchNetwork` to this subclass's
        `watching`, which sets them on the copy's modules.
        """
        return run(inputs, cache)

    def compiler_options(self) -> dict[str, str]:
        """Return XLA's options, by name, for a program."""
        return _CPU_OPTIONS if self.platform == "cpu" else {}

    def watching(self, network: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that is open while `network`, a copy of a torch network, is traced.

        A subclass may change the copy.
        """
        return contextlib.nullcontext()


class ArrayProgram:
    """A network (inputs, cache) -> (result, next cache), compiled for a place.

    The compiled function is (weights, inputs, cache) -> (result, next cache), and has no state. JAX compiles
    it twice for each set of shapes: for a call without a cache, such as a video's first chunk, and for a call
    with a cache, which is donated. Any thread may run it.

    Args:
        network: called as `network(place, weights, inputs, cache, **options)`, returns (result, next cache).
            Its `name` is the program's; its `weights` are structs, which only `structs` reads. If it has a
            true `keep_unused`, the program keeps arguments that the network does not read. Otherwise JAX
            drops those, and does not donate them.
        place: the devices that the program runs on; None for JAX's default device.

    Attributes:
        compilations: number of programs traced so far.
        untraceable: the reason why the network cannot be traced, or None.
    """

    def __init__(self, network: Any, place: Place | None = None):
        configure_compile_cache()
        self._network = network
        self.place = place or Place()
        self.compilations = 0
        self.untraceable: str | None = None
        # By what `compile_ahead` was called for, the thread that compiles it.
        self._compiling: dict[Any, threading.Thread] = {}

        # A function of its own, as JAX names a program after its function, and a method cannot be renamed.
        def run(weights: Any, inputs: Any, cache: Any) -> Any:
            return exported.call(self._trace, network, self.place, weights, inputs, cache)

        run.__name__ = network.name  # in a profile and in the compile cache
        self._compiled = jax.jit(
            run,
            donate_argnums=2,  # the cache: the next cache may take its memory
            keep_unused=getattr(network, "keep_unused", False),
            compiler_options=self.place.compiler_options(),
        )
        # For a caller that runs this program inside a function which JAX traces: it becomes a part of the
        # caller's program, and JAX refuses compiler options for a part.
        self._compiled_in_another = jax.jit(self._trace, donate_argnums=2)

    def _trace(self, weights: Any, inputs: Any, cache: Any) -> Any:
        """Run the network, sharded by the place, and count the call: JAX makes it only to trace a program."""
        self.compilations += 1
        return self.place.trace(functools.partial(self._network, self.place, weights), inputs, cache)

    def put(self, inputs: Any) -> Any:
        """Return an array of NumPy or JAX on the program's devices."""
        check_not_forked()
        return self.place.put(inputs)

    def run(self, weights: Any, inputs: Any, cache: Any = None) -> tuple[Any, Any]:
        """Return (result, next cache).

        Args:
            weights: arrays on the program's devices.
            inputs: what `put` has returned.
            cache: the cache of the previous call, which is donated; None if there is none.
        """
        for thread in list(self._compiling.values()):
            thread.join()  # without this, JAX would compile the same program a second time here
        if is_tracing():  # a caller's program, of which this program becomes a part
            return self._compiled_in_another(weights, inputs, cache)
        return self._compiled(weights, inputs, cache)

    def empty_cache(self, weights: Any, inputs: Any) -> Any:
        """Return zeros, shaped and placed like the cache that a call without a cache returns."""
        # A first call that takes these zeros runs the same program as later calls.
        return jax.tree.map(
            lambda struct: jnp.zeros(struct.shape, struct.dtype, device=struct.sharding),
            self._cache_structs(weights, inputs),
        )

    def step(self, weights: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Return the function (inputs, cache) -> (result, next cache) of these weights; it calls `put`."""
        return lambda inputs, cache: self.run(weights, self.put(inputs), cache)

    # Ahead of time

    def lower(self, weights: Any, inputs: Any, cache: Any = None) -> Any:
        """Lower the program for arrays or structs."""
        return self._compiled.lower(weights, inputs, cache)

    def compile_ahead(self, inputs: Any, *, before: Any = None) -> None:
        """Start to compile, in a thread, what a later `run` needs for such inputs; that call waits for it.

        The arguments are those of `structs`. A second call with equal arguments does nothing.
        """
        # The VAE alone compiles ahead, and it has one input: so both are pairs (shape, dtype), or None, which
        # have a hash, and no dictionaries.
        if (inputs, before) in self._compiling:
            return
        # JAX keeps the lowered program of these shapes, and with it what `compile` makes. The call in `run`
        # finds both there, so that what `compile` returns is dropped.
        lowered = self.lower(*self.structs(inputs, before=before))

        def compile_lowered() -> None:
            with contextlib.suppress(Exception):  # `run` compiles again then, and raises the error
                lowered.compile()

        # Not a daemon: a process that ends while XLA compiles in another thread would be aborted.
        thread = threading.Thread(target=compile_lowered)
        thread.start()
        self._compiling[inputs, before] = thread  # only now: a `run` in another thread may join it at once

    def structs(self, inputs: Any, *, before: Any = None) -> tuple[Any, Any, Any]:
        """Return structs of the weights, the inputs and the cache that `lower` takes.

        Args:
            inputs: the input's pair (shape, JAX dtype), or a dictionary or a tuple of such pairs.
            before: the inputs of the previous call, whose cache this call takes, described as `inputs`; None
                for a call without a cache.
        """

        def place_weight(path: Any, weight: Any) -> Any:
            # `path` is JAX's: the keys that lead to the weight in the tree. As text it is the weight's name.
            name = jax.tree_util.keystr(path, simple=True)
            sharding = self.place.weight_sharding(name, weight.shape)
            return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)

        weights = jax.tree_util.tree_map_with_path(place_weight, self._network.weights)
        cache = None if before is None else self._cache_structs(weights, self._structs(before))
        return weights, self._structs(inputs), cache

    def _cache_structs(self, weights: Any, inputs: Any) -> Any:
        """Return the structs of the cache that a call without a cache returns; nothing is computed.

        `weights` and `inputs` are arrays or structs.
        """
        _, cache = jax.eval_shape(self._compiled, weights, inputs, None)
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=self.place.cache_sharding(array.shape)
            ),
            cache,
        )

    def _structs(self, described: Any) -> Any:
        """Return the struct of each input from its pair (shape, JAX dtype), in a tree of such pairs."""
        return jax.tree.map(lambda pair: self.place.struct(*pair), described, is_leaf=describes_one_input)


def describes_one_input(node: Any) -> bool:
    """Return whether a node in a tree of pairs (shape, dtype) is such a pair, and not a tuple of pairs."""
    # The second item of a pair is a dtype. The second item of a tuple of pairs is a pair, so a tuple.
    return isinstance(node, tuple) and not isinstance(node[1], tuple)
