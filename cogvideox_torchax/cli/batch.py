"""The commands `encode` and `decode` for many clips: from a directory or a list into an output directory.

A *unit*, an `EncodeClip` or a `DecodeClip`, holds the model and its settings. A clip is *bad* if it failed in
this run or in an earlier one.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cogvideox_torchax.cli import common, devices
from cogvideox_torchax.dataset import clip, loop, sources
from cogvideox_torchax.dataset.directory import LatentDirectory, OutputDirectory, VideoDirectory
from cogvideox_torchax.files import latents, reports


def encode(args: argparse.Namespace) -> int:
    """Encode the clips that the output directory lacks; return 1 if some cannot be encoded, else 0."""
    on_ray = args.ray is not None
    clips = sources.clips(args.video, common.say)
    with devices.share_of_this_process(args) as share:  # checks the options
        common.take_bundled_model(args)
        config = common.config_of(
            args,
            args.fps,
            buckets=tuple(clip.Bucket(*size) for size in args.buckets or ()),
            windows=args.windows,
            min_size=args.min_size,
            keep=args.keep or clip.POSTERIOR,
            seed=args.seed or 0,
        )
        # On Ray the actors encode. This host, which may have no chips, only checks the settings and computes
        # the hash of the model: PyTorch is enough for that.
        host_config = replace(config, backend="torch", dp=None, tp=None) if on_ray else config
        unit = clip.EncodeClip(host_config, common.say)
        unit.check()
        directory = LatentDirectory(args.output, unit, clips, share)
        with directory.locked():
            if on_ray and directory.missing:
                from cogvideox_torchax.dataset import ray

                # "", which is `--ray` without an address, becomes None.
                steps = ray.work(directory, config, args.ray or None, actors=args.actors)
            else:
                steps = directory.work(readers=args.workers or loop.READERS)
            report = run_loop(args, steps, directory)
    return print_report(args, report, directory)


def decode(args: argparse.Namespace) -> int:
    """Decode a directory's latents that have no video yet; return 1 if some cannot be decoded, else 0.

    The model is that of `--model`, or else the one that the first clip's latents name.
    """
    files = sources.latent_files(Path(args.latents), common.say)
    with devices.share_of_this_process(args) as share:
        directory = VideoDirectory(args.output, files, args.fps, share)
        with directory.locked():
            config, model_sha256, steps = common.config_of(args, model=args.model or ""), "", iter(())
            if directory.missing:
                # One clip is checked before the loop begins: latents of another model end the command, and do
                # not become a list of bad clips.
                first = latents.load(next(iter(directory.missing.values())))
                config = replace(config, model=args.model or first.model)
                unit = clip.DecodeClip(config, common.say)
                unit.check(first)
                model_sha256 = unit.model_sha256
                steps = directory.work(unit, readers=args.workers or loop.READERS)
            if directory.missing or directory.done_before:
                fps = args.fps and str(args.fps)  # a `Fraction` as text; None stays None
                # Where no model was loaded, its hash is not compared.
                directory.save_or_check_settings(config.fixed_settings(model_sha256) | {"fps": fps})
            report = run_loop(args, steps, directory)
    return print_report(args, report, directory)


def run_loop(
    args: argparse.Namespace,
    steps: Iterable[loop.Step],
    directory: OutputDirectory,
    unit: str = "clip",
) -> dict[str, Any]:
    """Take the steps of a loop over units under a progress bar; print each bad one; return the report."""
    for name, reason in directory.bad.items():  # those that were bad before any work
        common.say(f"bad: {name}: {reason}")
    clock = common.announcing_clock(args)
    taken = []
    # A unit is computed when its step is taken.
    for step in common.progress(steps, len(directory.missing), args.command, args=args, unit=unit):
        taken.append(step)
        if step.error is not None:
            common.say(f"bad {unit} {step.job}: {step.error}")  # the job is the unit's id
    count = sum(step.error is None for step in taken)
    seconds = clock.elapsed  # wall time; `clock.seconds` is the time of tracing and compiling alone
    return {
        "output": args.output,
        "backend": args.backend,
        # With Ray this process does not ask JAX for the device's name: JAX would start, and actors on this
        # host may hold its chips. `getattr`, because `decode` has no option `ray`.
        "device": "Ray" if getattr(args, "ray", None) is not None else common.device_name(args.backend),
        "done_before": directory.done_before,
        "bad": len(directory.bad),
        f"{unit}s": count,
        "compile_s": clock.seconds,
        "computing_s": sum(step.computed for step in taken),
        f"waiting_for_{unit}s_s": sum(step.waited for step in taken),
        "total_s": seconds,
        f"{unit}s_a_second": count / seconds,
    }


def print_report(
    args: argparse.Namespace, report: dict[str, Any], directory: OutputDirectory, unit: str = "clip"
) -> int:
    """Print the report, and a line about bad units; return the exit code, 1 if there are any."""
    reports.print_report(report, args.json)
    if directory.bad:
        common.say(f"bad {unit}s left out: {len(directory.bad)}; the lines above say why")
    return int(bool(directory.bad))
