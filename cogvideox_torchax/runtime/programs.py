"""Programs of torch modules, and the programs that a model keeps.

`arrays.places` explains the terms *place*, *cache* and *struct*, and `runtime.trees` explains *module tree*.
A *skeleton* is a copy of a module tree, to be traced.
"""

import functools
import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import torch
from torch import nn

from cogvideox_torchax.arrays.places import ArrayProgram, Place
from cogvideox_torchax.runtime.bridge import array_of, as_array, jax_dtype
from cogvideox_torchax.runtime.declared import declared
from cogvideox_torchax.runtime.device import import_torchax, tracing
from cogvideox_torchax.runtime.host import on_jax
from cogvideox_torchax.runtime.layers import check_no_global_hooks, is_profiling, named_layers
from cogvideox_torchax.runtime.models import PROGRAMS
from cogvideox_torchax.runtime.outside import Variables
from cogvideox_torchax.runtime.trees import Tree, UntraceableError, skeleton, weightless
from cogvideox_torchax.runtime.weights import named_tensors, put_weights
from cogvideox_torchax.upstream import array_in, is_traced, replace_array

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
TRACING = threading.RLock()
"""Lock held while a network is traced: torchax does not support two traces at once."""

EVICTED = (
    "{}: its last {} programs are kept, and it has had one more: each call in which modules, attributes "
    "or hooks differ from all of these compiles a program anew"
)
logger = logging.getLogger("cogvideox_torchax")

T = TypeVar("T")

