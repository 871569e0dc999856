"""`train`: a VAE's weights out of clips."""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_torchax import backends
from cogvideox_torchax.cli import common, devices
from cogvideox_torchax.files import video
from cogvideox_torchax.train import clips

if TYPE_CHECKING:
    from cogvideox_torchax.train.run import HeldOut, Run

TRAINERS = ("torch", "torchax")


def add(subparsers: Any) -> argparse.ArgumentParser:
    command = common.add_command(
        subparsers,
        "train",
        "train a VAE on clips, from scratch or from given weights",
        "cogvideox-torchax train clips/ -o run --config vae/config.json --steps 10000 --validate other.mp4",
    )
    command.add_argument(
        "clips",
        nargs="+",
        metavar="CLIP",
        help="videos, pictures, directories of both; video.mp4#0-100 for its first 100 frames",
    )
    command.add_argument("-o", "--output", required=True, metavar="DIR", help="of the training")
    begin = command.add_mutually_exclusive_group(required=True)
    begin.add_argument("--model", metavar="DIR_OR_ID", help="begin with its weights")
    begin.add_argument("--config", metavar="FILE", help="a config.json: begin with weights drawn by --seed")
    command.add_argument(
        "--backend",
        choices=TRAINERS,
        default="torch",
        help="torch computes in bfloat16, with float32 weights; torchax in float32 (default: torch)",
    )
    command.add_argument("--steps", type=common.positive, required=True, help="of the whole training")
    command.add_argument("--batch", type=common.positive, default=1, help="clips in a batch (default: 1)")
    command.add_argument(
        "--frames",
        type=common.positive,
        default=17,
        help="of the longest clips, 8 n + 1 (default: 17)",
    )
    command.add_argument(
        "--size",
        type=common.positive,
        default=64,
        help="of the square crops, in pixels, a multiple of 16 (default: 64)",
    )
    command.add_argument(
        "--whole",
        type=common.size,
        metavar="HEIGHTxWIDTH",
        help="half of the clips are whole frames of the videos, resized to this size in pixels, whatever "
        "their shape; multiples of 16",
    )
    command.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="times the usual learning rates (default: 1)",
    )
    command.add_argument(
        "--seed", type=int, default=0, help="of first weights, batches and noise (default: 0)"
    )
    command.add_argument(
        "--cuts",
        action="store_true",
        help="a tenth of the crops cut to another scene; half of a video's are taken where it changes fast",
    )
    command.add_argument(
        "--colour",
        type=float,
        default=0.0,
        metavar="WEIGHT",
        help="of a loss on frames' mean colours; L1 has 1 (default: 0)",
    )
    command.add_argument(
        "--validate", action="append", default=[], metavar="CLIP", help="a held-out video; repeatable"
    )
    command.add_argument(
        "--every", type=common.positive, default=500, help="steps between checkpoints (default: 500)"
    )
    command.add_argument("--resume", action="store_true", help="go on from the checkpoint in DIR")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    devices.add_mesh_options(command)
    return command


def run(args: argparse.Namespace) -> int:
    from cogvideox_torchax.train.checkpoints import NAME
    from cogvideox_torchax.train.run import Run
    from cogvideox_torchax.train.trainer import Plan, Trainer

    directory = common.report_directory(args.output)
    if not args.resume and (directory / NAME).exists():
        raise ValueError(f"{directory} holds a training: --resume it, or give another directory")
    plan = Plan(
        steps=args.steps,
        clips=args.batch,
        frames=args.frames,
        size=args.size,
        seed=args.seed,
        mixed=args.backend == "torch",
        stills=args.config is not None,
        colour=args.colour,
        rate=args.rate,
        whole=args.whole,
    )
    sources = _sources(args)
    held_out = [_held_out(clip, args.frames) for clip in args.validate]
    trainer = Trainer(_backend(args), clips.Sampler(sources, seed=args.seed, cuts=args.cuts), plan)
    names = [source.part.name for source in sources]
    settings = plan.settings() | {"backend": args.backend, "cuts": args.cuts, "clips": names}
    training = Run(trainer, directory, held_out, settings)
    done = training.resume() if args.resume else training.begin()
    with _Ended() as ended:
        _follow(training, done, ended, args)
        _report(training, directory)
    if trainer.step_number < args.steps:
        common.say(f"ended after {trainer.step_number} of {args.steps} steps: go on with --resume")
        raise KeyboardInterrupt
    return 0


