"""The list of backends. A new backend is an entry here, and a file that defines its `Backend`."""

import importlib
from dataclasses import dataclass
from enum import Enum

from cogvideox_torchax.backends.base import Backend

__all__ = ["Backend", "BackendError", "Use", "backend", "names"]


class BackendError(ValueError):
    """An error for a backend that is unknown or not installed; the message says what to do."""


class Use(Enum):
    """A use of a backend: to run a VAE, to be compared by `verify`, or to be planned by `plan`."""

    RUN = "run"
    VERIFY = "verify"
    PLAN = "plan"


@dataclass(frozen=True)
class _Entry:
    """A backend, whose class is imported when somebody asks for it.

    Attributes:
        module: the module of this package that has the class.
        attribute: the name of the class.
        uses: what the backend may be used for.
        extra: the extra of `cogvideox-torchax` that the backend needs; None if it needs none.
    """

    module: str
    attribute: str
    uses: frozenset[Use]
    extra: str | None = None


_REGISTRY = {
    "torch": _Entry("native", "Torch", frozenset({Use.RUN, Use.VERIFY})),
    "torchax-stock": _Entry("torchax", "TorchaxStock", frozenset({Use.PLAN})),
    "torchax": _Entry("torchax", "Torchax", frozenset(Use)),
    "flax": _Entry("flax", "Flax", frozenset(Use), extra="flax"),
}


def names(use: Use) -> tuple[str, ...]:
    """Return the names of the backends that may be used for this."""
    return tuple(name for name, entry in _REGISTRY.items() if use in entry.uses)


def backend(name: str) -> type[Backend]:
    """Return a backend's class by its name.

    Raises:
        BackendError: there is no such backend, or its packages are not installed.
    """
    if name not in _REGISTRY:
        raise BackendError(f"unknown backend {name!r}: one of {', '.join(_REGISTRY)}")
    entry = _REGISTRY[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{entry.module}"), entry.attribute)
    except ImportError as error:
        install = f"pip install 'cogvideox-torchax[{entry.extra}]'" if entry.extra else "install it again"
        raise BackendError(
            f"the {name} backend is not installed ({error}): {install}, or leave {name} out"
        ) from error
