"""`jax.jit` for a public function, whose signature type checkers go on seeing."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def jitted(*static_argnames: str) -> Callable[[Function], Function]:
    """Compile a function once for each value of these arguments; what `jax.jit` returns has no signature."""

    def decorate(function: Function) -> Function:
        return cast(Function, jax.jit(function, static_argnames=static_argnames))

    return decorate
