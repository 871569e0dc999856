"""Calls of a model's own methods as compiled programs, whatever their arguments and results are.

`run_method` traces a method as it is. A method that no trace can follow, because it branches on a tensor's
value for example, runs operation by operation, with the same result.
"""

import contextlib
import contextvars
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax.runtime.bridge import PLAIN, active, array_of, on_jax, tensor_of, to_jax, to_torch
from cogvideox_torchax.runtime.functions import RandomInTraceError
from cogvideox_torchax.runtime.gradients import without_gradient
from cogvideox_torchax.runtime.places import Place, describes_one_input
from cogvideox_torchax.runtime.programs import Program, Programs, programs_of
from cogvideox_torchax.runtime.skeleton import ForeignForwardError
from cogvideox_torchax.runtime.snapshot import Snapshot
from cogvideox_torchax.runtime.weights import named_tensors
from cogvideox_torchax.upstream import untraceable_errors

Method = Callable[..., Any]
"""A function of a model and of a call's arguments, such as `SomeTransformer.forward`."""

VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
"""Types of arguments and results that a program has as constants."""

logger = logging.getLogger("cogvideox_torchax")


class UntraceableError(ValueError):
    """A method that no program can run; the message says why."""


_INSIDE = contextvars.ContextVar("_INSIDE", default=False)
"""Whether a method runs, in this thread: methods that it calls run in place."""


@contextlib.contextmanager
def _inside_method() -> Iterator[None]:
    token = _INSIDE.set(True)
    try:
        with MixedTensors():
            yield
    finally:
        _INSIDE.reset(token)


@dataclass(frozen=True)
class _Form:
    """The part of a call that its program has as constants.

    Attributes:
        method: the method.
        structure: torch's description of the tree of its arguments.
        values: the tree's leaves, with None for an argument of the program.
        types: the types of the values, since 1, 1.0 and True are equal; of a float its text, since 0.0 and
            -0.0 are equal.
        arguments: the positions of the leaves that are arguments of the program.
    """

    method: Method
    structure: pytree.TreeSpec
    values: tuple[Any, ...]
    types: tuple[Any, ...]
    arguments: tuple[int, ...]

    @classmethod
    def of(
        cls, method: Method, structure: pytree.TreeSpec, leaves: list[Any], arguments: set[int]
    ) -> "_Form":
        values = tuple(None if i in arguments else leaf for i, leaf in enumerate(leaves))
        types = tuple(repr(value) if type(value) is float else type(value) for value in values)
        return _interned(cls(method, structure, values, types, tuple(sorted(arguments))))


@functools.lru_cache(maxsize=1024)
def _interned(form: _Form) -> _Form:
    """Return one object for all equal forms, as a snapshot of modules compares attributes by identity."""
    return form


class MethodCall(nn.Module):
    """A module that runs one form of a call of a model's method; a program is compiled from it."""

    component = "model"

    def __init__(self, model: nn.Module, form: _Form):
        super().__init__()
        self.model = model
        self.form = form

    def forward(self, arguments: dict[str, Any], cache: None) -> tuple[Any, None]:
        """Return (the method's result, None) of the call's arguments, by position.

        Raises:
            UntraceableError: the method writes into its model or its arguments, or returns an object that no
                program can return.
        """
        leaves = [arguments.get(str(position), value) for position, value in enumerate(self.form.values)]
        args, kwargs = pytree.tree_unflatten(leaves, self.form.structure)
        before, weights = Snapshot(self.model), named_tensors(self.model)
        arrays = [(tensor, array_of(tensor)) for tensor in (*weights.values(), *arguments.values())]
        with _inside_method():
            result = self.form.method(self.model, *args, **kwargs)
        if not before.holds(self.model):
            raise UntraceableError("it changes its modules' attributes")
        if any(array_of(tensor) is not array for tensor, array in arrays):
            raise UntraceableError("it writes into its weights or its arguments")
        if not _is_unchanged((args, kwargs), leaves, self.form.structure):
            raise UntraceableError("it changes a container among its arguments")
        return _Result.of(result), cache


