"""Commands as tables of options, and the options that several commands take; they need no torch."""

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from cogvideox_torchax import backends
from cogvideox_torchax.files import kinds
from cogvideox_torchax.vae.sizes import parse_size

USER_ERROR = 2
"""The exit code for wrong input."""

SPATIAL_SCALE = 8
"""Pixels to a latent pixel along a side, in every published CogVideoX: known before a model is loaded."""
DTYPES = ("float32", "bfloat16", "float16")
REPORT = "report"
"""The title of the group of options that help lists last."""
ABSENT: dict[str, Any] = {
    **{"quiet": False, "profile": None, "distributed": False, "backend": "torchax"},
    **dict.fromkeys(("coordinator", "processes", "process", "timeout", "heads"), None),
}
"""Values of the options that shared code reads, for commands that do not take those options."""


class Option:
    """An option or a positional argument: flags and settings as for argparse's `add_argument`.

    `group` is the title under which help lists it; None for argparse's own titles.
    """

    def __init__(self, *flags: str, group: str | None = None, **settings: Any):
        self.flags, self.group, self.settings = flags, group, settings


TRACEBACK = Option(
    "--traceback", group=REPORT, action="store_true", help="show where in the code an error came from"
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without argparse's usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}\n")


@dataclass(frozen=True)
class Command:
    """A subcommand, named after its module.

    Attributes:
        summary: one line for its help.
        example: what follows the command's name in the example of its help.
        options: its options, in help's order within a group.
        check: raises `ValueError` for options that are wrong; it needs no torch.
    """

    summary: str
    example: str
    options: tuple[Option, ...]
    check: Callable[[argparse.Namespace], None] = lambda args: None

    def add_to(self, subparsers: Any, name: str) -> argparse.ArgumentParser:
        """Add the command's parser to argparse's `subparsers`, and return it."""
        parser = subparsers.add_parser(
            name,
            help=self.summary,
            description=self.summary[0].upper() + self.summary[1:] + ".",
            epilog=f"example: cogvideox-torchax {name} {self.example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a prefix that means one option today may mean two tomorrow
        )
        parser.set_defaults(**ABSENT)  # for code that reads options which this command does not take
        groups: dict[str | None, Any] = {None: parser}  # by title; each has argparse's `add_argument`
        # Help lists groups in the order in which they are made. The options of REPORT are sorted last.
        for each in sorted((*self.options, TRACEBACK), key=lambda option: option.group == REPORT):
            if each.group not in groups:
                groups[each.group] = parser.add_argument_group(each.group)
            groups[each.group].add_argument(*each.flags, **each.settings)
        return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def seed(text: str) -> int:
    """Return the whole number that a text names; PyTorch's and NumPy's generators take 64 bits."""
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"got {text}: give a whole number from 0 to {2**64 - 1}")
    return int(text)


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function for argparse's `type` that returns `read(text)`.

    argparse prints the message of an `ArgumentTypeError`, but not that of a `ValueError`.
    """

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_argument


frame_rate = argument(kinds.frame_rate)


def share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"got {text}: give more than 0, and at most 1")
    return value


def number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"got {text}: give a number such as 6")
    return value


def size(what: str, **form: Any) -> Callable[[str], Any]:
    """Return a function for argparse's `type` that reads a size by `parse_size`."""
    return argument(functools.partial(parse_size, what=what, **form))


def sizes(text: str) -> list[tuple[int, ...]]:
    return [size("a size", frames=True)(each) for each in text.split(",")]


def tiles(text: str) -> str:
    """Return the text of a tile's size, or "auto"; the model's own scale is not known yet."""
    if text != "auto":
        size("tiles")(text)
    return text


def model_options(default: str = "the small bundled model") -> tuple[Option, ...]:
    """Return the options of a command that runs a model; `default` is help's name of the default model."""
    model = f"a CogVideoX VAE or a whole pipeline, as a directory or a hub id (default: {default})"
    return (
        Option("--model", group="model", metavar="DIR_OR_ID", help=model),
        Option(
            "--backend", group="model", choices=backends.NAMES, default="torchax", help="default: torchax"
        ),
        Option(
            *("--dtype",),
            group="model",
            choices=DTYPES,
            default="float32",
            help="of the weights (default: float32)",
        ),
        JSON,
        QUIET,
    )


