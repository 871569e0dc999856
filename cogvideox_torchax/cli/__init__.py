"""The command line: `cogvideox-torchax COMMAND ...`. Wrong options are refused before torch is imported."""

import argparse
import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from cogvideox_torchax import __version__, runtime
from cogvideox_torchax.cli import commands
from cogvideox_torchax.cli.commands import COMMANDS
from cogvideox_torchax.cli.options import USER_ERROR, Parser
from cogvideox_torchax.terminal import quiet_libraries

FAILURE = 1
INTERRUPTED = 130  # a shell's code for a process that Ctrl-C ended


def parser() -> argparse.ArgumentParser:
    root = Parser(
        prog="cogvideox-torchax",
        description="CogVideoX's video VAE and pipelines on TPU, GPU and CPU through torchax.",
        epilog="example: cogvideox-torchax demo",
    )
    root.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_to(subparsers, name)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for wrong input, 1 for a failed run, 130 for Ctrl-C.

    `argv` is the command line without the program's name; None for the process's own.
    """
    args = parser().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    try:
        commands.check(args)
    except (ValueError, OSError) as error:
        return _report_error(error, args)
    try:
        run = importlib.import_module(f"{__name__}.{args.command}").run  # imports torch
        quiet_libraries(bars=not args.quiet)  # hides other packages' warnings; `bars` keeps progress bars
        # `profiling` imports JAX, without which `doctor` works.
        with contextlib.nullcontext() if args.profile is None else runtime.profiling(args.profile):
            return run(args) or 0
    except (KeyboardInterrupt, Exception) as error:
        code = _report_error(error, args)
    if args.distributed:  # the other processes may wait for results that this one will not send
        from cogvideox_torchax.sharding import exit_at_once

        exit_at_once(code)
    return code


def _report_error(error: BaseException, args: argparse.Namespace) -> int:
    """Print the error that ended a command, in one line; return the command's exit code.

    With `--traceback` raise the error, or only print its traceback if the command has several processes.
    """
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; nothing half-written was left", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The program that read our stdout has ended. The interpreter flushes stdout at exit: let it do so
        # into /dev/null, not into the broken pipe, where it would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    if args.traceback:
        if not args.distributed:
            raise error
        # Not raised: at the interpreter's exit JAX would wait for the other processes.
        traceback.print_exception(error)
    # An `ImportError` is wrong input, too: its message names the extra of this package to install.
    wrong_input = isinstance(error, ValueError | ImportError) or (
        isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG  # a name that the user gave
    )
    error_class = "" if wrong_input else f"{type(error).__name__}: "  # a user needs the message alone
    text = " ".join(str(error).split())
    shown = text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]} (--traceback shows all)"
    print(f"cogvideox-torchax {args.command}: {error_class}{shown}", file=sys.stderr)
    return USER_ERROR if wrong_input else FAILURE