def _is_unchanged(tree: Any, leaves: list[Any], structure: pytree.TreeSpec) -> bool:
    leaves_now, structure_now = pytree.tree_flatten(tree)
    return structure_now == structure and all(map(operator.is_, leaves_now, leaves))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Result:
    """A method's result, a tree whose structure and constants JAX keeps with the program."""

    tensors: tuple[Any, ...]
    constants: tuple[Any, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, result: Any) -> "_Result":
        """Return a method's result in this form.

        Raises:
            UntraceableError: it holds an object that is neither a tensor nor a value.
        """
        leaves, structure = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *VALUES)):
                raise UntraceableError(f"it returns a {type(leaf).__name__}")
        tensors = tuple(leaf if on_jax(leaf) else to_jax(leaf) for leaf in leaves if _is_tensor(leaf))
        return cls(tensors, (structure, *(None if _is_tensor(leaf) else (leaf,) for leaf in leaves)))

    def tree(self) -> Any:
        structure, *values = self.constants
        arrays = iter(self.tensors)
        leaves = [tensor_of(next(arrays)) if value is None else value[0] for value in values]
        return pytree.tree_unflatten(leaves, structure)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


WRITING_METHODS = frozenset(
    (
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
    )
)
"""Special methods that write into their first argument."""


TENSOR_METHODS = frozenset(
    method
    for kind in (torch.Tensor, *torch.Tensor.__bases__)
    for method in vars(kind).values()
    if callable(method)
) - {torch.Tensor.to}
"""The methods and operators of a tensor that leave it on its device, unless they are given another one."""


class MixedTensors(TorchFunctionMode):
    """Mode in which an operation on tensors of the host and of JAX moves the first kind to JAX.

    An operation that writes into a tensor of the host is refused. A tensor's method whose tensors are all on
    the host runs without torchax, in a tenth of the time; most of a scheduler's arithmetic is of this kind.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [*args, *kwargs.values()]
        if any(isinstance(leaf, list | tuple | dict) for leaf in leaves):
            leaves = pytree.tree_leaves(leaves)
        tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
        on_host = [type(tensor) in PLAIN for tensor in tensors]
        if tensors and all(on_host) and func in TENSOR_METHODS and "device" not in kwargs:
            with no_dispatch(), torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if any(on_host) and any(map(on_jax, tensors)):
            name = getattr(func, "__name__", "")
            writes = (name.endswith("_") and not name.endswith("__")) or name in WRITING_METHODS
            if writes and not on_jax(tensors[0]):
                raise ValueError(
                    f"got {name}, which writes a tensor on JAX into one of the host: move that .to('jax')"
                )
            args, kwargs = pytree.tree_map_only(torch.Tensor, _moved, (args, kwargs))
        return func(*args, **kwargs)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on JAX; a number of the host, which torch mixes with any device, stays."""
    return to_jax(tensor) if type(tensor) in PLAIN and tensor.ndim else tensor


@contextlib.contextmanager
def mixing() -> Iterator[None]:
    """Enable torchax for a `with` block, in which tensors of the host may be mixed with tensors on JAX."""
    with active(), MixedTensors():
        yield


@dataclass
class _Numbers:
    """How the numbers among a call's arguments are passed, by their positions.

    Attributes:
        last: the values of the last call.
        varying: positions whose values have changed, which are arguments of the program.
        branched: positions whose values a trace must know; each value has a program.
        checked: positions for which both ways have given the same result.
    """

    last: dict[int, float] = field(default_factory=dict)
    varying: frozenset[int] = frozenset()
    branched: frozenset[int] = frozenset()
    checked: frozenset[int] = frozenset()

    def next(self, numbers: dict[int, float]) -> "_Numbers":
        changed = {position for position, value in numbers.items() if self.last.get(position, value) != value}
        return replace(self, last=numbers, varying=(self.varying | changed) - self.branched)


_NUMBERS: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Numbers]] = weakref.WeakKeyDictionary()


