"""Latents that `generate` keeps: those of a stage, and those whose video is not whole yet."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from cogvideox_torchax.cli import common
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files.latents import Latents
from cogvideox_torchax.pipelines import generate, stages


def kept_latents(args: argparse.Namespace) -> Latents:
    """The latents stage, which is only decoded any more: what it was sampled by cannot be asked for."""
    sampling = {*stages.Request.names(), "preview", "cache"} - {"dtype"}
    given = sorted(name for name in sampling if getattr(args, name) is not None)
    if given:
        options = ", ".join(map(stages.option, given))
        raise ValueError(f"the latents are sampled already: leave {options} out, or take up from 'text'")
    latents = stages.load_latents(args.save_stages)
    latents.check_model(generate.vae_config(args.model))
    return latents


def kept_path(args: argparse.Namespace) -> Path:
    """Beside the output, which as a directory may end in a slash."""
    output = Path(args.output)
    return output.with_name(f"{output.name}.latents.safetensors")


@contextlib.contextmanager
def on_disk(args: argparse.Namespace, latents: Latents) -> Iterator[None]:
    """Keeps the latents in a file until their video is whole; where that fails they stay, and a line says
    so."""
    if args.save_stages:
        yield
        return
    kept = kept_path(args)
    latent_files.save(latents, kept)
    try:
        yield
    except BaseException:
        common.say(f"the latents are kept: cogvideox-torchax decode {kept} -o {args.output}")
        raise
    kept.unlink()
