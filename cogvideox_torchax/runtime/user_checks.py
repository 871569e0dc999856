"""JAX's checks that a user turns on for code of their own, off while the package's code runs."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Run a block, or a decorated function, without the two checks.

    `jax_numpy_rank_promotion="raise"` refuses the broadcasting that is usual in PyTorch, and
    `jax_transfer_guard="disallow"` each Python number and array of the host that reaches a device.
    """
    import jax

    with jax.numpy_rank_promotion("allow"), jax.transfer_guard("allow"):
        yield
