"""Train a small text-to-video pipeline from nothing: render clips, encode them, train, and judge its videos.

    python examples/train_pipeline/train.py -o run

README.md has the recipe and its reasons; scenes.py has the clips and the judge. The same command again goes
on from the last checkpoint.
"""

import argparse
import json
import re
import string
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from diffusers.training_utils import EMAModel
from scenes import FRAMES, GROUPS, SCENES, TOKENS, Scene, caption, drawn, group, render, sample, shares
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import T5Config, T5EncoderModel, T5Tokenizer
from transformers.optimization import get_wsd_schedule

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
TRANSFORMER = {
    **{"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "time_embed_dim": 32},
    **{"text_embed_dim": T5["d_model"], "max_text_seq_length": TOKENS},
    **{"sample_frames": FRAMES, "sample_height": 8, "sample_width": 12},  # height and width of latents
    # A video has 3 x 4 x 6 patches: with higher frequencies, the sines of their positions differ more.
    **{"spatial_interpolation_scale": 0.5, "temporal_interpolation_scale": 0.5},
}
CLIPS = 480
"""Clips in a file of latents."""
WARM_UP = 100
AVERAGE = 0.995
"""Share of the weights' average that a late step keeps."""


def make_tokenizer() -> T5Tokenizer:
    """Return a tokenizer with a piece for each word of the prompts, and one for each other character."""
    rng = np.random.default_rng(0)
    words = {word for scene in SCENES for word in re.findall(r"\w+", caption(scene, rng))}
    characters = {"▁", *string.ascii_letters, *string.digits, *",.-!?'"}
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [(f"▁{word}", -3.0) for word in sorted(words)] + [(one, -6.0) for one in sorted(characters)]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0)


def make_pipeline(vae: str | Path) -> CogVideoXPipeline:
    """Return a pipeline with random weights, except for its VAE's."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    transformer = CogVideoXTransformer3DModel(**TRANSFORMER)
    for (
        block
    ) in transformer.transformer_blocks:  # at first modulated alike at all times, with gates of a half
        for norm in (block.norm1, block.norm2):
            nn.init.zeros_(norm.linear.weight)
            bias = torch.tensor([0.0, 0, 0.5] * 2).repeat_interleave(norm.linear.out_features // 6)
            norm.linear.bias.data = bias
    nn.init.zeros_(transformer.proj_out.weight)
    config = T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **T5)
    text_encoder = T5EncoderModel(config)
    # At first one head looks at the next token, and one at the previous token: else it takes thousands of
    # steps to learn which of two colors is the shape's. The rows are T5's buckets of distances.
    attention: Any = text_encoder.encoder.block[0].layer[0]
    attention.SelfAttention.relative_attention_bias.weight.data[[17, 1], [0, 1]] = 5.0
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=AutoencoderKLCogVideoX.from_pretrained(vae).eval(),
        transformer=transformer,
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            snr_shift_scale=1.0,  # the latents' deviation is 0.45
        ),
    )


@torch.inference_mode()
def encode(vae: AutoencoderKLCogVideoX, path: Path, rng: np.random.Generator) -> None:
    """Render clips of seen scenes, and write their scenes and their latents, bfloat16 (N, T, C, H, W)."""
    seen = [scene for scene in SCENES if group(scene) == "seen"]
    scenes = [seen[i] for i in rng.integers(len(seen), size=CLIPS)]
    latents = []
    for start in range(0, CLIPS, 8):
        clips = np.stack([render(scene, rng) for scene in scenes[start : start + 8]])
        x = torch.from_numpy(clips).float().permute(0, 4, 1, 2, 3) * 2 - 1
        with torch.autocast("cpu", torch.bfloat16):
            mean = vae.encode(x).latent_dist.mode() * vae.config.scaling_factor
        latents.append(mean.transpose(1, 2).bfloat16())
    save({"latents": torch.cat(latents), "scenes": scenes}, path)


def save(value: Any, path: Path) -> None:
    """Write a file of torch, whole or not at all."""
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load(paths: list[Path]) -> tuple[torch.Tensor, list[Scene]]:
    """Return the latents and the scenes of all files that `encode` wrote."""
    found = [torch.load(path, weights_only=False) for path in paths]
    return torch.cat([one["latents"] for one in found]), [scene for one in found for scene in one["scenes"]]


class Denoiser(nn.Module):
    """What is trained: the text encoder and the transformer, as one module."""

    def __init__(self, pipe: CogVideoXPipeline):
        super().__init__()
        self.text_encoder, self.transformer = pipe.text_encoder, pipe.transformer

    def forward(self, tokens: torch.Tensor, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the prediction of v, of the shape of `noisy`."""
        return self.transformer(noisy, self.text_encoder(tokens)[0], times, return_dict=False)[0]


