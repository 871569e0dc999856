"""JAX's checks that users turn on for their own code; they are off while the package's code runs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CHECKS = (
    "jax_numpy_rank_promotion",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_host",
    "jax_transfer_guard_device_to_device",
)
"""The settings of JAX that turn these checks on."""


@contextlib.contextmanager
def jax_checks_off() -> Iterator[None]:
    """Run a block without JAX's checks of rank promotion and of transfers.

    `jax_numpy_rank_promotion="raise"` refuses the broadcasting that is usual in PyTorch, and
    `jax_transfer_guard="disallow"` each Python number and array of the host that reaches a device.
    """
    import jax

    with jax.numpy_rank_promotion("allow"), jax.transfer_guard("allow"):
        yield


def without_jax_checks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs with `jax_checks_off`, which costs little if the checks are off."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        import jax

        # A setting is "allow" or None if its check is off: None is JAX's default for transfers.
        is_checked = any(getattr(jax.config, name) not in ("allow", None) for name in CHECKS)
        with jax_checks_off() if is_checked else contextlib.nullcontext():
            return function(*args, **kwargs)

    return call