def run_method(
    model: nn.Module,
    method: Method,
    *args: Any,
    place: Place | None = None,
    name: str = "model",
    **kwargs: Any,
) -> Any:
    """Call a method of a model whose weights are on JAX, as a compiled program if it can be traced.

    A number that changes between calls becomes an argument of the program, unless the method branches on it.
    A method that branches on the values of tensors, writes into its model, draws random numbers, or takes or
    returns other objects runs operation by operation, and a warning says why.

    Args:
        model: the model; a change of its modules, attributes or hooks selects another program.
        method: a function of the model and the other arguments.
        args, kwargs: arguments of the call; tensors are moved to the program's devices.
        place: the devices of the program; None for JAX's default device.
        name: the model's name for the warning.
    """
    if _INSIDE.get():
        return method(model, *args, **kwargs)
    place = place or Place()
    leaves, structure = pytree.tree_flatten((args, kwargs))
    leaves: list[Any] = [float(leaf) if type(leaf) is np.float64 else leaf for leaf in leaves]
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *VALUES))]
    with active():
        moved = [place.put(array_of(to_jax(leaf))) if _is_tensor(leaf) else leaf for leaf in leaves]
        reason = f"it takes a {others[0]}" if others else None
        result = None
        if reason is None:
            try:
                result = _run_compiled(model, method, moved, structure, place)
            except UntraceableError as error:
                reason = str(error)
        if reason is not None:
            warn_once(model, f"{name}: {type(model).__name__} runs operation by operation, since {reason}")
            result = _run_by_operation(model, method, (args, kwargs), moved)
        refuse = functools.partial(_without_gradient, model, leaves, f"on JAX the {name} has no gradients")
        return pytree.tree_map_only(torch.Tensor, refuse, result)


def method_program(
    model: nn.Module, method: Method, tensors: dict[str, Any], place: Place | None = None, **values: Any
) -> tuple[Program, dict[str, Any]]:
    """Return the program of a call that is only described, and the descriptions of its inputs by their names.

    Args:
        model: the model; its weights may be on torch's "meta" device.
        method: a function of the model and the call's arguments.
        tensors: the arguments that are tensors, by name: (shape, JAX dtype), or a tuple of such pairs.
        place: the devices of the program; None for JAX's default device.
        values: other arguments of the call, by name.
    """
    described, _ = jax.tree.flatten(tensors, is_leaf=describes_one_input)
    marks = jax.tree.map(lambda _: torch.empty(0), tensors, is_leaf=describes_one_input)
    leaves, structure = pytree.tree_flatten(((), {**marks, **values}))
    arguments = [position for position, leaf in enumerate(leaves) if _is_tensor(leaf)]
    form = _Form.of(method, structure, leaves, set(arguments))
    named = {str(position): each for position, each in zip(arguments, described, strict=True)}
    return Program(MethodCall(model, form), place), named


def _run_compiled(model: nn.Module, method: Method, leaves: list[Any], structure: Any, place: Place) -> Any:
    """Run a method as a program, or raise `UntraceableError`."""
    tensors = {position for position, leaf in enumerate(leaves) if not isinstance(leaf, VALUES)}
    numbers = {position: leaf for position, leaf in enumerate(leaves) if type(leaf) in (int, float)}
    known = _NUMBERS.setdefault(model, {})  # a state for each form of a call
    key = _Form.of(method, structure, leaves, tensors | numbers.keys())
    state = known[key] = known.get(key, _Numbers()).next(numbers)
    if len(known) > Programs.KINDS:
        known.pop(next(iter(known)), None)
    # Numbers that vary are arguments; if a trace must know one, the whole ones are constants first.
    whole = {position for position in state.varying if type(leaves[position]) is int}
    reason = UntraceableError("it cannot be traced")
    for arguments in dict.fromkeys((state.varying, state.varying - whole, frozenset())):
        form = _Form.of(method, structure, leaves, tensors | arguments)
        try:
            result = _run_form(model, form, leaves, place)
            if arguments - state.checked:  # a type test or a text of the number may have changed the result
                constant = _run_form(model, _Form.of(method, structure, leaves, tensors), leaves, place)
                if not _are_alike(result, constant):
                    raise UntraceableError("it tests the type of a number")
        except UntraceableError as error:
            reason = error
            continue
        except TRACING_ERRORS:
            if not arguments:
                raise
            continue  # the number may have to be Python's own
        branched = state.branched | (state.varying - arguments)
        known[key] = replace(state, varying=arguments, branched=branched, checked=arguments)
        return result.tree()
    raise reason