_FOUND: weakref.WeakKeyDictionary[nn.Module, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""By a network whose program was just asked for, its weights, for `Program.weights`."""


_WARNED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def warn_once(model: Any, message: str) -> None:
    """Log a warning about a model, or its programs, unless it was logged before."""
    if message not in _WARNED.setdefault(model, set()):
        _WARNED[model].add(message)
        logger.warning(message)


class Programs:
    """A model's compiled programs, each for the module tree that it was traced from; safe in any thread."""

    KEPT = 4
    """Most programs kept of one kind: for module trees that a user switches between."""
    KINDS = 64
    """Most kinds with programs: a network of any class has one for each form of its calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By kind, and then by the key of the module tree: the program, and what the key has by ids. Of both
        # the last one is the one that was asked for last.
        self._kept: dict[tuple[Hashable, ...], dict[Hashable, tuple[Any, list[Any]]]] = {}

    def get(self, kind: Hashable, network: nn.Module, build: Callable[[nn.Module], T]) -> T:
        """Return the program of this kind for the module tree as it is now; build one if there is none.

        Args:
            kind: key of a program among the model's, such as a direction of a VAE.
            network: the module tree; its modules, attributes and hooks select the program, not its weights.
            build: returns a new program of the network.
        """
        from jax_kernels.common.tiles import pallas_mode

        check_no_global_hooks()
        # The walk comes before the program: if another thread changes the network in between, the next call
        # finds another key, and builds a new program.
        tree = Tree(network)
        _FOUND[network] = tree.tensors
        with self._lock:
            # Whether a profile is recorded, and how Pallas kernels run, change the traced program too.
            key = (kind, is_profiling(), pallas_mode())
            programs = self._kept[key] = self._kept.pop(key, {})  # this moves the key to the end
            program, _held = programs[tree.key] = programs.pop(tree.key, None) or (build(network), tree.held)
            if len(programs) > self.KEPT:
                dropped, _held = programs.pop(next(iter(programs)))  # the one not asked for the longest
                was_compiled = getattr(dropped, "untraceable", "no program") is None
                if was_compiled:
                    warn_once(self, EVICTED.format(type(network).__name__, self.KEPT))
            if len(self._kept) > self.KINDS:
                del self._kept[next(iter(self._kept))]  # the key not asked for the longest
            return program

    def kinds(self) -> list[Hashable]:
        """Return the kinds of the kept programs, of which one may occur several times."""
        return [kind for kind, *_ in self._kept]


def programs_of(model: nn.Module) -> Programs:
    """Return the programs of a model; they are freed with the model.

    They are an attribute of the model, which the first call sets and which copies leave out. A table outside
    the model would keep it alive, as a hook that a program was traced with may refer to the model. An
    attribute that does so is a cycle, which Python's garbage collector frees.
    """
    return vars(model).setdefault(PROGRAMS, Programs())  # `setdefault` is atomic among threads


def forget_programs(model: nn.Module) -> None:
    """Drop a model's compiled programs."""
    vars(model).pop(PROGRAMS, None)


def _check_deterministic(network: nn.Module) -> nn.Module:
    """Return the network if no module of it is random.

    Raises:
        ValueError: a module drops values at random. A program would drop the same values in each call.
    """
    for name, module in network.named_modules():
        if isinstance(module, DROPOUTS) and module.training and module.p > 0:
            # The network of a pipeline's model holds the model as `model`, and has as `component` the model's
            # name in the pipeline, such as "transformer", which the user knows.
            shown = name.replace("model", getattr(network, "component", "model"), 1)
            raise ValueError(
                f"{shown} drops values by chance (p={module.p}), which no program on JAX does: call the "
                "eval() of its model, or set its p to 0"
            )
    return network


class TorchNetwork:
    """A torch module in the form of a network that `ArrayProgram` takes.

    Attributes:
        name: the name of the module's class.
        weights: the structs of the weights, by name.
        keep_unused: whether the program keeps arguments that are not read (`ArrayProgram`).
    """

    def __init__(self, module: nn.Module):
        # A copy whose weights have no memory, so that a program does not keep the model's weights alive.
        self._module = weightless(module)
        self.name = type(module).__name__
        self.declared = functools.partial(declared, self._module)
        self.keep_unused = getattr(module, "keep_unused", False)
        self.weights = {
            name: jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))
            for name, tensor in named_tensors(self._module).items()
        }

    def __call__(
        self, place: Place, weights: dict[str, Any], inputs: Any, cache: Any, **watching_options: Any
    ) -> Any:
        """Run the network, while a program is traced; return the result and the next cache.

        Each call runs a new copy of the module tree, since tracing changes it.

        Args:
            place: the devices of the program.
            weights: the arrays of the weights, by name.
            inputs: the network's inputs.
            cache: arrays that the previous call returned; None in a first call.
            watching_options: keywords that the place's `trace` passes, for the same place's `watching`, which
                may change the copy. On a mesh a VAE's place passes `split`, the sharding of the width.
        """
        network = _check_deterministic(skeleton(self._module))
        # `functional_call` runs the network with these weights in place of its own, and `jax_view` makes a
        # function of arrays of it.
        call = import_torchax().interop.jax_view(functools.partial(torch.func.functional_call, network))
        # By default a TPU multiplies float32 in bfloat16, and a recent GPU in TF32; a float32 model is to be
        # exact. Only its matrices tell: a bfloat16 model may have vectors in float32, those of norms.
        exact = any(array.dtype == "float32" for array in weights.values() if array.ndim > 1)
        precision = jax.default_matmul_precision("highest" if exact else "default")
        # On a mesh: the context in which the place's hooks shard, or record, what the layers take and return.
        watching = place.watching(network, **watching_options)
        # One thread traces at a time (`TRACING`). While a profile is recorded, `named_layers` names the
        # program's instructions after the layers.
        with TRACING, tracing(), named_layers(network), watching, precision, warnings.catch_warnings():
            # torch's int64 becomes JAX's int32, which positions and token ids fit into.
            warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
            variables = Variables(Tree(network))
            try:
                return call(weights, (inputs, cache))
            finally:
                self._check_unchanged(variables.undo())

    def _check_unchanged(self, variable: str | None) -> None:
        """Raise an error, or log a warning, if tracing has changed a variable outside of the network."""
        if variable is None:
            return
        if getattr(self._module, "runs_by_operation", False):
            raise UntraceableError(f"it changes {variable}, a variable outside of its modules")
        logger.warning(
            "%s: hooks or methods change %s, a variable outside of its modules, which no program does",
            *(self.name, variable),
        )


