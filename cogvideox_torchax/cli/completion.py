"""`completion`: the shell's script that completes commands and options."""

import argparse

from cogvideox_torchax.cli.options import Command, Option

COMMAND = Command(
    "print the shell's completion of commands and options",
    "bash > ~/.local/share/bash-completion/completions/cogvideox-torchax",
    (Option("shell", choices=("bash", "zsh", "tcsh"), help="whose script to print"),),
)


def run(args: argparse.Namespace) -> None:
    import shtab

    from cogvideox_torchax.cli import parser

    print(shtab.complete(parser(), args.shell))
