"""`encode` and `decode` of many clips: a directory or a list of them into a directory."""

import argparse
import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_torchax.cli import common, devices

if TYPE_CHECKING:
    from cogvideox_torchax.dataset.loop import Step
    from cogvideox_torchax.dataset.manifest import Share

FORMATS = ("safetensors", "parquet", "webdataset")
KEEP = ("posterior", "sample", "both")
DEFAULTS = {
    "format": FORMATS[0],
    "shard_size": 64,
    "keep": KEEP[0],
    "buckets": None,
    "readers": 2,
    "retry": False,
}
"""Of the options for many clips."""


def add_options(command: argparse.ArgumentParser) -> None:
    """What a directory or a list of clips is encoded by, besides what a single clip is."""
    group = command.add_argument_group("many clips")
    group.add_argument(
        "--format",
        choices=FORMATS,
        default=DEFAULTS["format"],
        help="a latent file a clip (default), or shards: Parquet as FastVideo reads it (needs the extra "
        "data), or WebDataset tars",
    )
    group.add_argument(
        "--shard-size",
        type=common.positive,
        default=DEFAULTS["shard_size"],
        metavar="CLIPS",
        help="clips a shard (default: 64)",
    )
    group.add_argument(
        "--keep",
        choices=KEEP,
        default=DEFAULTS["keep"],
        help="mean and log-variance (default), a sample of them, or both",
    )
    group.add_argument(
        "--buckets",
        metavar="SIZES",
        help="bring each clip to the nearest of these sizes, such as 49x480x720,49x720x480: frames, height, "
        "width; without, clips keep their own",
    )
    add_decoding_options(group)


def add_decoding_options(group: Any) -> None:
    group.add_argument(
        "--readers",
        type=common.positive,
        default=DEFAULTS["readers"],
        help="clips that are read at a time (default: 2)",
    )
    group.add_argument("--retry", action="store_true", help="try clips again that were bad before")


def check_one(args: argparse.Namespace) -> None:
    """Raises `ValueError` for options that a single clip has no use for."""
    for name, default in DEFAULTS.items():
        if getattr(args, name, default) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} is for many clips: leave it out, or give a directory or a list"
            )


def encode(args: argparse.Namespace) -> int:
    """Encodes the clips that a directory lacks; 1 where some could not be."""
    from cogvideox_torchax.dataset import Bucket, EncodeClip, loop, manifest, sources

    if args.seed is not None and args.keep == DEFAULTS["keep"]:
        raise ValueError("--seed draws samples: add --keep sample, or both")
    devices.check_alone(args)
    clips = {clip.id: clip for clip in sources.clips(args.video)}
    common.take_bundled_model(args)
    buckets = tuple(Bucket.parse(text) for text in args.buckets.split(",")) if args.buckets else ()
    recipe = _recipe(args, frames=args.frames, height=args.height, width=args.width, crop=args.crop)
    recipe = recipe(buckets=buckets, keep=args.keep, seed=args.seed or 0)
    with _share(args) as share:
        unit = EncodeClip(recipe, common.say)
        unit.check()
        made_by = recipe.lasting(unit.model_sha256)
        options: dict[str, Any] = {"kind": args.format, "shard_size": args.shard_size, "retry": args.retry}
        with manifest.Shelf(args.output, made_by, list(clips), share=share, **options) as shelf:
            missing = shelf.pending()
            for index in [index for index in missing if shelf.ids[index] not in clips]:
                shelf.refuse(index, "it is not among the clips any more")
                missing.remove(index)
            steps = loop.work(
                missing,
                lambda index: unit.read(clips[shelf.ids[index] or ""]),
                unit.encode,
                shelf.keep,
                shelf.refuse,
                readers=args.readers,
            )
            report = _through(args, steps, missing, shelf.ids)
            own = {index for shard in shelf.shards for index in shelf.members(shard)}
            newest = set(shelf.numbers.values())
            bad = {shelf.ids[index]: shelf.bad[index] for index in sorted(own & newest & set(shelf.bad))}
            done = (
                len(own)
                - len(missing)
                - len([index for index in own & set(shelf.bad) if index not in missing])
            )
    return _finish(args, report, bad, done)


