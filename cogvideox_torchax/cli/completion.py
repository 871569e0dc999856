"""`completion`: what a shell needs to complete commands and options."""

import argparse
from typing import Any

from cogvideox_torchax.cli import arguments

SHELLS = ("bash", "zsh", "tcsh")


def add(subparsers: Any) -> argparse.ArgumentParser:
    command = arguments.add_command(
        subparsers,
        "completion",
        "print the shell's completion of commands and options",
        "cogvideox-torchax completion bash > ~/.local/share/bash-completion/completions/cogvideox-torchax",
    )
    command.add_argument("shell", choices=SHELLS)
    return command


def run(args: argparse.Namespace) -> int:
    import shtab

    from cogvideox_torchax.cli import parser

    print(shtab.complete(parser(), args.shell))
    return 0
