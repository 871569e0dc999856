"""`pack`: a directory of latents to shards that trainers read."""

import argparse

from cogvideox_torchax.cli import common, options
from cogvideox_torchax.dataset import formats, packing

COMMAND = options.Command(
    "pack a directory of latents into shards",
    "latents/ -o shards/ --format parquet",
    (
        options.Option("latents", help="a directory that `encode` has finished"),
        options.output(
            "directory of the shards, which must not exist or be empty", required=True, metavar="DIR"
        ),
        options.Option(
            "--format",
            required=True,
            choices=formats.SUFFIXES,
            help="Parquet as FastVideo reads it, or WebDataset tars; both need the extra data",
        ),
        options.Option(
            "--shard-size",
            type=options.positive,
            default=64,
            metavar="CLIPS",
            help="clips in a shard (default: 64)",
        ),
        options.JSON,
    ),
)


def run(args: argparse.Namespace) -> None:
    common.check_input(args.latents)
    clips, shards = packing.pack(args.latents, args.output, args.format, args.shard_size, common.say)
    common.print_report({"output": args.output, "clips": clips, "shards": shards}, args.json)
