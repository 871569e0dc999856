"""The share of the bundled pipeline's videos that show their prompts, and what each choice costs of it.

Of dtypes and weights in eight bits also the error of a step, and how far videos change.

    python -m benchmarks.prompts       # on a CPU; then python -m benchmarks draw

Writes results/prompts.json, and the pictures of docs/tiny-pipeline.md. The judge is that of
examples/train_pipeline.
"""

import argparse
import functools
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import diffusers
import numpy as np
import torch
from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline
from PIL import Image, ImageDraw

from benchmarks.pages import ROOT, TINY_PIPELINE, keep, kept
from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.pipelines.cache_options import config_of
from cogvideox_torchax.vae.tolerances import psnr, rms_error
from examples.train_pipeline.scenes import (
    FRAMES,
    GROUPS,
    SCENES,
    TOKENS,
    Scene,
    caption,
    drawn,
    group,
    render,
    sample,
    shares,
)

PICTURES = (ROOT / "docs" / "images" / "tiny-pipeline.png", TINY_PIPELINE / "videos.png")
STEPS, GUIDANCE = 20, 1.5
PLAIN = f"float32, {STEPS} steps, guidance {GUIDANCE}"
ROUNDED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    **{
        f"{name}`--weights {weights}`": {**options, "weights": weights}
        for name, options in {"": {}, "bfloat16, ": {"dtype": "bfloat16"}}.items()
        for weights in ("int8", "int8-dynamic")
    },
}
CHOICES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "PyTorch, float32": {"ported": False},
    **ROUNDED,
    "mesh of 2 x 4": {"mesh": (2, 4)},
    **{f"{steps} steps": {"steps": steps} for steps in (50, 25, 10)},
    **{f"guidance {guidance:g}": {"guidance": guidance} for guidance in (1, 3, 6)},
    **{
        f"`{name}`": {"scheduler": name}
        for name in (
            *("CogVideoXDPMScheduler", "DDIMScheduler", "DDPMScheduler", "DPMSolverMultistepScheduler"),
            *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler"),
        )
    },
    **{
        f"`--cache {name}`": {"cache": name}
        for name in ("first-block:0.1", "first-block:0.2", "pab", "taylorseer", "fastercache")
    },
}
"""By name: what differs from float32 on one device of JAX, with the pipeline's own scheduler."""


