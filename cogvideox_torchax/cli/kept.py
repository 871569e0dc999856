"""Latents that `generate` keeps: a stage's, and an unfinished video's."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from cogvideox_torchax.cli import common
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files.latents import Latents
from cogvideox_torchax.pipelines import generate, stages


def load_latents_stage(args: argparse.Namespace) -> Latents:
    """Return the latents that an earlier run wrote into `--save-stages`; this run only decodes them.

    Raises:
        ValueError: options of sampling, which is done already; no latents, or another model's.
    """
    sampling = {*stages.FIELDS, "preview", "cache"} - {"dtype"}  # the VAE has a dtype too
    given = sorted(name for name in sampling if getattr(args, name) is not None)
    if given:
        options = ", ".join(map(stages.option, given))
        raise ValueError(f"the latents are sampled already: leave {options} out, or resume from 'text'")
    latents = latent_files.load(stages.path_of(args.save_stages, stages.LATENTS))
    latents.check_model(generate.config_of(args.model, generate.VAE_CONFIG))
    return latents


def kept_path(args: argparse.Namespace) -> Path:
    """Return the file, beside the output, that keeps latents until their video is whole."""
    output = Path(args.output)  # drops the slash that a directory may end in
    return output.with_name(f"{output.name}.latents.safetensors")


@contextlib.contextmanager
def saved_latents(args: argparse.Namespace, latents: Latents) -> Iterator[None]:
    """Keep the latents in a file while the block writes their video.

    If the block succeeds, the file is removed. If it fails, the command that decodes the file is printed.
    """
    kept = kept_path(args)
    latent_files.save(latents, kept)
    try:
        yield
    except BaseException:
        common.say(f"the latents are kept: cogvideox-torchax decode {kept} -o {args.output}")
        raise
    kept.unlink()
