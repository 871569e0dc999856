"""What several commands share for a mesh: its options, and the processes that run a command together."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import backend
from cogvideox_torchax.cli.common import positive
from cogvideox_torchax.files import video

if TYPE_CHECKING:
    import torch
    from jax.sharding import Mesh

    from cogvideox_torchax.dataset.manifest import ProcessShard

Fetch = Callable[["torch.Tensor"], "torch.Tensor"]


def add_options(command: argparse.ArgumentParser) -> None:
    group = add_mesh_options(command)
    group.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of several processes, each started with the same command line; TPU pods, Slurm, "
        "Open MPI and Kubernetes say which, elsewhere the next three do",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process")
    group.add_argument("--processes", type=positive, metavar="COUNT", help="how many there are")
    group.add_argument("--process", type=int, metavar="INDEX", help="which this one is, from 0 on")
    group.add_argument(
        "--patience",
        type=positive,
        metavar="SECONDS",
        help="after which a process that does not come, or goes silent, ends all (default: 60)",
    )


def add_mesh_options(command: argparse.ArgumentParser) -> Any:
    """The options of `mesh_of`, in a group that others may join."""
    group = command.add_argument_group("several devices")
    group.add_argument("--dp", type=positive, help="mesh: devices that a batch is split over (default: 1)")
    group.add_argument(
        "--tp",
        type=positive,
        help="mesh: devices that a width is split over (default: all that --dp leaves, where it or "
        "--distributed is given)",
    )
    alone = {"distributed": False, "coordinator": None, "processes": None, "process": None, "patience": None}
    command.set_defaults(**alone)
    return group


def mesh_of(args: argparse.Namespace) -> "Mesh | None":
    """The mesh of one process's devices; None where none is asked for.

    Raises:
        ValueError: a backend that runs on one device, or a mesh that does not fit.
    """
    given = [name for name in ("dp", "tp") if getattr(args, name)]
    if not given:
        return None
    _check_backend(args, given[0])
    from cogvideox_torchax import sharding

    return sharding.make_mesh(args.dp or 1, args.tp)


@dataclass(frozen=True)
class Team:
    """The processes that run a command together; mostly one.

    Attributes:
        mesh: of their devices; None for one device.
        is_first: whether this one writes what is written once, and talks.
        everywhere, at_first: bring a computed chunk to the host, in every process or in the first alone;
            the others then get no frames.
    """

    mesh: "Mesh | None" = None
    is_first: bool = True
    everywhere: Fetch = runtime.to_torch
    at_first: Fetch = runtime.to_torch

    def columns(self, shape: tuple[int, ...]) -> slice:
        """The columns of an input that lie on this process's devices."""
        if self.mesh is None:
            return slice(None)
        from cogvideox_torchax.sharding import Placement

        return Placement(self.mesh).own_columns(shape)

    @contextlib.contextmanager
    def writing(
        self, path: str, fps: Fraction | float, alongside: video.Alongside | None = None
    ) -> Iterator[video.Sink]:
        """A sink that writes in the first process alone."""
        if self.is_first:
            with video.writing(path, fps, alongside) as sink:
                yield sink
        else:
            yield _Nowhere()


class _Nowhere:
    def write(self, frames: "torch.Tensor") -> None:
        """Nothing: the first process writes."""


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[Team]:
    """The team of a command, for as long as it works.

    Raises:
        ValueError: options that contradict each other, a mesh that does not fit, processes that cannot meet.
    """
    check(args)
    if not args.distributed:
        yield Team(mesh_of(args))
        return
    from cogvideox_torchax import sharding

    patience = args.patience or sharding.PATIENCE
    with talking_on_stderr():
        sharding.connect(args.coordinator, args.processes, args.process, patience=patience)
        mesh = sharding.make_mesh(args.dp or 1, args.tp)
        sharding.check_all_take_part(mesh)
        with sharding.exchanging(args.output) as exchange:
            yield Team(mesh, sharding.is_first(), exchange.everywhere, exchange.at_first)


@contextlib.contextmanager
def sharing(args: argparse.Namespace) -> Iterator["ProcessShard"]:
    """Give a process's share of many clips. With an index and a count processes need not meet."""
    from cogvideox_torchax.dataset.manifest import ProcessShard

    if not args.distributed:
        yield ProcessShard()
        return
    if args.processes is not None and args.process is not None and args.coordinator is None:
        if not 0 <= args.process < args.processes:
            raise ValueError(f"got --process {args.process} of --processes {args.processes}: count from 0 on")
        yield ProcessShard(args.process, args.processes)
        return
    import jax

    from cogvideox_torchax import sharding

    with talking_on_stderr():
        sharding.connect(
            args.coordinator, args.processes, args.process, patience=args.patience or sharding.PATIENCE
        )
        yield ProcessShard(jax.process_index(), jax.process_count())
        sharding.wait_for_all()


@contextlib.contextmanager
def talking_on_stderr() -> Iterator[None]:
    """Keeps off stdout what gloo, which connects CPUs, prints there of its connections."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for options that cannot go together."""
    check_alone(args)
    if args.distributed:
        _check_backend(args, "distributed")


def check_alone(args: argparse.Namespace) -> None:
    """As `check`, for processes that have a mesh each and no common one: those run on any backend."""
    for name in ("dp", "tp"):
        if getattr(args, name):
            _check_backend(args, name)
    for name in ("coordinator", "processes", "process", "patience"):
        value = getattr(args, name)
        if value is not None and not args.distributed:
            raise ValueError(f"got --{name} {value} for a single process: add --distributed")


def _check_backend(args: argparse.Namespace, given: str) -> None:
    if not backend(args.backend).runs_on_mesh:
        raise ValueError(f"--backend {args.backend} runs on one device: leave out --{given}, or take torchax")
