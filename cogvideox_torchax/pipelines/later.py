"""Arithmetic on a network's prediction that waits, to be computed in one program with the scheduler's step.

Between the two a pipeline does classifier-free guidance, an operation after the other. What it does is
written down here, and whoever asks for anything else than these operations gets the tensor. Nor is anything
asked twice, in a run that nobody can step into, of which the answer cannot have changed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from cogvideox_torchax.runtime import array_of, tensor_of

T = TypeVar("T")


class _Run(NamedTuple):
    """A pipeline's call: whether somebody sees what its steps leave, and what was asked once for all."""

    looked_at: bool
    answers: dict[int, tuple[Any, Any]]


_RUN: ContextVar[_Run | None] = ContextVar("the pipeline's call that this is in", default=None)


@contextlib.contextmanager
def waiting(*, looked_at: bool) -> Iterator[None]:
    """While it is open, in this thread, predictions wait for a scheduler's step.

    Args:
        looked_at: whether a callback sees what a step leaves, and may keep it.
    """
    token = _RUN.set(_Run(looked_at, {}))
    try:
        yield
    finally:
        _RUN.reset(token)


def prediction(sample: torch.Tensor) -> Any:
    """What a pipeline gets of a network: the tensor, or one that waits."""
    return Later("tensor", sample) if _RUN.get() else sample


def nobody_looks() -> bool:
    """Whether what a step leaves is the next one's alone, to be used up."""
    run = _RUN.get()
    return run is not None and not run.looked_at


def once_a_run(owner: Any, ask: Callable[[], T]) -> T:
    """What `ask` gives, the same throughout a pipeline's call in which nobody can change the owner."""
    run = _RUN.get()
    if run is None or run.looked_at:
        return ask()
    if id(owner) not in run.answers:
        run.answers[id(owner)] = owner, ask()
    return run.answers[id(owner)][1]


class Later:
    """A tensor that has not been computed. It behaves as one: what is not written down is asked of its value.

    Args:
        operation: of `OPERATIONS`.
        parts: each a `Later`, a tensor on JAX or a number.
    """

    def __init__(self, operation: str, *parts: Any):
        self.operation, self.parts = operation, parts

    def float(self) -> "Later":
        return Later("float", self)

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        if (chunks, dim) != (2, 0):
            return self.value.chunk(chunks, dim)
        return Later("first half", self), Later("second half", self)

    def __sub__(self, other: Any) -> "Later":
        return Later("difference", self, other)

    def __add__(self, other: Any) -> "Later":
        return Later("sum", self, other)

    def __rmul__(self, other: Any) -> "Later":
        return Later("product", other, self)

    @functools.cached_property
    def value(self) -> torch.Tensor:
        """The tensor."""
        leaves: list[Any] = []
        return tensor_of(_alone()(written(self, leaves), leaves))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import jax

        def known(part: Any) -> Any:
            return part.value if isinstance(part, Later) else part

        args, kwargs = jax.tree.map(known, (args, kwargs or {}))
        return function(*args, **kwargs)


def _of_value(name: str) -> Any:
    def method(later: Later, *args: Any) -> Any:
        return getattr(later.value, name)(*(arg.value if isinstance(arg, Later) else arg for arg in args))

    return method


# Python asks a type for these, and not `__getattr__`.
for _name in ("getitem", "setitem", "len", "neg", "abs", "mul", "truediv", "rtruediv", "pow", "radd", "rsub"):
    setattr(Later, f"__{_name}__", _of_value(f"__{_name}__"))

OPERATIONS = {
    "tensor": lambda x: x,
    "float": lambda x: x.astype("float32"),
    "first half": lambda x: x[: -(-x.shape[0] // 2)],
    "second half": lambda x: x[-(-x.shape[0] // 2) :],
    "difference": lambda x, y: x - y,
    "sum": lambda x, y: x + y,
    "product": lambda x, y: x * y,
}
"""On arrays."""

Written = int | tuple[Any, ...]
"""An expression without its tensors and numbers: the place of one among them, or an operation and parts."""


def written(value: Any, leaves: list[Any]) -> Written:
    """An expression, whose arrays and numbers are put into `leaves`, each once."""
    if isinstance(value, Later) and "value" in vars(value):  # somebody has seen it, and may have changed it
        value = value.value
    if isinstance(value, Later):
        return (value.operation, *(written(part, leaves) for part in value.parts))
    leaf = array_of(value) if isinstance(value, torch.Tensor) else value
    for place, known in enumerate(leaves):
        if known is leaf:
            return place
    leaves.append(leaf)
    return len(leaves) - 1


def computed(expression: Written, leaves: list[Any]) -> Any:
    """The array that an expression of these arrays and numbers gives; inside of a program."""
    if isinstance(expression, int):
        return leaves[expression]
    operation, *parts = expression
    return OPERATIONS[operation](*(computed(part, leaves) for part in parts))


@functools.cache
def _alone() -> Any:
    import jax

    return jax.jit(computed, static_argnums=0)