@functools.cache
def pipeline(
    dtype: str = "float32", mesh: tuple[int, int] | None = None, weights: Any = None, ported: bool = True
) -> Any:
    """Return the bundled pipeline, ported to JAX or not."""
    pipe = CogVideoXPipeline.from_pretrained(TINY_PIPELINE, dtype=getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    return port(pipe, mesh=make_mesh(*mesh) if mesh else None, weights=weights) if ported else pipe


def videos(scenes: list[Scene], choice: dict[str, Any]) -> list[np.ndarray]:
    """Return the videos of prompts of the scenes, (T, H, W, 3) in [0, 1], with a choice of `CHOICES`."""
    options = dict(choice)
    where = {name: options.pop(name) for name in ("dtype", "mesh", "weights", "ported") if name in options}
    scheduler, cache = options.pop("scheduler", None), options.pop("cache", None)
    options = {"steps": STEPS, "guidance": GUIDANCE} | options
    pipe = pipeline(**where)
    own = pipe.scheduler
    if scheduler:
        pipe.scheduler = getattr(diffusers, scheduler).from_config(own.config)
    if cache:
        pipe.transformer.enable_cache(
            config_of(cache, steps=STEPS, guided=True, timestep=lambda: pipe.current_timestep)
        )
    try:
        return sample(pipe, scenes, 1, batch=12, **options)  # one size of batch: each is compiled
    finally:
        pipe.scheduler = own
        if cache:
            pipe.transformer.disable_cache()


def errors(choice: dict[str, Any], found: dict[str, list[Scene]], made: dict[str, Any]) -> dict[str, float]:
    """Return a step's root-mean-square error against float32, over its result's, and videos' PSNR in dB.

    `found` are scenes, and `made` their videos with one of `ROUNDED`, both by group.
    """
    scenes, got = ([each for group in groups.values() for each in group] for groups in (found, made))
    want = [clip for group in found.values() for clip in videos(group, {})]
    step, exact = (prediction(pipeline(**each), scenes) for each in (choice, {}))
    return {
        "step": rms_error(step, exact) / rms_error(exact, torch.zeros(())),
        "psnr": psnr(*(torch.from_numpy(np.stack(clips)) for clips in (got, want)), peak=1.0),
    }


def prediction(pipe: Any, scenes: list[Scene]) -> torch.Tensor:
    """Return latents after one step of one: what the transformer predicts, as pure noise leaves nothing."""
    rng = np.random.default_rng(1)
    result = pipe(
        [caption(scene, rng) for scene in scenes],
        num_frames=FRAMES,
        max_sequence_length=TOKENS,
        num_inference_steps=1,
        guidance_scale=1,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
    )
    return runtime.to_torch(result.frames).float()


def judge_errors(count: int) -> dict[str, float]:
    """Return the shares of clips that the judge reads wrong, of rendered ones and of reconstructed ones."""
    rng, vae = np.random.default_rng(2), pipeline(ported=False).vae
    scenes = [SCENES[i] for i in rng.integers(len(SCENES), size=count)]
    clips = [render(scene, rng) for scene in scenes]
    return {
        "rendered": 1 - shares(scenes, clips)["all"],
        "reconstructed": 1 - shares(scenes, [reconstructed(vae, clip) for clip in clips])["all"],
    }


@torch.inference_mode()
def reconstructed(vae: Any, clip: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(clip).float().permute(3, 0, 1, 2)[None] * 2 - 1
    y = vae.decode(vae.encode(x).latent_dist.mode()).sample[0]
    return (y.permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1).numpy()


def picture(scenes: list[Scene], clips: list[np.ndarray]) -> Image.Image:
    """Return a picture with two columns of clips: three frames of each, below the words of its scene."""
    cells = []
    for scene, clip in zip(scenes, clips, strict=True):
        frames = np.pad(clip[:: len(clip) // 2], ((0, 0), (0, 4), (0, 4), (0, 0)), constant_values=1)
        row = np.concatenate(frames, 1)
        label = Image.new("RGB", (row.shape[1], 14), "white")
        words = f"{scene.color} {scene.shape}, {scene.motion}, on {scene.background}: {group(scene)}"
        ImageDraw.Draw(label).text((0, 1), words, fill="black")
        cells.append(np.concatenate([np.asarray(label), (row * 255).round().astype(np.uint8)]))
    columns = np.concatenate(cells[::2]), np.concatenate(cells[1::2])
    return Image.fromarray(np.concatenate(columns, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="How many videos show their prompts.")
    parser.add_argument("choices", nargs="*", metavar="CHOICE", help="measure these anew (default: all)")
    parser.add_argument("--count", type=int, default=48, help="scenes of each group; a fourth for choices")
    args = parser.parse_args()
    if unknown := {*args.choices} - {*CHOICES}:
        parser.error(f"got {', '.join(unknown)}: one of {', '.join(CHOICES)}")
    report = kept("prompts") if args.choices else {"judge": judge_errors(4 * args.count), "choices": {}}
    report = {"errors": {}} | report | {"count": args.count}
    for name in args.choices or CHOICES:
        count = args.count // (1 if name == PLAIN else 4)
        found = {each: drawn(each, count) for each in GROUPS}
        made = {each: videos(scenes, CHOICES[name]) for each, scenes in found.items()}
        report["choices"][name] = {each: shares(scenes, made[each]) for each, scenes in found.items()}
        if name in ROUNDED:
            report["errors"][name] = errors(ROUNDED[name], found, made)
        print(
            name,
            report["errors"].get(name),
            {each: result["all"] for each, result in report["choices"][name].items()},
            flush=True,
        )
        keep("prompts", report, "jax", "diffusers", "torch")
        if name == PLAIN:
            shown = [
                (scene, clip)
                for each in GROUPS
                for scene, clip in zip(found[each][:4], made[each][:4], strict=True)
            ]
            for path in PICTURES:
                with whole_file(path) as temporary:
                    picture(*map(list, zip(*shown, strict=True))).save(temporary, "PNG")


if __name__ == "__main__":
    main()
