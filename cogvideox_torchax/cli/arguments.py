"""Commands as declared tables of options."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cogvideox_torchax.files import video

Value = TypeVar("Value")


class Option:
    """An option or a positional argument of a command, declared as for argparse's `add_argument`.

    Args:
        flags: its names, such as "-o" and "--output"; a positional argument has one, without dashes.
        group: the title under which help lists it; None for help's usual titles. A command takes exactly
            one of its options in the group `EXCLUSIVE`.
        settings: keyword arguments of `add_argument`.
    """

    def __init__(self, *flags: str, group: str | None = None, **settings: Any):
        self.flags, self.group, self.settings = flags, group, settings


REPORT = "report"
"""The group that help lists last."""

TRACEBACK = Option(
    "--traceback", group=REPORT, action="store_true", help="show where in the code an error came from"
)
EXCLUSIVE = "exclusive"
"""The group of options of which a command takes exactly one."""
ABSENT: dict[str, Any] = {
    **{"quiet": False, "profile": None, "distributed": False, "backend": "torchax"},
    **dict.fromkeys(("coordinator", "processes", "process", "timeout"), None),
}
"""Values of the options that shared code reads, for commands that do not take those options."""


@dataclass(frozen=True)
class Command:
    """A subcommand, named after its module: its summary and an example for its help, and its options."""

    summary: str
    example: str
    options: tuple[Option, ...]

    def add_to(self, subparsers: Any, name: str) -> argparse.ArgumentParser:
        """Add this command's parser to argparse's subparsers; return it."""
        parser = subparsers.add_parser(
            name,
            help=self.summary,
            description=self.summary[0].upper() + self.summary[1:] + ".",
            epilog=f"example: cogvideox-torchax {name} {self.example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a prefix that means one option today may mean two tomorrow
        )
        parser.set_defaults(**ABSENT)
        groups: dict[str | None, Any] = {None: parser}  # by title, each has argparse's `add_argument`
        for each in sorted((*self.options, TRACEBACK), key=lambda option: option.group == REPORT):
            if each.group == EXCLUSIVE and each.group not in groups:
                groups[each.group] = parser.add_mutually_exclusive_group(required=True)
            elif each.group not in groups:
                groups[each.group] = parser.add_argument_group(each.group)
            groups[each.group].add_argument(*each.flags, **each.settings)
        return parser


def positive(text: str) -> int:
    """Return the whole number above 0 that a text names."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def argument(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return `read` as a `type` for argparse, which then prints the message of a `ValueError` of `read`."""

    def value(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


frame_rate = argument(video.frame_rate)