def decode(args: argparse.Namespace) -> int:
    """Decodes the latents of a directory that have no video yet; 1 where some could not be."""
    from cogvideox_torchax.dataset import DecodeClip, sources
    from cogvideox_torchax.dataset.decoding import Videos

    devices.check_alone(args)
    shards = sources.shards(Path(args.latents))
    with _share(args) as share, contextlib.ExitStack() as stack:
        videos = stack.enter_context(Videos(args.output, shards, args.fps, share, retry=args.retry))
        for name, reason in videos.bad.items():
            common.say(f"bad: {name}: {reason}")
        first = videos.first()
        model = args.model or (first.model if first else "")
        unit = DecodeClip(_recipe(args)(model=model), common.say)
        if first:
            unit.check(first)
            videos.begin(unit.recipe.lasting(unit.model_sha256))
        report = _through(args, videos.work(unit, readers=args.readers), videos.missing, videos.missing)
    return _finish(args, report, videos.bad, videos.done_before)


def _recipe(args: argparse.Namespace, **options: Any) -> Any:
    from cogvideox_torchax.dataset import Recipe

    common.parse_dtype(args.dtype)
    given = {name: getattr(args, name) for name in ("backend", "dtype", "tiling", "dp", "tp")}
    if args.model is not None:
        given["model"] = args.model
    return functools.partial(Recipe, **given, **options)


@contextlib.contextmanager
def _share(args: argparse.Namespace) -> Iterator["Share"]:
    """This process's share of the clips. With an index and a count processes need not meet."""
    from cogvideox_torchax.dataset.manifest import Share

    if not args.distributed:
        yield Share()
        return
    if args.processes is not None and args.process is not None and args.coordinator is None:
        if not 0 <= args.process < args.processes:
            raise ValueError(f"got --process {args.process} of --processes {args.processes}: count from 0 on")
        yield Share(args.process, args.processes)
        return
    import jax

    from cogvideox_torchax import sharding

    with devices.talking_on_stderr():
        sharding.connect(
            args.coordinator, args.processes, args.process, patience=args.patience or sharding.PATIENCE
        )
        yield Share(jax.process_index(), jax.process_count())
        sharding.wait_for_all()


def _through(
    args: argparse.Namespace, steps: Iterable["Step"], jobs: list[Any], names: Any
) -> dict[str, Any]:
    """Runs the loop under a bar with clips a second and the time left; names bad clips as they come."""
    watch = common.Stopwatch()
    count = bad = 0
    waited = computed = 0.0
    for step in common.progress(steps, total=len(jobs), name=args.command, args=args, unit="clip"):
        count += 1
        waited, computed = waited + step.waited, computed + step.computed
        if step.error is not None:
            bad += 1
            name = names[step.job] if isinstance(step.job, int) else step.job
            common.say(f"bad clip {name}: {step.error}")
    seconds = watch.seconds
    return {
        "clips": count - bad,
        "compile_s": watch.compile_seconds,
        "computing_s": computed,
        "waiting_for_clips_s": waited,
        "total_s": seconds,
        "clips_a_second": (count - bad) / seconds if count else 0.0,
    }


def _finish(args: argparse.Namespace, report: dict[str, Any], bad: dict[Any, str], done_before: int) -> int:
    shown = {
        "output": args.output,
        "backend": args.backend,
        "device": common.device_name(args.backend),
        "done_before": done_before,
        "bad": len(bad),
        **report,
    }
    common.print_report(shown, args.json)
    if bad:
        named = ", ".join(map(str, list(bad)[:5])) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        common.say(f"{len(bad)} bad clips were left out: {named}; the manifest says why")
    return 1 if bad else 0