def make_optimizers(denoiser: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the transformer's blocks, and AdamW for all other weights."""
    named = dict(denoiser.named_parameters())
    inner = [w for name, w in named.items() if "blocks" in name and w.ndim == 2 and "norm" not in name]
    others = [weight for weight in named.values() if not any(weight is one for one in inner)]
    return [
        torch.optim.Muon(inner, lr=2.5 * rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


class Training:
    """A pipeline, its optimizers with their learning rates, the average of its weights, and the log."""

    def __init__(self, pipe: CogVideoXPipeline, args: argparse.Namespace):
        self.pipe, self.args, self.denoiser = pipe, args, Denoiser(pipe).train()
        self.weights = [*self.denoiser.parameters()]
        self.optimizers = make_optimizers(self.denoiser, args.rate)
        self.rates = [
            get_wsd_schedule(one, WARM_UP, args.decay, args.steps, decay_type="linear")
            for one in self.optimizers
        ]
        self.average = EMAModel(self.weights, decay=AVERAGE)
        self.parts = [self.denoiser, self.average, *self.optimizers, *self.rates]
        self.alphas = pipe.scheduler.alphas_cumprod.float()
        self.losses: list[float] = []

    def step(self, number: int, latents: torch.Tensor, scenes: list[Scene]) -> None:
        """Make step `number`, from 0 on, which alone determines its batch and its noise."""
        count = self.args.batch
        rng = np.random.default_rng((self.args.seed, number))
        index = rng.integers(len(scenes), size=count)
        prompts = ["" if rng.random() < 0.1 else caption(scenes[i], rng) for i in index]
        tokens = self.pipe.tokenizer(prompts, padding="max_length", max_length=TOKENS, return_tensors="pt")
        clean = latents[index].float()
        noise = torch.from_numpy(rng.standard_normal(clean.shape, np.float32))
        # Spread evenly over the batch, and more of them with much noise, where the shape is decided.
        even = torch.from_numpy((np.arange(count) + rng.random(count)) / count)
        times = (len(self.alphas) * even**self.args.exponent).long()
        signal, sigma = (a.sqrt().view(-1, 1, 1, 1, 1) for a in (self.alphas[times], 1 - self.alphas[times]))
        # On a CPU, the gradient of PyTorch's fused attention takes twice as long as that of the plain one.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            guess = self.denoiser(tokens.input_ids, signal * clean + sigma * noise, times)
        loss = nn.functional.mse_loss(guess.float(), signal * noise - sigma * clean)
        self.denoiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0, error_if_nonfinite=True)
        for one in (*self.optimizers, *self.rates):
            one.step()
        self.average.step(self.weights)
        self.losses.append(loss.item())

    def score(self, count: int) -> dict[str, Any]:
        """Return the shares of right videos of the average of the weights, for each group of scenes."""
        self.average.store(self.weights)
        self.average.copy_to(self.weights)
        result = {}
        for name in GROUPS:
            found = shares(drawn(name, count), sample(self.pipe, drawn(name, count), 0))
            result[name] = {key: round(value, 3) for key, value in found.items()}
        self.average.restore(self.weights)
        return result

    def save(self, number: int) -> None:
        """Write the state after `number` steps, whole or not at all."""
        state = {"step": number, "parts": [part.state_dict() for part in self.parts]}
        save(state, self.args.output / "checkpoint.pt")

    def restore(self) -> int:
        """Set everything to the checkpoint's state, if there is one; return its number of steps."""
        path = self.args.output / "checkpoint.pt"
        if not path.exists():
            return 0
        checkpoint = torch.load(path)
        for part, state in zip(self.parts, checkpoint["parts"], strict=True):
            part.load_state_dict(state)
        return checkpoint["step"]


def train(args: argparse.Namespace) -> None:
    """Encode what is not encoded, train from the last checkpoint on, and save the pipeline."""
    args.output.mkdir(parents=True, exist_ok=True)
    pipe = make_pipeline(args.vae)
    pipe.set_progress_bar_config(disable=True)
    paths = [args.output / f"latents-{i}.pt" for i in range(args.files)]
    for i, path in enumerate(paths):
        if not path.exists():
            encode(pipe.vae, path, np.random.default_rng((args.seed, i)))
            print(f"wrote {path}", flush=True)
    latents, scenes = load(paths)
    training = Training(pipe, args)
    log, start = args.output / "log.json", time.process_time()
    done = training.restore()
    entries = [e for e in json.loads(log.read_text()) if e["step"] <= done] if done else []
    for number in range(done, args.steps):
        training.step(number, latents, scenes)
        if (number + 1) % args.every and number + 1 < args.steps:
            continue
        entry = {"step": number + 1, "loss": round(float(np.mean(training.losses[-args.every :])), 5)}
        entry["seconds"] = round(time.process_time() - start)  # of one process, since the last start
        if (number + 1) % (4 * args.every) == 0 or number + 1 == args.steps:
            entry |= training.score(args.scenes)
        entries.append(entry)
        training.save(number + 1)
        log.write_text(json.dumps(entries, indent=0))
        print(json.dumps(entry), flush=True)
    training.average.copy_to(training.weights)
    pipe.to(dtype=torch.bfloat16).save_pretrained(args.output / "pipeline")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small text-to-video pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets latents, checkpoint, log, pipeline/",
    )
    add(
        "--vae",
        default=files("cogvideox_torchax") / "assets" / "tiny-pipeline" / "vae",
        help="the directory of a VAE",
    )
    add("--files", type=int, default=4, help=f"of latents, each of {CLIPS} clips")
    add("--steps", type=int, default=2600, help="of the whole training")
    add("--decay", type=int, default=600, help="last steps, in which the learning rate falls to 0")
    add("--batch", type=int, default=16, help="clips in a step")
    add("--rate", type=float, default=2e-3, help="of learning; that of the inner matrices is 2.5 times this")
    add("--exponent", type=float, default=0.4, help="of the times: a smaller one takes more with much noise")
    add("--seed", type=int, default=0, help="of clips, batches and noise")
    add("--every", type=int, default=250, help="steps between checkpoints; scores come a fourth as often")
    add("--scenes", type=int, default=8, help="of each group, for a score")
    return parser


if __name__ == "__main__":
    train(parser().parse_args())
