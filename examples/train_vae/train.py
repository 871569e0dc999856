"""Train CogVideoX's VAE on clips: the decoder of a published one, or both halves from random weights.

    python examples/train_vae/train.py clips/ -o run --model zai-org/CogVideoX-5b --validate other.mp4

README.md has the options and their reasons; clips.py reads and crops the clips.
"""

import argparse
import contextlib
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from clips import Sampler, files, load, scaled
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch import nn
from tqdm import tqdm

from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh

CHECKPOINT = "checkpoint.pt"
WEIGHTS = {"l1": 1.0, "mse": 4.0, "kl": 1e-3}
"""Weights of the losses, by name; `--color-weight` is that of "color"."""

RATE, FINE_TUNING_RATE = 1e-3, 1e-5
"""Default learning rates: from random weights, and from given ones."""
WARM_UP = 100
"""Most steps over which the learning rate rises, before it falls by a cosine."""

AVERAGE = 0.9995
"""Share of the weights' average that a late step keeps."""

STILLS_END = 0.12
"""Share of a training from random weights in which most batches are stills."""


def load_vae(args: argparse.Namespace) -> Any:
    """Return the VAE to train, in float32 on its device; only what has `requires_grad` is trained."""
    if args.model:
        vae = AutoencoderKLCogVideoX.from_pretrained(args.model, subfolder="vae")
        vae.encoder.requires_grad_(args.train_encoder)
    else:
        torch.manual_seed(args.seed)
        vae = AutoencoderKLCogVideoX.from_config(json.loads(Path(args.config).read_text()))
        initialize(vae)
    if args.gradient_checkpointing:
        vae.enable_gradient_checkpointing()
    if args.device == "jax":
        if args.dp * args.tp > 1:
            vae.place_on(make_mesh(args.dp, args.tp))
    else:
        store_channels_last(vae)
    return vae.to(args.device).train()


def store_channels_last(vae: nn.Module) -> None:
    """Store the kernels of convolutions channels last: on a CPU PyTorch then takes half the time."""
    for weight in vae.parameters():
        if weight.ndim > 3:
            weight.data = weight.data.movedim(1, -1).contiguous().movedim(-1, 1)


def initialize(vae: Any) -> None:
    """Draw a VAE's weights so that it learns from the first step on.

    Each convolution keeps its input's variance; residual branches begin small; spatial norms begin close to
    plain norms; the posterior begins with a small variance, and frames begin close to gray.
    """
    smaller = {"conv2.conv.weight": 0.3, "conv_b.conv.weight": 0.3, "conv_y.conv.weight": 0.2}
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            if weight.ndim > 3:  # a kernel; of a residual branch, or of a spatial norm's shift and gain
                factor = next((factor for end, factor in smaller.items() if name.endswith(end)), 1.0)
                weight.normal_(std=factor * weight[0].numel() ** -0.5)
            elif name.endswith("bias"):
                weight.fill_(1.0 if name.endswith("conv_y.conv.bias") else 0.0)
        log_variances = slice(vae.config.latent_channels, None)
        vae.encoder.conv_out.conv.weight[log_variances] *= 0.02
        vae.encoder.conv_out.conv.bias[log_variances] = -6.0
        vae.decoder.conv_out.conv.weight *= 0.3


class Muon(torch.optim.Muon):
    """PyTorch's Muon, which takes matrices alone, for the kernels (O, I, ...) of convolutions.

    A kernel that is stored channels last is a matrix of O rows in its own memory.
    """

    def __init__(self, kernels: list[nn.Parameter], **options: Any):
        self.kernels = kernels
        views = [kernel.detach().movedim(1, -1).view(len(kernel), -1) for kernel in kernels]
        super().__init__([nn.Parameter(view) for view in views], **options)

    def step(self, closure: None = None) -> None:
        """Update the kernels by their gradients."""
        for kernel, matrix in zip(self.kernels, self.param_groups[0]["params"], strict=True):
            matrix.grad = kernel.grad.movedim(1, -1).flatten(1)
        super().step(closure)