def _follow(training: "Run", done: int, ended: "_Ended", args: argparse.Namespace) -> None:
    """Makes the steps, under a bar that shows the loss as a moving mean."""
    from tqdm import tqdm

    smooth = None
    with tqdm(total=args.steps, initial=done, unit="step", disable=args.quiet, mininterval=1.0) as bar:
        for losses, found in training.go(every=args.every, stopped=ended.is_set):
            smooth = losses.total if smooth is None else 0.98 * smooth + 0.02 * losses.total
            bar.set_postfix(loss=f"{smooth:.3f}", psnr=f"{losses.psnr:.1f}", refresh=False)
            bar.update()
            for one in found:
                step = training.trainer.step_number
                bar.write(f"step {step}: {one.clip} {one.psnr:.2f} dB, SSIM {one.ssim:.3f}", file=sys.stderr)


def _report(training: "Run", directory: Path) -> None:
    """The averaged weights as a model directory, and the curves."""
    from cogvideox_torchax.train import report

    with training.trainer.averaged() as vae:
        vae.save_pretrained(directory / "vae")
    report.draw(report.curves(directory), directory / "curves.png")


class _Ended:
    """Whether someone has asked for the end, by Ctrl-C or SIGTERM, for as long as the block lasts."""

    def __init__(self) -> None:
        self._asked = False

    def is_set(self) -> bool:
        return self._asked

    def _ask(self, *_: object) -> None:
        self._asked = True

    def __enter__(self) -> "_Ended":
        self._before = {
            number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _sources(args: argparse.Namespace) -> list[clips.Source]:
    """What can be trained on; the rest is named and left out."""
    found = []
    for part in clips.parts(args.clips, without=Path(args.output)):  # the curves of a run are no clip
        try:
            found.append(clips.load(part, frames=args.frames, size=args.size, whole=args.whole))
        except ValueError as error:
            common.say(f"left out: {part}: {error}")
    if not found:
        raise ValueError("none of the clips can be trained on")
    if args.whole and all(source.whole is None for source in found):
        raise ValueError(
            "--whole takes frames of videos, and none of the clips that can be trained on is one: add a video"
        )
    return found


def _held_out(text: str, frames: int) -> "HeldOut":
    import torch

    from cogvideox_torchax.train.run import HeldOut

    part, *others = clips.parts([text])
    if others:
        raise ValueError(f"--validate {text} holds several clips: name each by itself")
    info = video.probe(part.path)
    framing = video.framing(info, multiple=8, height=None, width=None, crop=True)
    last = min(part.end or info.num_frames, info.num_frames, part.start + frames)
    count = (last - part.start - 1) // 8 * 8 + 1  # others come back with more frames than they have
    if count < 1:
        raise ValueError(f"--validate {text}: {part.path} ends after {info.num_frames} frames")
    pixels = torch.from_numpy(clips.read(part, framing, part.start + count))
    return HeldOut(part.name, pixels.permute(3, 0, 1, 2)[None].contiguous())


def _backend(args: argparse.Namespace) -> backends.Backend:
    """The model to train, where its backend runs it."""
    import torch

    kind, mesh = backends.backend(args.backend), devices.mesh_of(args)
    if args.model:
        backend = kind.load(args.model, torch.float32, mesh)
    else:
        vae = _drawn(kind, Path(args.config), args.seed)
        if mesh is not None:
            vae.place_on(mesh)
        backend = kind(kind.placed(vae))
    if not kind.compiled_by_jax:
        _channels_last(backend.vae)
    return backend


def _drawn(kind: type[backends.Backend], path: Path, seed: int) -> Any:
    from cogvideox_torchax.train.start import initialize

    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a config ({error})") from error
    vae = kind.model_class().from_config(config)
    initialize(vae, seed=seed)
    return vae


def _channels_last(vae: Any) -> None:
    """Lays kernels out as PyTorch's convolutions on a CPU like them: half the time of a step."""
    import torch

    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in vae.parameters():
        if weight.ndim in layouts:
            weight.data = weight.data.contiguous(memory_format=layouts[weight.ndim])
