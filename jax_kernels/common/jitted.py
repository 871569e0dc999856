"""`jax.jit` for a public function, whose signature type checkers go on seeing."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def jitted(*static_argnames: str) -> Callable[[Function], Function]:
    """Return a decorator: `jax.jit` with these static arguments, which keeps the function's signature."""

    def decorate(function: Function) -> Function:
        """Compile `function`, typed as itself: type checkers see no signature of `jax.jit`'s result."""
        return cast(Function, jax.jit(function, static_argnames=static_argnames))

    return decorate