class Program(ArrayProgram):
    """A program of a torch module, with its weights and with gradients.

    Args:
        network: a torch module, whose inputs are a tensor, or a dictionary of tensors and of tuples of them;
            or an object with the call and the attributes of a `TorchNetwork`.
        place: the devices that the program runs on; None for JAX's default device.
    """

    def __init__(self, network: Any, place: Place | None = None):
        super().__init__(TorchNetwork(network) if isinstance(network, nn.Module) else network, place)
        # The names of the weights of the last call, and their arrays on the program's devices. Both lists are
        # in one attribute, so that a thread which replaces it replaces both at once. By them `weights` finds
        # that the arrays are placed already. The references are weak: the model keeps its arrays alive, and
        # those that it has replaced are to be freed.
        self._placed: tuple[list[str], list[weakref.ref[Any]]] = [], []
        # This one donates no cache, as the backward pass reads it again. `jax.vjp` takes no compiler options.
        self._differentiable = jax.jit(self._trace_for_gradients)

    @torch.enable_grad()
    def _trace_for_gradients(self, weights: dict[str, Any], inputs: Any, cache: Any) -> Any:
        """Trace with torch's gradients on; with gradients off, modules skip gradient checkpointing."""
        return self._trace(weights, inputs, cache)

    def weights(self, network: nn.Module) -> dict[str, Any]:
        """Return the arrays of a network's weights, by name, on the devices where the program takes them.

        The network must have the modules of the one that was compiled. A weight on other devices, as after
        `load_state_dict`, or a plain tensor, as in a submodule that the user has replaced, is moved; the
        network then holds the moved one. This runs before each call, and the usual case, that all arrays are
        those of the previous call, is found fast.
        """
        tensors = _FOUND.pop(network, None) or Tree(network).tensors
        arrays = list(map(array_in, tensors))  # None for a plain tensor
        names, references = self._placed
        # `reference()` is None for an array that was freed, so None must not count as the same array.
        if len(arrays) == len(names) and all(
            array is not None and reference() is array
            for reference, array in zip(references, arrays, strict=True)
        ):
            return dict(zip(names, arrays, strict=True))
        if not all(map(on_jax, tensors)):
            put_weights(network)  # which makes new tensors
        weights = dict[str, Any]()
        for name, tensor in named_tensors(network).items():
            array = array_of(tensor)
            # An array that is traced, as in a user's `jax.grad`, has no devices yet.
            weights[name] = array if is_traced(array) else self.place.weight(name, array)
            replace_array(tensor, lambda _, name=name: weights[name])
        name_of = {id(tensor): name for name, tensor in named_tensors(network).items()}
        # The names in the order of `arrays`. A tied weight has several places there, and here one name.
        names = [name_of[id(tensor)] for tensor in Tree(network).tensors]
        if all(isinstance(array, jax.Array) and not is_traced(array) for array in weights.values()):
            self._placed = names, [weakref.ref(weights[name]) for name in names]
        return weights

    def put(self, inputs: Any) -> Any:
        """Return a tree of arrays or tensors, plain or on JAX, as arrays on the program's devices.

        Entries of a dictionary that are None, as optional inputs may be, are left out.
        """
        if isinstance(inputs, dict):
            inputs = {name: value for name, value in inputs.items() if value is not None}
        return jax.tree.map(lambda value: self.place.put(as_array(value)), inputs)

    def run_video(self, weights: Any, video: Any, lengths: Sequence[int]) -> Any:
        """Return the results of all chunks of a video, joined in time; `jax.vjp` can differentiate this.

        The gradient of a later frame flows through the caches to earlier frames.

        Args:
            weights: arrays on the program's devices.
            video: frames or latents, a JAX array (N, C, T, H, W).
            lengths: the number of frames (or latent frames) in each chunk.
        """
        results, cache = [], None
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            chunk = self.place.put(video[:, :, end - length : end])
            # Not `run`, which donates the cache: the backward pass reads every chunk's cache again.
            result, cache = self._differentiable(weights, chunk, cache)
            results.append(result)
        return jax.numpy.concatenate(results, axis=2)
