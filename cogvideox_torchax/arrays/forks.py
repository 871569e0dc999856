"""Forked children of a process that uses JAX: they compute in PyTorch, and a use of JAX is an error.

JAX computes on threads, and a fork copies none of them: a child would wait for its first result for ever.
"""

from cogvideox_torchax import upstream

_forked = False  # whether this process was forked from one that had started JAX


class ForkError(RuntimeError):
    """A use of JAX in a process that was forked from one that uses JAX."""


def leave_jax() -> None:
    """Have `check_not_forked` raise in this forked child, if its parent had started JAX.

    Python calls this in each child that is forked (`os.register_at_fork` in the package's `__init__`).
    """
    global _forked
    _forked = upstream.jax_has_started()


def check_not_forked() -> None:
    """Raise `ForkError` in a forked child of a process that uses JAX."""
    if _forked:
        raise ForkError(
            "JAX does not work in a process that was forked from one that uses it: in a worker (of a "
            "DataLoader, a pool or `datasets.map`) use tensors on the host alone, moved there by "
            '`.to("cpu")` before; or start workers by "spawn", for a DataLoader with '
            'multiprocessing_context="spawn"'
        )