TRACING_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
"""Errors of a method that gets a tensor in the place of a number."""


def _run_form(model: nn.Module, form: _Form, leaves: list[Any], place: Place) -> _Result:
    """Run the program of a form, or raise `UntraceableError`."""
    network = MethodCall(model, form)
    try:
        program = programs_of(model).get(form, network, lambda each: Program(each, place))
    except ForeignForwardError as error:
        raise UntraceableError(str(error)) from error
    if program.untraceable is not None:
        raise UntraceableError(program.untraceable)
    try:
        inputs = {str(position): leaves[position] for position in form.arguments}
        return program.run(program.weights(network), inputs)[0]
    except (UntraceableError, RandomInTraceError, *untraceable_errors()) as error:
        program.untraceable = str(error).partition("\n")[0]
        raise UntraceableError(program.untraceable) from error


def _are_alike(result: _Result, other: _Result) -> bool:
    """Return whether two results are equal but for rounding."""
    if result.constants != other.constants:
        return False
    for one, two in zip(result.tensors, other.tensors, strict=True):
        a, b = (np.asarray(array).astype(np.float64) for array in (one, two))
        size = max(np.abs(b[np.isfinite(b)]).max(initial=0.0), 1e-30)
        rounding = 1e-4 if one.dtype == "float32" else 3e-2
        if a.shape != b.shape or not np.allclose(a / size, b / size, rtol=0, atol=rounding, equal_nan=True):
            return False
    return True


def _without_gradient(model: nn.Module, leaves: list[Any], why: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor through which a backward pass raises an error with the message `why`."""
    if not on_jax(tensor) or not tensor.is_floating_point() or not torch.is_grad_enabled():
        return tensor
    asks = (leaf for leaf in leaves if _is_tensor(leaf) and leaf.requires_grad)
    x = next(asks, tensor)
    x = x if on_jax(x) else to_jax(x).requires_grad_()
    return without_gradient(model, x, tensor.detach(), why)


def _run_by_operation(
    model: nn.Module, method: Method, given: tuple[tuple[Any, ...], dict[str, Any]], moved: list[Any]
) -> Any:
    """Run a method operation by operation, and copy what it wrote into its arguments to the caller's.

    Args:
        model, method: the model and its method.
        given: the caller's (args, kwargs).
        moved: the leaves of `given`, with arrays on the program's devices in the place of tensors.

    Raises:
        ValueError: the method changes a container, and has got a copy of the caller's with moved tensors.
    """
    leaves, structure = pytree.tree_flatten(given)
    is_tensor = list(map(_is_tensor, leaves))
    stays = all(on_jax(x) and array_of(x) is y for x, y, t in zip(leaves, moved, is_tensor, strict=True) if t)
    values: list[Any] = leaves
    if not stays:  # one tensor for each of the caller's, which may be there twice
        tensors = {id(x): tensor_of(y) for x, y, t in zip(leaves, moved, is_tensor, strict=True) if t}
        values = [tensors.get(id(leaf), leaf) for leaf in leaves]
    args, kwargs = given if stays else pytree.tree_unflatten(values, structure)
    with _inside_method():
        result = method(model, *args, **kwargs)
    if stays:
        return result
    if not _is_unchanged((args, kwargs), values, structure):
        raise ValueError(
            f"{type(model).__name__} changes a container among its arguments: pass tensors on JAX"
        )
    for leaf, value, array, t in zip(leaves, values, moved, is_tensor, strict=True):
        if t and array_of(value) is not array:
            leaf.copy_(value if on_jax(leaf) else to_torch(value))  # pyright: ignore
    return result


_WARNED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def warn_once(model: nn.Module, message: str) -> None:
    """Log a warning about a model, unless it was logged before."""
    if message not in _WARNED.setdefault(model, set()):
        _WARNED[model].add(message)
        logger.warning(message)
