"""What the laboratory's commands share: tables of options, lines for a person, and printed figures."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

Option = tuple[tuple[str, ...], dict[str, Any]]
"""The flags and the settings of an option, as argparse's `add_argument` takes them."""


def option(*flags: str, **settings: Any) -> Option:
    return flags, settings


def output(help: str, metavar: str) -> Option:
    return option("-o", "--output", metavar=metavar, help=help)


JSON = option("--json", action="store_true", help="print the report as JSON, and the rest on stderr")
QUIET = option("--quiet", action="store_true", help="say nothing of what begins")


def add_to(parser: argparse.ArgumentParser, options: Iterable[Option]) -> argparse.ArgumentParser:
    for flags, settings in options:
        parser.add_argument(*flags, **settings)
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def say(message: str) -> None:
    """Print a line for a person on stderr: stdout is for results, which a program may read."""
    print(message, file=sys.stderr, flush=True)


def narrator(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda line: None) if args.quiet else say


def print_figures(figures: dict[str, Any]) -> None:
    width = max(map(len, figures))
    for name, value in figures.items():
        if isinstance(value, float):
            value = f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
        print(f"  {name.replace('_', ' '):<{width}}  {value}", flush=True)
