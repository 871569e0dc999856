"""`jax.jit` for a public function, whose signature type checkers go on seeing."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def jitted(*static_argnames: str) -> Callable[[Function], Function]:
    """Return a decorator that applies `jax.jit` with these static arguments and keeps the typed signature."""

    def decorate(function: Function) -> Function:
        """Compile `function`; the cast tells type checkers its signature, which `jax.jit`'s result hides."""
        return cast(Function, jax.jit(function, static_argnames=static_argnames))

    return decorate