def clip_options(frames: int | None = None) -> tuple[Option, ...]:
    """Return the options that choose a part of a clip; `frames` is help's default, None for all frames."""
    default = "" if frames is None else f" (default: {frames}, or all of a shorter clip)"
    resize_help = "resize to this {} in pixels; the {} follows if it is not given"
    return (
        Option(
            *("--frames", "--num-frames"),
            group="part of the clip",
            type=positive,
            help=f"read only the first so many frames{default}",
        ),
        Option(
            "--height", group="part of the clip", type=positive, help=resize_help.format("height", "width")
        ),
        Option(
            "--width", group="part of the clip", type=positive, help=resize_help.format("width", "height")
        ),
        Option(
            "--crop",
            group="part of the clip",
            action="store_true",
            help="crop the middle to the size instead of resizing",
        ),
    )


def output(help: str, metavar: str = "FILE", **settings: Any) -> Option:
    return Option("-o", "--output", metavar=metavar, help=help, **settings)


JSON = Option("--json", group=REPORT, action="store_true", help="print the report as JSON")
QUIET = Option("--quiet", group=REPORT, action="store_true", help="no progress bars")
VIDEO_OUTPUT = output("an .mp4 or .gif file, or a directory for PNG frames", required=True)
TAKEN_FPS = Option(
    "--fps",
    group="part of the clip",
    type=frame_rate,
    help="frames a second to take, by the frames' times (default: every frame)",
)
FPS = Option("--fps", type=frame_rate, help="frames a second (default: the source's)")
SEED = Option("--seed", type=seed, help="sample the posterior with this seed instead of its mode")
TILING = Option(
    "--tiling",
    nargs="?",
    const="auto",
    type=tiles,
    metavar="HEIGHTxWIDTH",
    help="work in tiles of this size in pixels; auto, or no size: in tiles where it does not fit into memory",
)
PROFILE = Option(
    "--profile",
    group=REPORT,
    metavar="DIR",
    help="write JAX's profile of the run there, for TensorBoard and Perfetto; of one process",
)
_devices = functools.partial(Option, group="several devices")
MESH = (
    _devices("--dp", type=positive, help="mesh: devices that a batch is split over (default: 1)"),
    _devices(
        "--tp",
        type=positive,
        help="mesh: devices that a width is split over (default: 1; with --dp, all that it leaves)",
    ),
)
CONNECTION = (
    _devices("--coordinator", metavar="HOST:PORT", help="of the first process"),
    _devices("--processes", type=positive, metavar="COUNT", help="how many there are"),
    _devices("--process", type=int, metavar="INDEX", help="which this one is, from 0 on"),
    _devices(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="after which a process that does not come, or goes silent, ends all (default: 60)",
    ),
)
PROCESSES = (
    *MESH,
    _devices(
        "--distributed",
        action="store_true",
        help="run as one of several processes, each started with the same command line; TPU pods, Slurm, "
        "Open MPI and Kubernetes say which, elsewhere the next three do; --tp is then all that --dp leaves",
    ),
    *CONNECTION,
)
RAY = (
    _devices(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="deal out the work on the Ray cluster at this address, auto say; without one, at RAY_ADDRESS or "
        "on this machine (needs the extra ray)",
    ),
    _devices(
        "--actors",
        type=positive,
        metavar="COUNT",
        help="models on Ray, of --dp times --tp chips each (default: as many as there are chips for, on "
        "CPUs 1)",
    ),
)
_many = functools.partial(Option, group="many clips")
DECODE_MANY = (_many("--workers", type=positive, help="clips that are read at a time (default: 2)"),)
ENCODE_MANY = (
    _many(
        *("--keep",),
        choices=("posterior", "mean", "sample", "both"),
        help="mean and log-variance (default), the mean, a sample, or all three",
    ),
    _many(
        "--buckets",
        type=sizes,
        metavar="SIZES",
        help="bring each clip to the nearest of these sizes, such as 49x480x720,49x720x480: frames, height, "
        "width; without, clips keep their own",
    ),
    _many(
        "--windows",
        action="store_true",
        help="encode as many windows of a clip, of --frames or the bucket's length, as it has frames for, "
        "each to latents of its own (default: the first)",
    ),
    _many(
        "--min-size",
        type=positive,
        metavar="PIXELS",
        help="leave out clips whose shorter side has fewer pixels (default: enlarge them)",
    ),
    *RAY,
    *DECODE_MANY,
)
