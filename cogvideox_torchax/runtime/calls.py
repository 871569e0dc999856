"""Calls of a model's own methods as compiled programs, whatever their arguments and results are.

`run_method` traces a method as it is. A method that no trace can follow, because it branches on a tensor's
value for example, runs operation by operation, with the same result.

A call's arguments are a tree of tuples, lists, dictionaries and classes that torch knows as containers. Its
*leaves* are the other objects, numbered by their *position*. The leaves that are tensors are arguments of the
program. All other leaves, such as numbers, are constants in it: together with the method and the tree they
are the call's *form*, and each form has a program of its own.

A tensor *of the host* is a plain one, PyTorch's own; a tensor *on JAX* is torchax's. A model that is called
has its weights on JAX.
"""

import contextvars
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch import nn
from torch.utils import _pytree as pytree

from cogvideox_torchax.arrays.places import Place
from cogvideox_torchax.runtime.bridge import array_of, tensor_of, to_jax, without_gradient
from cogvideox_torchax.runtime.device import RandomInTraceError
from cogvideox_torchax.runtime.host import on_jax
from cogvideox_torchax.runtime.programs import Program, Programs, programs_of, warn_once
from cogvideox_torchax.runtime.trees import Tree, UntraceableError
from cogvideox_torchax.runtime.weights import named_tensors

Method = Callable[..., Any]
"""A function of a model and of a call's arguments, such as `SomeTransformer.forward`."""

VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
"""Types of leaves that a program may have as constants: of a call's arguments, and of its result."""

_INSIDE = contextvars.ContextVar("_INSIDE", default=False)
"""Whether this thread is inside a method that `run_method` runs; there `run_method` only calls methods."""


