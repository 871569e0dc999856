"""The bridge between torch and JAX by TorchTPU (`torch-tpu`): experimental, as no TPU has run it yet.

TorchTPU is PyTorch's own device "tpu". Its `jax_op` turns a JAX function into an operation of torch. The
function's arguments may be arrays, sequences of arrays and plain values, but no trees, and their shapes may
not be annotated. So an operation here takes a list of arrays and returns one. One operation is made, and
kept, for each function, structure of its arguments, and set of values of the arguments that are no tensors.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime import bridge
from cogvideox_torchax.runtime.skeleton import skeleton
from cogvideox_torchax.runtime.weights import named_tensors
from jax_kernels.norm_conv3d import tpu as kernel

Trees = dict[tuple[Any, ...], Any]
"""The structures of a flat function's results, by the `shapes_of` its arguments."""

HALVES = ("bfloat16", "float16")
SHAPES = 256
"""Most sets of shapes for which one network is compiled: sizes of videos and of tiles."""

NO_GRADIENT = (
    "TorchTPU's operations of JAX functions have no derivative: train the model by torchax, in an "
    "environment without torch-tpu"
)


def is_on_tpu(module: nn.Module) -> bool:
    """Return whether a module's first weight, and so all of them, is on TorchTPU's device."""
    first = next(module.parameters(), None)
    return first is not None and bridge.on_tpu(first)


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of JAX arrays as one of tensors on TorchTPU's device, without a derivative.

    Arguments and results may be trees. Leaves of the arguments that are no tensors are constants, and must be
    hashable.
    """
    return functools.wraps(jax_function)(_on_flat(functools.partial(_operation, jax_function)))


def _on_flat(make: Callable[[Any, tuple[Any, ...]], tuple[Any, Trees]]) -> Callable[..., Any]:
    """Return a function of trees, by functions from a list of tensors to a list.

    `make(tree, constants)` returns such a function, and the structures of its results. It gets the structure
    of the arguments, and their leaves with None, which is no leaf, in the place of each tensor.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        flat, trees = make(tree, constants)
        results = flat(tensors)
        return trees[shapes_of(tensors)].unflatten(results)

    return call


def _flattened(function: Callable[..., Any], tree: Any, constants: tuple[Any, ...]) -> tuple[Any, Trees]:
    """Return a function of trees as one from a list to a list, and the structures of its results."""
    trees: Trees = {}

    def flat(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Call the function, while it is traced."""
        rest = iter(arrays)
        args, kwargs = tree.unflatten(next(rest) if leaf is None else leaf for leaf in constants)
        # By default a TPU multiplies float32 in bfloat16. An operation on 16 bits, of which the moments are
        # float32, keeps the default: its kernel has no other. Vectors do not count.
        exact = not any(array.dtype in HALVES and array.ndim > 1 for array in arrays)
        with jax.default_matmul_precision("highest" if exact else "default"):
            results, trees[shapes_of(arrays)] = jax.tree.flatten(function(*args, **kwargs))
        return results

    return flat, trees


def shapes_of(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shapes and the dtypes of arrays of JAX, or of tensors."""
    return tuple((tuple(array.shape), str(array.dtype).removeprefix("torch.")) for array in arrays)


@functools.cache
def _operation(function: Callable[..., Any], tree: Any, constants: tuple[Any, ...]) -> tuple[Any, Trees]:
    """Return the operation of torch that computes a JAX function, for one structure of its arguments."""
    kernel.IN_PLACE = False  # TorchTPU donates no inputs
    flat, trees = _flattened(function, tree, constants)
    # The same name in every process, as TorchTPU keeps compiled programs on disk.
    digest = hashlib.sha256(repr((tree, constants)).encode()).hexdigest()[:16]
    operation = jax_op(f"cogvideox_torchax::{function.__name__}_{digest}", flat)

    def refuse(*_: Any) -> Any:
        raise ValueError(NO_GRADIENT)

    operation.register_autograd(refuse)
    return operation, trees


def jax_op(name: str, function: Callable[..., Any]) -> Any:
    """Call TorchTPU's `torch.tpu.pallas.jax_op`, which is experimental."""
    return torch.tpu.pallas.jax_op(name, function)  # pyright: ignore[reportAttributeAccessIssue]


class TorchTPUProgram:
    """A network (inputs, cache) -> (result, cache), compiled by TorchTPU: a program for each set of shapes.

    In `torch.compiler.set_stance("force_eager")` it runs operation by operation. A cache is not
    donated, so the kernels write the next one beside it.
    """

    def __init__(self, network: nn.Module, backend: Any = None):
        copied = skeleton(network)  # tracing assigns weights to modules

        def run(weights: dict[str, torch.Tensor], inputs: torch.Tensor, cache: Any) -> Any:
            result, cache = torch.func.functional_call(copied, weights, (inputs, cache))
            # A network only permutes the axes of a cache; here the next chunk's program takes it as it lies.
            return result, jax.tree.map(torch.Tensor.contiguous, cache)

        self._run = _on_flat(functools.cache(functools.partial(_compiled, run, backend or bridge.TPU)))

    def weights(self, network: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a network's weights, by name."""
        return named_tensors(network)

    def step(self, weights: dict[str, torch.Tensor]) -> Callable[[torch.Tensor, Any], tuple[Any, Any]]:
        """Return the function (chunk, cache) -> (result, next cache) of these weights, without gradients."""
        return torch.no_grad()(lambda chunk, cache: self._run(weights, chunk.to(bridge.TPU), cache))


def _compiled(
    function: Callable[..., Any], backend: Any, tree: Any, constants: tuple[Any, ...]
) -> tuple[Any, Trees]:
    """Return a function of torch, compiled by a backend for one structure of its arguments."""
    flat, trees = _flattened(function, tree, constants)
    traced = upstream.traced_whole(flat)
    return torch.compile(  # pyright: ignore[reportCallIssue]
        lambda tensors: traced(tensors),  # torch.compile takes `traced` itself for no function to compile
        backend=backend,
        fullgraph=True,
        dynamic=False,
        recompile_limit=SHAPES,
        isolate_recompiles=True,
    ), trees
