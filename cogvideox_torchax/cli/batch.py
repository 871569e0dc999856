"""`encode` and `decode` of many clips: a directory or a list of them into a directory."""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cogvideox_torchax.cli import common, devices, options
from cogvideox_torchax.dataset import clip, decoding, formats, loop, manifest, sources
from cogvideox_torchax.files import models
from cogvideox_torchax.files.whole import refuse

FOR_MANY = ("format", "shard_size", "keep", "buckets", "ray", "actors", "workers", "retry_failed")
"""Options that a single clip has no use for."""


def check_one(args: argparse.Namespace) -> None:
    """Raise `ValueError` for options that a single clip has no use for."""
    for name in FOR_MANY:
        # The defaults are None and False, and None stands for an option that this command does not take.
        if getattr(args, name, None) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for many clips: leave it out, or give a directory or a list")


def _check_output(path: str) -> None:
    """Raise `OutputError` for an output directory with a file's suffix, unless that directory exists."""
    suffix = Path(path).suffix.lower()
    is_file_name = suffix in (*formats.SUFFIXES.values(), ".mp4", ".gif") and not Path(path).is_dir()
    refuse(path, {f"many clips go into a directory: give a name without {suffix}": is_file_name})


def encode(args: argparse.Namespace) -> int:
    """Encode the clips that the output directory lacks; return 1 where some cannot be encoded, else 0.

    `unit`, an `EncodeClip`, is the model and its settings. It checks the settings before the loop over clips
    begins; in the loop it encodes one clip at a time. With `--ray` actors on the cluster encode, each with
    its own unit.
    """
    faults = {
        "--seed draws samples: add --keep sample, or both": args.seed is not None
        and args.keep in (None, clip.POSTERIOR, clip.MEAN),
        "--shard-size is for shards: add --format parquet or webdataset": args.shard_size
        and args.format in (None, formats.SAFETENSORS),
        "--actors is for Ray: add --ray": args.actors and args.ray is None,
        "Ray deals out the clips itself: leave out --distributed": args.distributed and args.ray is not None,
        "Ray reads the clips itself: leave out --workers": args.workers and args.ray is not None,
    }
    options.refuse(faults)
    _check_output(args.output)
    clips = sources.clips(args.video)
    buckets = tuple(clip.Bucket.parse(text) for text in args.buckets.split(",")) if args.buckets else ()
    with devices.process_shard(args) as process_shard:  # checks the options
        common.take_bundled_model(args)
        config = common.config_of(
            args, buckets=buckets, keep=args.keep or clip.POSTERIOR, seed=args.seed or 0
        )
        unit = clip.EncodeClip(config, common.say)
        if args.ray is not None:
            # This unit only checks the config and hashes the model; this host may have no chips.
            unit = clip.EncodeClip(replace(config, backend="torch", dp=None, tp=None))
        unit.check()
        with manifest.DatasetDirectory(
            args.output,
            config.fixed_settings(unit.model_sha256),  # must equal those of the run that is resumed
            clips,
            kind=args.format or formats.SAFETENSORS,
            shard_size=args.shard_size or 64,
            process_shard=process_shard,
            retry=args.retry_failed,
        ) as directory:
            # `steps` is an iterator over outcomes: a clip is encoded when `_run_loop` takes its outcome.
            if args.ray is None:
                steps = directory.work(unit, readers=args.workers or loop.READERS)
            else:
                from cogvideox_torchax.dataset import ray

                # "" is `--ray` without an address.
                steps = ray.work(directory, config, args.ray or None, actors=args.actors)
            found = _run_loop(args, steps, directory)
    return _print_report(args, *found)  # after the block, in which stdout may go to stderr


def decode(args: argparse.Namespace) -> int:
    """Decode a directory's latents that have no video yet; return 1 where some cannot be decoded, else 0.

    `unit`, a `DecodeClip`, decodes one clip at a time, with the model of `--model`, or else with the model
    that the first clip's latents name.
    """
    _check_output(args.output)
    if args.model:
        models.local(args.model)  # raises before the output is made, if there is no such directory
    shards = sources.shards(Path(args.latents))  # files of latents; each process decodes some of them
    with (
        devices.process_shard(args) as process_shard,
        decoding.VideoDirectory(
            args.output, shards, args.fps, process_shard, retry=args.retry_failed
        ) as directory,
    ):
        for name, reason in directory.bad.items():
            common.say(f"bad: {name}: {reason}")
        # One clip is checked before the loop begins: a wrong model is then an error, not a list of bad clips.
        first = directory.first_latents()  # None where no clip is left to decode: no model is loaded then
        unit = clip.DecodeClip(
            common.config_of(args, model=args.model or (first.model if first else "")), common.say
        )
        if first:
            unit.check(first)
        # Writes the settings to the directory; raises if an earlier run's videos have other settings. Where
        # no clip is left to decode no model is loaded, and its hash is not compared.
        settings = unit.config.fixed_settings(unit.model_sha256 if first else "")
        directory.begin(settings, write=first is not None)
        found = _run_loop(args, directory.work(unit, readers=args.workers or loop.READERS), directory)
    return _print_report(args, *found)


def _run_loop(
    args: argparse.Namespace, steps: Iterable[loop.Step], directory: manifest.OutputDirectory
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a loop over clips under a progress bar; print each bad clip.

    Args:
        args: the command's options.
        steps: the loop; it yields the outcome of each clip.
        directory: the output that the loop writes.

    Returns:
        The report, and the reasons of clips that are bad, of this run or of an earlier one, by id.
    """
    clock = common.announcing_clock(args)
    count = 0
    waited = computed = 0.0
    for step in common.progress(steps, len(directory.missing), args.command, args=args, unit="clip"):
        waited, computed = waited + step.waited, computed + step.computed
        if step.error is None:
            count += 1
        else:
            common.say(f"bad clip {directory.clip_id(step.job)}: {step.error}")
    seconds, bad = clock.elapsed, directory.bad_clips()
    report = {
        "output": args.output,
        "backend": args.backend,
        # With Ray JAX is not asked: actors on this host may hold its chips. `decode` has no option `ray`.
        "device": "Ray" if getattr(args, "ray", None) is not None else common.device_name(args.backend),
        "done_before": directory.done_before,
        "bad": len(bad),
        "clips": count,
        "compile_s": clock.seconds,
        "computing_s": computed,
        "waiting_for_clips_s": waited,
        "total_s": seconds,
        "clips_a_second": count / seconds,
    }
    return report, bad


def _print_report(args: argparse.Namespace, report: dict[str, Any], bad: dict[str, str]) -> int:
    """Print the results of `_run_loop`; return the exit code: 1 where clips are bad, else 0."""
    common.print_report(report, args.json)
    if bad:
        # The first five ids and the number of further ones: the line stays short.
        named = ", ".join(list(bad)[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        counted = "1 bad clip was" if len(bad) == 1 else f"{len(bad)} bad clips were"
        common.say(f"{counted} left out: {named}; a line above or the manifest says why")
    return 1 if bad else 0