def _call_inside(method: Method, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a method, inside of which `run_method` simply calls the method it gets."""
    token = _INSIDE.set(True)
    try:
        return method(model, *args, **kwargs)
    finally:
        _INSIDE.reset(token)


@dataclass(frozen=True)
class _Form:
    """The form of a call: all that its program has as constants.

    Attributes:
        method: the method.
        structure: torch's description of the tree of the call's arguments.
        constants: of each of the tree's leaves its type and value, as 1, 1.0 and True are equal, but not one
            constant; of a float its text, as 0.0 and -0.0 are equal; None for an argument of the program.
        values: the leaves, with None in the place of each argument of the program.
    """

    method: Method
    structure: pytree.TreeSpec
    constants: tuple[tuple[type, Any] | None, ...]
    values: tuple[Any, ...] = field(compare=False)

    def changing_argument(self, others: Iterable[Any]) -> str | None:
        """Return the name of an argument with too many constants in forms that are else alike, or None."""
        forms = [self, *(each for each in others if isinstance(each, _Form))]
        alike = [each for each in forms if (each.method, each.structure) == (self.method, self.structure)]
        for position in range(len(self.values)):
            if len({each.constants[position] for each in alike} - {None}) > Programs.KEPT:
                args, kwargs = pytree.tree_unflatten(range(len(self.values)), self.structure)
                named = inspect.signature(self.method).bind(None, *args, **kwargs).arguments
                paths: Any = pytree.tree_flatten_with_path(named)[0]  # a path begins with the argument's name
                path = next(path for path, leaf in paths if leaf == position)
                return path[0].key + pytree.keystr(path[1:])
        return None


@functools.lru_cache(maxsize=1024)
def _interned(form: _Form) -> _Form:
    """Return one object for all equal forms: a program is found by the identity of a module's attributes."""
    return form


class MethodCall(nn.Module):
    """A module that runs one form of a call of a model's method; a program is compiled from it.

    It is a network (inputs, cache) -> (result, next cache), whose cache is always None.
    """

    component = "model"  # the model's name in errors
    runs_by_operation = True  # if it cannot be traced

    def __init__(self, model: nn.Module, method: Method, structure: pytree.TreeSpec, leaves: list[Any]):
        """Take the leaves and the structure of a call's arguments (args, kwargs), without the model."""
        super().__init__()
        self.model = model
        constants = tuple(
            (type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf)
            if isinstance(leaf, VALUES)
            else None
            for leaf in leaves
        )
        values = tuple(leaf if isinstance(leaf, VALUES) else None for leaf in leaves)
        self.form = _interned(_Form(method, structure, constants, values))

    def inputs(self, leaves: list[Any]) -> dict[str, Any]:
        """Return the program's arguments among the leaves of a call's, by their positions ("0", "1")."""
        return {str(i): leaf for i, leaf in enumerate(leaves) if self.form.constants[i] is None}

    def forward(self, arguments: dict[str, Any], cache: None) -> tuple[Any, None]:
        """Run the method while a program is traced; `arguments` has the program's, by position ("0", "1").

        Raises:
            UntraceableError: the method writes into its model or its arguments, or returns an object that no
                program can return.
        """
        leaves = [arguments.get(str(position), value) for position, value in enumerate(self.form.values)]
        # A program has no effect but its result, so a method that changes anything else is refused. The key
        # and the lists here tell afterwards what it has changed.
        tree = Tree(self.model)
        weights = named_tensors(self.model)
        # A write into a torchax tensor gives the tensor another array.
        old_arrays = [(tensor, array_of(tensor)) for tensor in (*weights.values(), *arguments.values())]
        args, kwargs = pytree.tree_unflatten(leaves, self.form.structure)
        result = _call_inside(self.form.method, self.model, args, kwargs)
        if Tree(self.model).key != tree.key:
            raise UntraceableError("it changes its modules' attributes")
        if any(array_of(tensor) is not array for tensor, array in old_arrays):
            raise UntraceableError("it writes into its weights or its arguments")
        leaves_now, structure_now = pytree.tree_flatten((args, kwargs))
        if structure_now != self.form.structure or not all(map(operator.is_, leaves_now, leaves)):
            raise UntraceableError("it changes a container among its arguments")
        return _Result.of(result), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Result:
    """A method's result, a tree whose structure and constants JAX keeps with the program.

    Attributes:
        tensors: the tree's tensors; arrays in the result of a program.
        constants: torch's description of the tree, and then for each leaf None if it is a tensor, else
            (leaf,). The tuple tells a leaf that is None from a tensor.
    """

    tensors: tuple[Any, ...]
    constants: tuple[Any, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, result: Any) -> "_Result":
        """Take a result apart; `UntraceableError` if a leaf is neither a tensor nor one of `VALUES`."""
        leaves, structure = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *VALUES)):
                raise UntraceableError(f"it returns a {type(leaf).__name__}")
        # A method may return a tensor of the host, but a program can return only arrays of JAX.
        tensors = tuple(to_jax(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(
            tensors, (structure, *(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves))
        )

    def tree(self) -> Any:
        """Return the method's result, put together again from what a program has returned."""
        structure, *constant_leaves = self.constants
        arrays = iter(self.tensors)
        leaves = [tensor_of(next(arrays)) if leaf is None else leaf[0] for leaf in constant_leaves]
        return pytree.tree_unflatten(leaves, structure)


def run_method(
    model: nn.Module,
    method: Method,
    *args: Any,
    place: Place | None = None,
    name: str = "model",
    **kwargs: Any,
) -> Any:
    """Call a method of a model whose weights are on JAX, as a compiled program if it can be traced.

    A method runs operation by operation, and a warning says why, if it branches on the values of tensors,
    writes into its model, draws random numbers, or takes or returns objects that are neither tensors nor of
    `VALUES` (numbers, texts, dtypes and other constants).

    Args:
        model: the model; a change of its modules, attributes or hooks selects another program.
        method: a function of the model and the other arguments.
        args, kwargs: arguments of the call; tensors are moved to the program's devices.
        place: the devices of the program; None for JAX's default device.
        name: the model's name for the warning.
    """
    if _INSIDE.get():  # called by a method that runs already, and maybe as a part of a program
        return method(model, *args, **kwargs)
    place = place or Place()
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # The leaves, with an array on the program's devices in the place of each tensor.
    placed = [
        place.put(array_of(to_jax(leaf))) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    try:
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *VALUES)):
                raise UntraceableError(f"it takes a {type(leaf).__name__}")
        result = _run_compiled(model, MethodCall(model, method, structure, leaves), placed, place, name)
    except UntraceableError as error:
        warn_once(model, f"{name}: {type(model).__name__} runs operation by operation, since {error}")
        result = _call_inside(method, model, args, kwargs)
    # Each tensor of the result raises in a backward pass. Otherwise the pass could end at the result without
    # an error, and leave gradients out.
    why = f"on JAX the {name} has no gradients"
    return pytree.tree_map_only(
        torch.Tensor, functools.partial(_without_gradient, model, leaves, why), result
    )


VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors of code that needs the values of arrays while it is traced."""


def _run_compiled(model: nn.Module, network: MethodCall, leaves: list[Any], place: Place, name: str) -> Any:
    """Run the program of a call, or raise `UntraceableError`; a failed trace is not tried again.

    `leaves` are those of the call's arguments, with a JAX array in the place of each tensor.
    """
    programs = programs_of(model)

    def build(_network: nn.Module) -> Program:
        changing = network.form.changing_argument(programs.kinds())
        if changing is not None:
            values = f"{Programs.KEPT + 1} values of its argument {changing}, each a constant of a program"
            warn_once(model, f"{name}: {type(model).__name__} was compiled for {values}: pass a tensor")
        return Program(network, place)

    # The model keeps its programs, all for the place that the model is in. `get` finds this one by the form,
    # and by the modules of `network`.
    program = programs.get(network.form, network, build)
    if program.untraceable is None:
        try:
            result, _no_cache = program.run(program.weights(network), network.inputs(leaves))
            return result.tree()
        except (UntraceableError, RandomInTraceError) as error:
            program.untraceable = str(error)  # the next call raises this at once
        except VALUE_ERRORS:
            program.untraceable = "it reads the values of tensors, as a branch on one does"
    raise UntraceableError(program.untraceable)


def _without_gradient(model: nn.Module, leaves: list[Any], why: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, of a method's result, so that a backward pass from it raises an error saying `why`."""
    if not on_jax(tensor) or not tensor.is_floating_point() or not torch.is_grad_enabled():
        return tensor
    # A backward pass can come only if a weight or an argument, one of `leaves`, requires a gradient. The
    # arguments may all be on the host: `tensor` is not.
    arguments = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return without_gradient(model, [tensor, *arguments], tensor.detach(), why)
