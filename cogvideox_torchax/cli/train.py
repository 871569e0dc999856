"""`train`: a VAE's weights out of clips."""

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from cogvideox_torchax import backends
from cogvideox_torchax.cli import common, devices, options
from cogvideox_torchax.files import whole
from cogvideox_torchax.train import checkpoints, clips, stages, start, trainer
from cogvideox_torchax.train.run import HeldOut, Run

_batches = functools.partial(options.Option, group="batches")
COMMAND = options.Command(
    "train a VAE on clips, from scratch or from given weights",
    "clips/ -o run --config vae/config.json --steps 10000 --validate other.mp4",
    (
        options.Option(
            "clips",
            nargs="+",
            metavar="CLIP",
            help="videos, pictures, directories of both; video.mp4#0-100 for its first 100 frames",
        ),
        options.output("of the training", metavar="DIR", required=True),
        options.Option(
            "--model", metavar="DIR_OR_ID", help="begin with its weights", group=options.EXCLUSIVE
        ),
        options.Option(
            "--config",
            metavar="FILE",
            help="a config.json: begin with weights drawn by --seed",
            group=options.EXCLUSIVE,
        ),
        options.Option(
            "--backend",
            choices=("torch", "torchax"),
            default="torch",
            help="torch computes in bfloat16, with float32 weights; torchax in float32 (default: torch)",
        ),
        options.Option("--steps", type=options.positive, required=True, help="of the whole training"),
        _batches("--batch", type=options.positive, default=1, help="clips in a batch (default: 1)"),
        _batches(
            "--frames", type=options.positive, default=17, help="of the longest clips, 8 n + 1 (default: 17)"
        ),
        _batches(
            "--size",
            type=options.positive,
            default=64,
            help="of the square crops, in pixels, a multiple of 16 (default: 64)",
        ),
        _batches(
            "--seed", type=options.seed, default=0, help="of first weights, batches and noise (default: 0)"
        ),
        _batches(
            "--settings",
            metavar="FILE",
            help="TOML file of further settings (docs/datasets.md lists them)",
        ),
        options.Option(
            "--validate",
            group="run",
            action="append",
            default=[],
            metavar="CLIP",
            help="a held-out video; repeatable",
        ),
        options.Option(
            "--checkpoint-every",
            group="run",
            type=options.positive,
            default=500,
            help="steps between checkpoints (default: 500)",
        ),
        options.Option("--resume", group="run", action="store_true", help="go on from the checkpoint in DIR"),
        options.Option("--quiet", group=options.REPORT, action="store_true", help="no progress bar"),
        *options.MESH,
    ),
)


def run(args: argparse.Namespace) -> None:
    """Train a VAE until the last step, or until Ctrl-C or SIGTERM; write its weights and curves.

    Raises:
        OutputError: another training is running in the directory.
        KeyboardInterrupt: ended before the last step; the checkpoint is written.
    """
    directory = common.report_directory(args.output)
    with whole.locked(directory):  # before the check for a checkpoint, which a running one may still write
        _train(args, directory)


def _train(args: argparse.Namespace, directory: Path) -> None:
    """Run the training in `directory`, which is locked.

    Raises:
        KeyboardInterrupt: ended before the last step; the checkpoint is written.
    """
    if not args.resume and (directory / checkpoints.NAME).exists():
        raise ValueError(f"{directory} holds a training: --resume it, or give another directory")
    settings = (
        stages.TrainingSettings.load(Path(args.settings)) if args.settings else stages.TrainingSettings()
    )
    plan = stages.Plan(
        steps=args.steps,
        clips=args.batch,
        frames=args.frames,
        size=args.size,
        seed=args.seed,
        mixed=args.backend == "torch",  # bfloat16 in computations, float32 in weights
        stills=args.config is not None,  # weights from scratch learn from stills first
        settings=settings,
    )
    held_out = [HeldOut.load(clip, args.frames) for clip in args.validate]
    names = [clip.name for clip in held_out]
    if len({*names}) < len(names):
        raise ValueError(f"got --validate {', '.join(names)}: pictures are named after clips; rename one")
    # Files, or ranges of their frames; the output's own pictures are no clips.
    parts = clips.parts(args.clips, without=directory)
    sources = clips.load_all(parts, common.say, frames=args.frames, size=args.size, whole=settings.whole)
    backend = start.load(
        backends.backend(args.backend),
        devices.mesh_of(args),
        model=args.model,
        config=args.config,
        seed=args.seed,
    )
    sampler = clips.Sampler(sources, seed=args.seed, cuts=settings.cuts)
    training = Run(
        trainer.Trainer(backend, sampler, plan),
        directory,
        held_out,
        # Settings that --resume must repeat.
        asdict(plan) | {"backend": args.backend, "clips": [source.part.name for source in sources]},
    )
    steps_done = training.resume() if args.resume else training.begin()
    with _stop_requests() as stop_is_asked:
        _run_steps(training, steps_done, stop_is_asked, args)
        training.finish()
    if training.trainer.step_number < args.steps:
        common.say(f"ended after {training.trainer.step_number} of {args.steps} steps: go on with --resume")
        raise KeyboardInterrupt


def _run_steps(training: Run, done: int, stop_is_asked: Callable[[], bool], args: argparse.Namespace) -> None:
    """Make the remaining steps under a progress bar; print each validation.

    Args:
        training: the training, begun or resumed.
        done: number of steps that are done already.
        stop_is_asked: returns whether to end after the present step.
        args: the command's options.
    """
    from tqdm import tqdm

    smooth = None  # the loss as a moving mean, which a batch of other content hardly changes
    with tqdm(total=args.steps, initial=done, unit="step", disable=args.quiet, mininterval=1.0) as bar:
        for losses, validations in training.go(every=args.checkpoint_every, stopped=stop_is_asked):
            smooth = losses.total if smooth is None else 0.98 * smooth + 0.02 * losses.total
            bar.set_postfix(loss=f"{smooth:.3f}", psnr=f"{losses.psnr:.1f}", refresh=False)
            bar.update()
            for validation in validations:
                step = training.trainer.step_number
                bar.write(
                    f"step {step}: {validation.clip} {validation.psnr:.2f} dB, SSIM {validation.ssim:.3f}",
                    file=sys.stderr,
                )


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM has come since the block began."""
    asked: list[int] = []  # numbers of the signals that have come
    previous_handlers = {
        number: signal.signal(number, lambda received, _frame: asked.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
