"""diffusers' caches: their memory for CogVideoX-5b, and their error on the frames of a small pipeline.

The pipeline has random weights; results/caches.json keeps the figures for the table in docs/pipelines.md.

    python -m benchmarks.caches       # minutes, on a CPU; then python -m benchmarks draw
"""

import os
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import torch

from benchmarks.pages import RESULTS, estimate
from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.files.reports import load, table, write_json
from cogvideox_torchax.pipelines.cache_options import config_of
from cogvideox_torchax.plan import networks
from cogvideox_torchax.plan.chips import GIB
from cogvideox_torchax.vae.tolerances import psnr
from tests import small_pipelines

FORMAT = "cogvideox-torchax-caches/1"
RESULT = RESULTS / "caches.json"
RATIOS = RESULTS.parent / "ratios.json"
LATENTS: dict[str, Any] = {"frames": 13, "height": 60, "width": 90}
CHOICES = ("first-block:0.1", "first-block:0.2", "pab", f"magcache:{RATIOS}", "taylorseer", "fastercache")
HEAD = (
    "`--cache`",
    "arrays kept, one chip, GiB",
    "on each of eight, GiB",
    f"{networks.STEPS} steps on one v6e, estimate, s",
    f"small model: steps partly skipped, of {networks.STEPS}",
    "small model: PSNR, dB",
)


def measured() -> dict[str, Any]:
    """Return the report: by cache, GiB kept on one chip and on each of eight, skipped steps, PSNR in dB."""
    pipe = port(small_pipelines.build(transformer=small_pipelines.transformer("5b", num_layers=4)))
    plain, rows = _frames(pipe), {}
    for choice in CHOICES:
        # What a guided step of 5b for 49 frames of 480 x 720 keeps on a device for the next step.
        steps = [
            networks.step_work("5b", torch.bfloat16, make_mesh(*sizes), None, **LATENTS, cache=choice)
            for sizes in ((1, 1), (2, 4))
        ]
        kept = [step.kept_bytes / GIB for step in steps]
        pipe.transformer.enable_cache(
            config_of(choice, steps=networks.STEPS, guided=True, timestep=lambda: pipe.current_timestep)
        )
        quality = psnr(_frames(pipe), plain, peak=1.0)
        skipped = pipe.transformer.step_cache.computed.count(False)
        pipe.transformer.disable_cache()
        rows[choice.removesuffix(f":{RATIOS}")] = [*kept, skipped, quality]
        print(choice, kept, skipped, quality, flush=True)
    return {"format": FORMAT, "rows": rows}


def _frames(pipe: Any) -> torch.Tensor:
    """Return the frames, in [0, 1], that a pipeline generates from a fixed prompt and seed."""
    result = pipe(**small_pipelines.inputs("text", num_inference_steps=networks.STEPS))
    return runtime.to_torch(result.frames).float()


def _estimate(name: str, skipped: int) -> str:
    """Return the cell of the estimated seconds of a video with a cache; empty without an estimate.

    FirstBlockCache decides at run time which steps it skips: `skipped` is their number.
    """
    cache = name.partition(":")[0]
    if not (RESULTS / f"cached-{cache}.json").exists():
        return ""
    found = estimate(f"cached-{cache}")
    counts = (networks.STEPS - skipped, skipped) if cache == "first-block" else found["counts"]
    seconds = (program["seconds_with_collectives"] for program in found["programs"])
    return f"{sum(count * one for count, one in zip(counts, seconds, strict=True)):.1f}"


def extrapolated(estimates: list[dict[str, Any]]) -> str:
    """Return a sentence about steps whose programs were not compiled whole; empty if all were."""
    few = {each["summary"]["network"].partition(", from programs of ")[2] for each in estimates} - {""}
    if not few:
        return ""
    return f"\n\nSteps with a cache are extrapolated from programs of {' or '.join(sorted(few))} layers."


def drawn() -> str:
    """Return the table of the kept report."""
    step = estimate("network-step-5b-v6e-1")
    cells = [
        (f"`{name}`", f"{one:.2f}", f"{eight:.2f}", _estimate(name, skipped), str(skipped), f"{quality:.1f}")
        for name, (one, eight, skipped, quality) in load(RESULT, FORMAT)["rows"].items()
    ]
    plain = ("none", "", "", f"{networks.STEPS * step['summary']['with_collectives_s']:.1f}", "0", "")
    cached = [estimate(path.stem) for path in RESULTS.glob("cached-*.json")]
    return table(HEAD, [plain, *cells]) + extrapolated(cached)


TABLES = {("docs/pipelines.md", "caches"): drawn}

if __name__ == "__main__":
    write_json(RESULT, measured())
