"""`pack`: a directory of latents to shards that trainers read."""

import argparse

from cogvideox_torchax.cli import common
from cogvideox_torchax.dataset import packing
from cogvideox_torchax.files import reports


def run(args: argparse.Namespace) -> None:
    clips, shards = packing.pack(args.latents, args.output, args.format, args.shard_size, common.say)
    reports.print_report({"output": args.output, "clips": clips, "shards": shards}, args.json)
