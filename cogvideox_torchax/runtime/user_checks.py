"""JAX's checks that users turn on for their own code; they are off while the package's code runs."""

import contextlib
from collections.abc import Iterator

CHECKS = (
    "jax_numpy_rank_promotion",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_host",
    "jax_transfer_guard_device_to_device",
)
"""The settings of JAX that turn these checks on."""


@contextlib.contextmanager
def jax_checks_off() -> Iterator[None]:
    """Run a block without JAX's checks of rank promotion and of transfers; if they are off it costs little.

    `jax_numpy_rank_promotion="raise"` refuses the broadcasting that is usual in PyTorch, and
    `jax_transfer_guard="disallow"` each Python number and array of the host that reaches a device.
    """
    import jax

    # A setting is "allow" or None if its check is off: None is JAX's default for transfers.
    if all(getattr(jax.config, name) in ("allow", None) for name in CHECKS):
        yield
        return
    with jax.numpy_rank_promotion("allow"), jax.transfer_guard("allow"):
        yield


without_jax_checks = jax_checks_off()
"""A decorator of functions that run without these checks."""
