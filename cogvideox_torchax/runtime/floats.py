"""Floats as arguments of a program: a traced method may compute with one, but not read its value."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cogvideox_torchax.runtime.bridge import array_of, tensor_of


class FloatReadError(ValueError):
    """A method reads the value or the type of a float, which a trace does not know."""


def _reading(name: str) -> Callable[..., Any]:
    """Return a method of `TracedFloat` that notes that the value is read, and raises an error."""

    def call(self: "TracedFloat", *_: Any) -> Any:
        self._reads.append(name)
        raise FloatReadError(f"it reads the value of a float ({name})")

    return call


class TracedFloat:
    """A float whose value is not known while a program is traced.

    Sums and products with numbers give another one, and a function of torch takes it as a tensor. Whatever
    needs its value (a comparison, a branch, a look-up, a format, a quotient, which may be by zero) and
    `isinstance` raise `FloatReadError`, and are noted in `reads`, as the method may catch the error. Only
    `type` cannot be noticed.

    Args:
        array: a JAX array without axes.
        reads: gets the name of each method that has read the value.
    """

    def __init__(self, array: Any, reads: list[str]):
        self._array, self._reads = array, reads

    # `isinstance` reads it of an object whose type is another one.
    __class__ = property(_reading("isinstance"))  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with tensors; by this method torch takes objects of this class."""
        args, kwargs = pytree.tree_map(_as_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        self._reads.append(name)
        raise AttributeError(name)


def _as_tensor(leaf: Any) -> Any:
    return tensor_of(leaf._array) if type(leaf) is TracedFloat else leaf


class _FloatsAsTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TracedFloat.__torch_function__(func, types, args, kwargs)


def _is_moderate(number: float) -> bool:
    return number == 0 or 1e-18 < abs(number) < 1e18  # so that products stay in float32's range


def _arithmetic(operate: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """Return a method of `TracedFloat` for an operator of numbers."""

    def call(self: TracedFloat, *others: Any) -> Any:
        if any(type(other) not in (int, float, TracedFloat) for other in others):
            return NotImplemented  # a tensor's own operator then runs, or there is no such operation
        if any(type(other) is not TracedFloat and not _is_moderate(other) for other in others):
            return self.__float__()  # a read, as a program has float32
        numbers = [self._array, *(other._array if type(other) is TracedFloat else other for other in others)]
        return TracedFloat(operate(*(reversed(numbers) if reflected else numbers)), self._reads)

    return call


for _name in ("add", "sub", "mul"):
    setattr(TracedFloat, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(TracedFloat, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
TracedFloat.__neg__ = _arithmetic(operator.neg)  # pyright: ignore[reportAttributeAccessIssue]
for _name in (
    *("truediv", "rtruediv", "pow", "rpow", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod"),
    *("abs", "pos", "bool", "float", "int", "index", "complex", "round", "trunc", "floor", "ceil"),
    *("hash", "eq", "ne", "lt", "le", "gt", "ge"),  # look-ups and comparisons
    *("str", "repr", "format", "reduce_ex"),  # formats and copies
):
    setattr(TracedFloat, f"__{_name}__", _reading(_name))


@contextlib.contextmanager
def traced_floats(leaves: list[Any], positions: tuple[int, ...]) -> Iterator[list[Any]]:
    """Return leaves of a call's arguments with a `TracedFloat` in the place of each tensor at `positions`.

    Raises:
        FloatReadError: when the `with` block ends, if it has read the value of one of them.
    """
    reads: list[str] = []
    made = {i: TracedFloat(array_of(leaves[i]), reads) for i in positions}
    try:
        with _FloatsAsTensors() if positions else contextlib.nullcontext():
            yield [made.get(i, leaf) for i, leaf in enumerate(leaves)]
    except Exception as error:
        if not reads:
            raise
        raise FloatReadError(f"it reads the value of a float ({reads[0]})") from error
    if reads:
        raise FloatReadError(f"it reads the value of a float ({reads[0]})")
