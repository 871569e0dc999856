"""The command line: `cogvideox-torchax COMMAND ...`. One file a command; each has `add(subparsers)` and
`run(args)`."""

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

from cogvideox_torchax import __version__
from cogvideox_torchax.cli import (
    bench,
    compile,
    completion,
    decode,
    demo,
    doctor,
    encode,
    generate,
    plan,
    reconstruct,
    train,
    verify,
)
from cogvideox_torchax.runtime.quiet import quiet_libraries

COMMANDS = (
    *(doctor, demo, encode, decode, reconstruct, generate),
    *(train, compile, verify, bench, plan, completion),
)
USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="cogvideox-torchax",
        description="CogVideoX's video VAE and pipelines on TPU, GPU and CPU through torchax.",
        epilog="example: cogvideox-torchax demo",
    )
    root.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = command.add(subparsers)
        added.add_argument(
            "--traceback", action="store_true", help="show where in the code an error came from"
        )
        added.set_defaults(run=command.run)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 for success, 2 for a wrong input, 1 for a failure of the work, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        quiet_libraries(bars=not getattr(args, "quiet", False))
        with _profiled(args):
            return args.run(args) or 0
    except (KeyboardInterrupt, Exception) as error:
        code = _told(error, args)
    if getattr(args, "distributed", False):  # the others may wait for what this one will not give
        from cogvideox_torchax.sharding import abandon

        abandon(code)
    return code


def _told(error: BaseException, args: argparse.Namespace) -> int:
    """Says in one line what ended a command; its code."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; nothing half-written was left", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader of our output is gone: keep the interpreter from flushing into it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    if args.traceback:
        if not getattr(args, "distributed", False):
            raise error
        traceback.print_exception(error)  # raised, it would have this process wait for the others
    wrong_input = isinstance(error, ValueError | ImportError) or (
        isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG  # whichever name was given
    )
    name = "" if wrong_input else f"{type(error).__name__}: "
    print(f"cogvideox-torchax {args.command}: {name}{_one_line(error)}", file=sys.stderr)
    return USER_ERROR if wrong_input else FAILURE


@contextlib.contextmanager
def _profiled(args: argparse.Namespace) -> Iterator[None]:
    """Records what a command computes, where `--profile` asks for it."""
    directory = getattr(args, "profile", None)
    if directory is None:
        yield
        return
    from cogvideox_torchax.runtime import profiling

    with profiling(directory):
        yield


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]} (--traceback shows all)"
