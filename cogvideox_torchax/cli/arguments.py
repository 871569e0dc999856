"""Arguments that several commands take."""

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from cogvideox_torchax import backends
from cogvideox_torchax.files import video

DTYPES = ("float32", "bfloat16", "float16")

Value = TypeVar("Value")


def add_command(subparsers: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A subparser whose help ends with an example."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model_options(
    command: argparse.ArgumentParser, default: str = "the small bundled model, as a line says"
) -> None:
    command.add_argument(
        "--model",
        metavar="DIR_OR_ID",
        help=f"a CogVideoX VAE or a whole pipeline, as a directory or a hub id (default: {default})",
    )
    command.add_argument(
        "--backend", choices=backends.names(backends.Use.RUN), default="torchax", help="default: torchax"
    )
    command.add_argument(
        "--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: float32)"
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--quiet", action="store_true", help="no progress bars")


def add_clip_options(command: argparse.ArgumentParser, frames: int | None = None) -> None:
    """Which part of a clip to take; `frames` is what a command without `--frames` takes at most."""
    shown = "" if frames is None else f" (default: {frames}, or all of a shorter clip)"
    command.add_argument("--frames", type=positive, help=f"read only the first so many frames{shown}")
    command.add_argument(
        "--height",
        type=positive,
        help="resize to this height in pixels; the width follows if it is not given",
    )
    command.add_argument(
        "--width", type=positive, help="resize to this width in pixels; the height follows if it is not given"
    )
    command.add_argument(
        "--crop", action="store_true", help="crop the middle to the size instead of resizing"
    )


def add_seed_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--seed", type=int, default=None, help="sample the posterior with this seed instead of its mode"
    )


def add_tiling_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tiling",
        nargs="?",
        const="auto",
        metavar="HEIGHTxWIDTH",
        help="work in tiles of this size in pixels; auto, or no size: in tiles where it does not fit "
        "into memory",
    )


def add_profile_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile", metavar="DIR", help="write JAX's profile of the run there, for TensorBoard and Perfetto"
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def argument(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a reader for argparse, which shows the message of a `ValueError` of `read`."""

    def value(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


frame_rate = argument(video.frame_rate)


def add_process_options(command: argparse.ArgumentParser) -> None:
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
    """The options of `devices.mesh_of`, in a group that others may join."""
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
