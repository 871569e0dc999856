"""The bridge between torch and JAX by TorchTPU (`torch-tpu`): experimental, as no TPU has run it yet.

TorchTPU is PyTorch's own device "tpu". Its `jax_op` turns a JAX function into an operation of torch. The
function's arguments may be arrays, sequences of arrays and plain values, but no trees, and their shapes may
not be annotated. So an operation here is *flat*: it takes a list of arrays and returns a list of arrays. The
arguments of a call are a tree, whose leaves are tensors and *constants*, which are all other values. One
operation is made, and kept, for each function with each structure of arguments and each set of constants.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime import bridge
from cogvideox_torchax.runtime.trees import skeleton
from cogvideox_torchax.runtime.weights import named_tensors

Trees = dict[tuple[Any, ...], Any]
"""The structures of the results of a flat function, by the `shapes_of` of its arguments."""

HALVES = ("bfloat16", "float16")
"""The dtypes of 16 bits."""
SHAPES = 256
"""Most sets of shapes for which one network is compiled: sizes of videos and of tiles."""

NO_GRADIENT = (
    "TorchTPU's operations of JAX functions have no derivative: train the model by torchax, in an "
    "environment without torch-tpu"
)


def is_on_torchtpu(module: nn.Module) -> bool:
    """Return whether a module's first weight, and so all of them, is on TorchTPU's device."""
    first = next(module.parameters(), None)
    return first is not None and bridge.on_tpu(first)


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors on TorchTPU's device that runs a function of JAX arrays.

    Arguments and results may be trees. Constants among the arguments must be hashable. The function has no
    derivative.
    """
    make_flat = functools.partial(_operation, jax_function)  # takes a structure of arguments and constants
    return functools.wraps(jax_function)(_with_trees(make_flat))


def _with_trees(make_flat: Callable[[Any, tuple[Any, ...]], tuple[Any, Trees]]) -> Callable[..., Any]:
    """Return a function of trees, which calls the flat function that is made for its arguments' structure.

    `make_flat(structure, constants)` returns the flat function, and the structures of its results, which are
    known once it has run. `constants` has all leaves of the arguments, with None in the place of each tensor.
    JAX counts None as no leaf, so no constant is None.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        flat, trees = make_flat(structure, constants)
        results = flat(tensors)  # the first call of each shape adds to `trees` the structure of its results
        return trees[shapes_of(tensors)].unflatten(results)

    return call


def _flattened(function: Callable[..., Any], structure: Any, constants: tuple[Any, ...]) -> tuple[Any, Trees]:
    """Return the flat function of a function of trees, and the structures of its results.

    The first call with arguments of new shapes traces the flat function, and adds a structure.
    """
    trees: Trees = {}

    def flat(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        remaining = iter(arrays)
        args, kwargs = structure.unflatten(next(remaining) if leaf is None else leaf for leaf in constants)
        # By default a TPU multiplies float32 in bfloat16, so float32 asks for "highest". An operation on 16
        # bits keeps the default, the only precision of its kernel, even if other arguments are float32, such
        # as the moments of a norm. Vectors tell nothing: their dtype may differ from that of the products.
        exact = not any(array.dtype in HALVES and array.ndim > 1 for array in arrays)
        with jax.default_matmul_precision("highest" if exact else "default"):
            results, trees[shapes_of(arrays)] = jax.tree.flatten(function(*args, **kwargs))
        return results

    return flat, trees


def shapes_of(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the (shape, dtype's name) of each of these JAX arrays, or of these tensors."""
    return tuple((tuple(array.shape), str(array.dtype).removeprefix("torch.")) for array in arrays)


@functools.cache
def _operation(function: Callable[..., Any], structure: Any, constants: tuple[Any, ...]) -> tuple[Any, Trees]:
    """Return torch's operation that computes a JAX function, and the structures of its results."""
    # TorchTPU donates no inputs, so a kernel may not write into one.
    options = {"in_place": False} if "in_place" in inspect.signature(function).parameters else {}
    flat, trees = _flattened(functools.partial(function, **options), structure, constants)
    # TorchTPU keeps compiled programs on disk by this name, so it must be the same in every process.
    # Python's `hash` is not.
    digest = hashlib.sha256(repr((structure, constants)).encode()).hexdigest()[:16]
    operation = jax_op(f"cogvideox_torchax::{function.__name__}_{digest}", flat)

    def refuse(*_: Any) -> Any:
        raise ValueError(NO_GRADIENT)

    operation.register_autograd(refuse)
    return operation, trees


def jax_op(name: str, function: Callable[..., Any]) -> Any:
    """Call TorchTPU's `torch.tpu.pallas.jax_op`, which is experimental."""
    return torch.tpu.pallas.jax_op(name, function)  # pyright: ignore[reportAttributeAccessIssue]


class TorchTPUProgram:
    """A network (inputs, cache) -> (result, next cache), compiled by TorchTPU for each set of shapes.

    In `torch.compiler.set_stance("force_eager")` it runs operation by operation. A cache is not donated, so
    the next cache takes memory beside it.

    Args:
        network: the module.
        backend: the compiler for `torch.compile`; None for TorchTPU's.
    """

    def __init__(self, network: nn.Module, backend: Any = None):
        # `functional_call` sets weights on modules while it traces, which must not be the user's modules.
        copied = skeleton(network)

        def run(weights: dict[str, torch.Tensor], inputs: torch.Tensor, cache: Any) -> Any:
            result, cache = torch.func.functional_call(copied, weights, (inputs, cache))
            # A network permutes a cache's axes to the order in which a TPU computes, and in torch that gives
            # a view. `contiguous` stores the cache in that order, so that the next chunk's program reads it
            # as it is.
            return result, jax.tree.map(torch.Tensor.contiguous, cache)

        # `functools.cache`: one compiled function for each structure of arguments and set of constants.
        compile_flat = functools.cache(functools.partial(_compiled, run, backend or bridge.TPU))
        self._run = _with_trees(compile_flat)

    def weights(self, network: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a network's weights, by name."""
        return named_tensors(network)

    def step(self, weights: dict[str, torch.Tensor]) -> Callable[[torch.Tensor, Any], tuple[Any, Any]]:
        """Return the function (chunk, cache) -> (result, next cache) of these weights, without gradients."""
        return torch.no_grad()(lambda chunk, cache: self._run(weights, chunk.to(bridge.TPU), cache))


def _compiled(
    function: Callable[..., Any], backend: Any, structure: Any, constants: tuple[Any, ...]
) -> tuple[Any, Trees]:
    """Return the flat function of a function of torch, compiled, and the structures of its results."""
    # The arrays of this flat function are tensors of torch. Each JAX function that it calls is an operation
    # (`_operation`), which sets its own precision inside the one that `flat` sets around them all.
    flat, trees = _flattened(function, structure, constants)
    # By default torch.compile reads the bytecode of a function, which fails for the code of JAX in `flat`. So
    # this one is traced by running it.
    traced = upstream.traced_whole(flat)
    # One program for each set of shapes (`dynamic=False`), up to `SHAPES` of them. By default torch would
    # count the programs of all networks together, as their lambdas share one code object.
    return torch.compile(  # pyright: ignore[reportCallIssue]
        lambda tensors: traced(tensors),  # torch.compile does not accept `traced` itself
        backend=backend,
        fullgraph=True,
        dynamic=False,
        recompile_limit=SHAPES,
        isolate_recompiles=True,
    ), trees
