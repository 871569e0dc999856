"""diffusers' caches: their memory for CogVideoX-5b, and their error on the frames of a small pipeline.

The pipeline has random weights; results/caches.json keeps the figures for the table in docs/pipelines.md.

    python -m benchmarks.caches       # minutes, on a CPU; then python -m benchmarks draw
"""

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import torch

from benchmarks.pages import ROOT, keep
from benchmarks.plan import networks
from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines.cache_options import config_of
from cogvideox_torchax.vae.tolerances import psnr
from tests import small_pipelines

RATIOS = ROOT / "benchmarks" / "ratios.json"
LATENTS: dict[str, Any] = {"frames": 13, "height": 60, "width": 90}
CHOICES = ("first-block:0.1", "first-block:0.2", "pab", f"magcache:{RATIOS}", "taylorseer", "fastercache")


def measured() -> dict[str, list[float]]:
    """Return, by cache: GiB kept on one chip and on each of eight, skipped steps, PSNR in dB."""
    pipe = port(small_pipelines.build(transformer=small_pipelines.transformer("5b", num_layers=4)))
    plain, rows = _frames(pipe), {}
    for choice in CHOICES:
        # What a guided step of 5b for 49 frames of 480 x 720 keeps on a device for the next step.
        steps = [
            networks.step_work("5b", torch.bfloat16, make_mesh(*sizes), None, **LATENTS, cache=choice)
            for sizes in ((1, 1), (2, 4))
        ]
        kept = [step.about["kept_GiB"] for step in steps]
        pipe.transformer.enable_cache(
            config_of(choice, steps=networks.STEPS, guided=True, timestep=lambda: pipe.current_timestep)
        )
        quality = psnr(_frames(pipe), plain, peak=1.0)
        skipped = pipe.transformer.step_cache.computed.count(False)
        pipe.transformer.disable_cache()
        rows[choice.removesuffix(f":{RATIOS}")] = [*kept, skipped, quality]
        print(choice, kept, skipped, quality, flush=True)
    return rows


def _frames(pipe: Any) -> torch.Tensor:
    """Return the frames, in [0, 1], that a pipeline generates from a fixed prompt and seed."""
    result = pipe(**small_pipelines.inputs("text", num_inference_steps=networks.STEPS))
    return runtime.to_torch(result.frames).float()


if __name__ == "__main__":
    keep("caches", {"rows": measured()}, "jax", "diffusers")
