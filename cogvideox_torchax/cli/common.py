"""Code that commands share: the model, the backend, tables and JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from cogvideox_torchax import backends
from cogvideox_torchax.cli.options import DTYPES
from cogvideox_torchax.files import reports
from cogvideox_torchax.runtime.clock import CompileClock

DEMO_MODEL = Path(__file__).parent.parent / "assets" / "tiny-vae"

Item = TypeVar("Item")


def check_input(path: str) -> None:
    """Raise `ValueError` for an input that does not exist, or an empty name, which `Path` takes for "."."""
    if not path:
        raise ValueError('got an empty name: give a file or a directory, "." for the current one')
    if not Path(path).exists():
        raise ValueError(f"there is no file or directory {path}")


def take_bundled_model(args: argparse.Namespace) -> None:
    """Set `args.model` to the bundled model if the command was given none, and print a line about it."""
    if args.model is None:
        args.model = str(DEMO_MODEL)
        say(f"no --model is given: taking the small bundled model {DEMO_MODEL} (docs/tiny-vae.md)")


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name of `DTYPES`; `ValueError` for another name."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def load_vae(model: str, backend: str, dtype: str, mesh: Any = None) -> Any:
    """Return the VAE of a model or a pipeline, loaded on a backend, and over `mesh` if it is not None."""
    return backends.backend(backend).load(model, parse_dtype(dtype), mesh).vae


def device_name(backend: str) -> str:
    """Return the name of the device that a backend runs on."""
    return backends.backend(backend).device()


def progress(
    items: Iterable[Item], *, total: int, name: str, args: argparse.Namespace, unit: str = "chunk"
) -> Iterator[Item]:
    """Yield the items under a progress bar; `--quiet` hides it.

    Args:
        items: the items.
        total: number of items.
        name: the bar's title.
        args: the command's options.
        unit: the word for an item.
    """
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=name, unit=unit, disable=args.quiet, leave=False)


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """Print a report as JSON on one line, or as a table of two columns."""
    if as_json:
        print(json.dumps(report))
        return
    width = max(len(key) for key in report)
    for key, value in report.items():
        print(f"  {key.replace('_', ' '):<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a value of a report as text, a float with few digits."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
    return str(value)


def print_results(args: argparse.Namespace, clock: CompileClock, results: dict[str, Any]) -> None:
    """Print the report of a command that has written `args.output`: the device, `results`, the times."""
    ran = {"output": args.output, "backend": args.backend, "device": device_name(args.backend)}
    times = {"compile_s": clock.seconds, "total_s": clock.elapsed}
    print_report({**ran, **results, **times}, args.json)


def make_directory(name: str, purpose: str = "write into") -> Path:
    """Return a directory to write into, made where it is not there yet; `ValueError` where it cannot be.

    `purpose` completes "cannot" in the error's message.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot {purpose} {path}: {error.strerror}") from error
    return path


def report_directory(name: str) -> Path:
    """Return a directory for a report with plots; `ValueError` where matplotlib is not installed."""
    reports.pyplot()  # raises before the work, not after it
    return make_directory(name)


def narrator(args: argparse.Namespace) -> Callable[[str], None]:
    """Return `say`, or, with `--quiet`, a function that prints nothing."""
    return (lambda line: None) if args.quiet else say


def say(message: str) -> None:
    """Print a line for a person on stderr: stdout is for results, which a program may read."""
    # A file name that is no UTF-8 has lone surrogates, which not every stream can write.
    print(message.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
