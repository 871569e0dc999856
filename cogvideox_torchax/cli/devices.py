"""The mesh that a command runs on, and the processes that run the command together."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cogvideox_torchax.dataset import directory
from cogvideox_torchax.dataset.clip import local_mesh
from cogvideox_torchax.files import video

_OWN = {"coordinator", "processes", "process", "timeout", "quiet", "json", "traceback"}
"""Options that may differ among the processes of a command."""


def choose_mesh(args: argparse.Namespace, *, guided: bool, heads: int) -> None:
    """Set `--dp` and `--tp` of a pipeline where they are not given: to 1, but without guidance.

    Then "dp" would have nothing to split, and all devices that divide the transformer's `heads` are "tp". Of
    several processes that make one video together, all devices are "tp" in any case.
    """
    share_a_pass = not (args.dp or guided or args.distributed) and args.ray is None
    of_all_processes = args.distributed and not args.prompts
    args.dp, args.tp = args.dp or 1, args.tp or (None if share_a_pass or of_all_processes else 1)
    args.heads = heads


def mesh_of(args: argparse.Namespace) -> Any:
    """Return the mesh that `--dp` and `--tp` ask for, or None for one device; `ValueError` if none fits."""
    return local_mesh(args.dp, args.tp, args.heads)


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that run a command together; usually a single one.

    Attributes:
        mesh: the mesh of their devices; None for one device.
        is_first: whether this process writes outputs and messages.
    """

    mesh: Any = None
    is_first: bool = True

    def writing(self, path: str, fps: Fraction | float) -> contextlib.AbstractContextManager[video.Write]:
        """Return what `video.writing` does in the first process; in others frames are dropped."""
        return video.writing(path, fps) if self.is_first else contextlib.nullcontext(lambda x: x.shape[2])


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[ProcessGroup]:
    """Connect the processes of a command for a `with` block; yield their group.

    `ValueError` if a mesh does not fit, or processes cannot connect.
    """
    if args.distributed:
        with _connected(args) as sharding:
            mesh = sharding.make_mesh(args.dp or 1, args.tp)
            sharding.check_all_take_part(mesh)  # raises if a process has no device in the mesh
            options = {f"--{name}": repr(value) for name, value in vars(args).items() if name not in _OWN}
            sharding.check_same(mesh, options)
            yield ProcessGroup(mesh, sharding.is_first())
    else:
        yield ProcessGroup(mesh_of(args))


@contextlib.contextmanager
def share_of_this_process(args: argparse.Namespace) -> Iterator[slice]:
    """Yield this process's share of many clips, which the processes of a command divide.

    With `--process` and `--processes` but no `--coordinator` the processes work without a connection.
    `ValueError` if there is no such `--process`, or processes cannot connect.
    """
    if not args.distributed:
        yield directory.ALL
    elif args.processes is not None and args.process is not None and args.coordinator is None:
        yield slice(args.process, None, args.processes)
    else:
        import jax

        with _connected(args):
            yield slice(jax.process_index(), None, jax.process_count())


@contextlib.contextmanager
def _connected(args: argparse.Namespace) -> Iterator[Any]:
    """Connect this process to the command's other processes; yield the package `sharding`."""
    from cogvideox_torchax import sharding

    sys.stdout.flush()
    # Until the block ends, stdout goes to stderr, because gloo, which connects CPUs, prints there.
    # By file descriptors (1 is stdout, 2 is stderr), as gloo is C++ and does not print into `sys.stdout`.
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        sharding.connect(
            args.coordinator, args.processes, args.process, timeout=args.timeout or sharding.TIMEOUT
        )
        yield sharding
        sharding.wait_for_all()  # the first process serves the connection of all, and must end last
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