def make_optimizers(vae: nn.Module, rate: float, *, muon: bool) -> list[torch.optim.Optimizer]:
    """Return AdamW for what is trained; with `muon`, Muon for the kernels of the inner convolutions.

    Inner convolutions are all but the first and the last of each half. Both optimizers take the same learning
    rate, as Muon scales its updates to the size of AdamW's (`match_rms_adamw`).
    """
    trained = {name: weight for name, weight in vae.named_parameters() if weight.requires_grad}
    kernels = {
        name: weight
        for name, weight in trained.items()
        if muon and weight.ndim > 3 and "conv_in" not in name and "conv_out" not in name
    }
    others = [weight for name, weight in trained.items() if name not in kernels]
    adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=1e-3)
    if not kernels:
        return [adamw]
    return [adamw, Muon([*kernels.values()], lr=rate, weight_decay=1e-3, adjust_lr_fn="match_rms_adamw")]


def losses(vae: Any, x: torch.Tensor, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return the losses of a batch (N, C, T, H, W) in [-1, 1], by name.

    "l1" and "mse" are errors of the reconstruction; "color" is the root mean square error of the frames' mean
    colors; "kl" is the posterior's divergence from a normal distribution, a mean over the latents' values.
    """
    with autocast(x.device):
        posterior = vae.encode(x).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        noise = torch.from_numpy(rng.standard_normal(mean.shape, np.float32)).to(x.device)
        error = vae.decode(mean + torch.exp(0.5 * logvar) * noise).sample.float() - x
    return {
        "l1": error.abs().mean(),
        "mse": error.square().mean(),
        "kl": 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean(),
        "color": (error.mean((3, 4)).square().mean() + 1e-12).sqrt(),  # its gradient is finite at 0
    }


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which PyTorch's layers compute in bfloat16; on JAX they stay in float32."""
    on_jax = device.type == "jax"
    return torch.autocast("cpu" if on_jax else device.type, torch.bfloat16, enabled=not on_jax)


class Training:
    """A VAE, its optimizers with their learning rates, the average of its weights, and the log.

    Args:
        vae: the VAE to train.
        sampler: draws the batches.
        args: the options of the command line.
    """

    def __init__(self, vae: Any, sampler: Sampler, args: argparse.Namespace):
        self.vae, self.sampler, self.args = vae, sampler, args
        self.log: list[dict[str, Any]] = []
        self.trained = [weight for weight in vae.parameters() if weight.requires_grad]
        muon = bool(args.config) and args.device != "jax"  # arrays of JAX have no views
        self.optimizers = make_optimizers(vae, args.rate, muon=muon)
        warm_up = min(WARM_UP, args.steps // 10)
        self.rates = [get_cosine_schedule_with_warmup(one, warm_up, args.steps) for one in self.optimizers]
        self.average = EMAModel(self.trained, decay=AVERAGE)
        self.parts = [vae, self.average, *self.optimizers, *self.rates]

    def step(self, number: int) -> None:
        """Make step `number`, from 0 on, which alone determines its batch and its noise; log its losses."""
        args, rng = self.args, np.random.default_rng((self.args.seed, number))
        learns_stills = args.config and number < STILLS_END * args.steps
        frames = 1 if rng.random() < (0.85 if learns_stills else 0.1) else args.frames
        count = args.batch * (4 if frames == 1 else 1)  # a still takes less time than a clip
        found = losses(self.vae, self.sampler.batch(rng, count, frames).to(args.device), rng)
        self.vae.zero_grad()
        weights = WEIGHTS | {"color": args.color_weight}
        sum(weight * found[name] for name, weight in weights.items()).backward()
        norm = nn.utils.clip_grad_norm_(self.trained, 1.0, error_if_nonfinite=True)
        for one in (*self.optimizers, *self.rates):
            one.step()
        self.average.step(self.trained)
        values = {name: loss.item() for name, loss in found.items()}
        self.log.append({"step": number + 1, **values, "gradient": norm.item()})

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Any]:
        """Yield the VAE with the average of its weights, without gradients; then put the weights back."""
        with torch.no_grad():
            weights = [weight.clone() for weight in self.trained]
            self._assign(self.average.shadow_params)
            yield self.vae
            self._assign(weights)

    def _assign(self, values: list[torch.Tensor]) -> None:
        # Not by `store` and `restore` of the average: they go through the host, as arrays on a mesh cannot.
        for weight, value in zip(self.trained, values, strict=True):
            weight.copy_(value)

    def validate(self, number: int, clips: dict[str, torch.Tensor]) -> None:
        """Reconstruct held-out clips, uint8 (1, C, T, H, W) by name; log and print their PSNR in dB."""
        with self.averaged() as vae:
            for name, clip in clips.items():
                x = scaled(clip).to(self.args.device)
                with autocast(x.device):
                    y = vae.decode(vae.encode(x).latent_dist.mode().float()).sample.float()
                error = ((y.clamp(-1, 1) + 1) * 127.5).round().cpu() - clip
                found = 10 * math.log10(255**2 / error.square().mean().item())
                self.log.append({"step": number, "clip": name, "psnr": found})
                tqdm.write(f"step {number}: {name} {found:.2f} dB", file=sys.stderr)

    def save(self, number: int) -> None:
        """Write the state after `number` steps, whole or not at all, and the log, which it has too."""
        states = moved([part.state_dict() for part in self.parts], torch.Tensor.cpu)
        checkpoint = {"options": options(self.args), "step": number, "log": self.log, "parts": states}
        temporary = self.args.output / f"{CHECKPOINT}.part"
        torch.save(checkpoint, temporary)
        temporary.replace(self.args.output / CHECKPOINT)
        (self.args.output / "log.json").write_text(json.dumps(self.log, indent=0))

    def restore(self, path: Path) -> int:
        """Set everything to a checkpoint's state; return its number of steps.

        Raises:
            ValueError: a checkpoint of a run with other options.
        """
        checkpoint = torch.load(path)
        for name, value in options(self.args).items():
            was = checkpoint["options"][name]
            if resolved(was) != resolved(value):
                raise ValueError(
                    f"the checkpoint {path} is of a run with {name} {was}, not {value}: resume it with the "
                    "options that it began with, or give another -o"
                )
        self.log = checkpoint["log"]
        states = moved(checkpoint["parts"], lambda tensor: tensor.to(self.args.device))
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        return checkpoint["step"]


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a resumed run must share."""
    return {name: value for name, value in vars(args).items() if name not in ("output", "resume")}


def resolved(value: Any) -> Any:
    """Return an option's value to compare: paths are absolute, so that `clips` equals `./clips/`."""
    return jax.tree.map(lambda leaf: Path(leaf).resolve() if isinstance(leaf, str) else leaf, value)


def moved(states: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree of dictionaries and lists with its tensors moved to another device."""
    return jax.tree.map(lambda leaf: move(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf, states)


def train(args: argparse.Namespace) -> None:
    """Run the training; raise `ValueError` or `OSError` for options or clips that it cannot take."""
    path = args.output / CHECKPOINT
    height, width = args.size
    for is_wrong, words in (
        (args.resume and not path.exists(), f"the checkpoint {path}: there is none to resume"),
        (
            path.exists() and not args.resume,
            f"the checkpoint {path}: it exists: --resume it, or give another -o",
        ),
        (
            args.frames < 1 or args.frames % 8 != 1,
            f"got --frames {args.frames}: give 8 n + 1, such as 1, 9, 17 or 49",
        ),
        (
            min(height, width) < 8 or height % 8 or width % 8,
            f"got --size {height}x{width}: give multiples of 8, such as 64x64",
        ),
        (args.every < 1, f"got --every {args.every}: at least 1"),
        (args.output.is_file(), f"got -o {args.output}, which is a file: give a directory"),
    ):
        if is_wrong:
            raise ValueError(words)
    sources = [load(text, args.frames, (height, width)) for text in files(args.clips)]
    if not sources:
        raise ValueError(f"no video or picture in {', '.join(args.clips)}")
    held_out = {}
    for text in args.validate:
        clip = load(text, args.frames, (8, 8))[: args.frames]
        rows, columns = (side // 8 * 8 for side in clip.shape[2:])
        held_out[text] = clip[:, :, :rows, :columns].transpose(0, 1)[None].contiguous()
    args.rate = args.rate or (RATE if args.config else FINE_TUNING_RATE)
    training = Training(load_vae(args), Sampler(sources, (height, width), augment=args.augment), args)
    args.output.mkdir(parents=True, exist_ok=True)
    done = training.restore(path) if args.resume else 0
    if not args.resume:
        training.validate(0, held_out)
    elif done == args.steps:
        print(
            f"the run is finished: {path} has step {done} of {args.steps}; for more steps, begin a new run "
            f"from its weights: --model {args.output / 'vae'}, and another -o",
            file=sys.stderr,
        )
    for number in tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step"):
        training.step(number)
        if (number + 1) % args.every == 0 or number + 1 == args.steps:
            last = [entry["l1"] for entry in training.log[-args.every :] if "l1" in entry]
            tqdm.write(f"step {number + 1}: mean L1 {sum(last) / len(last):.4f}", file=sys.stderr)
            training.validate(number + 1, held_out)
            training.save(number + 1)
    with training.averaged() as vae:
        (copy.deepcopy(vae).to(torch.bfloat16) if args.bfloat16 else vae).save_pretrained(args.output / "vae")
    print(f"wrote {args.output / 'vae'}", file=sys.stderr)


def size(text: str) -> tuple[int, int]:
    """Return (height, width) of a text such as "64x96"."""
    height, width = map(int, text.split("x"))
    return height, width


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Train CogVideoX's VAE on clips.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("clips", nargs="+", help="videos, pictures, or directories of both; a.mp4#0-100 for frames 0 to 99")
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets checkpoint.pt, log.json and vae/",
    )
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--model", metavar="DIR_OR_ID", help="fine-tune its decoder")
    weights.add_argument("--config", metavar="FILE", help="a config.json: train from random weights")
    add("--train-encoder", action="store_true", help="with --model: the encoder too; latents change")
    add("--device", choices=("cpu", "cuda", "jax"), default="cpu", help="where to train")
    add("--dp", type=int, default=1, help="with jax: devices that share a batch")
    add("--tp", type=int, default=1, help="with jax: devices that share a frame's width")
    add("--steps", type=int, default=1000, help="of the whole training")
    add("--batch", type=int, default=1, help="clips in a batch")
    add("--frames", type=int, default=17, help="in a clip, 8 n + 1")
    add("--size", type=size, default="64x64", metavar="HEIGHTxWIDTH", help="of the crops, multiples of 8")
    add("--rate", type=float, help=f"of learning; {RATE} for --config, {FINE_TUNING_RATE} for --model")
    add("--seed", type=int, default=0, help="of random weights, batches and noise")
    add("--color-weight", type=float, default=0.0, help="of the loss on frames' mean colors; L1 has 1")
    add("--augment", action="store_true", help="mirror, reverse, tint and cut clips")
    add("--gradient-checkpointing", action="store_true", help="less memory, more time")
    add("--validate", action="append", default=[], metavar="CLIP", help="a held-out clip; repeatable")
    add("--every", type=int, default=250, help="steps between validations and checkpoints")
    add("--bfloat16", action="store_true", help="round the trained model to bfloat16")
    add("--resume", action="store_true", help="go on from the checkpoint")
    return parser


def main() -> None:
    try:
        train(parser().parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; --resume goes on from the last checkpoint, if there was one")


if __name__ == "__main__":
    main()
