"""`save_video`: what pipelines return, and what they do not."""

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image

from cogvideox_torchax import runtime, save_video
from cogvideox_torchax.files.video import VideoError
from tests.files.test_video import moving_frames, read_all

FRAMES = moving_frames(5)
"""uint8 (1, 3, T, H, W)."""
SIGNED = FRAMES.float() / 127.5 - 1


def returned(output_type):
    """Return `frames` as a pipeline makes them of its VAE's."""
    return VideoProcessor(vae_scale_factor=8).postprocess_video(SIGNED, output_type)


TAKEN = {
    **{f"{kind}, whole": lambda kind=kind: returned(kind) for kind in ("np", "pt", "pil")},
    **{f"{kind}, the first": lambda kind=kind: returned(kind)[0] for kind in ("np", "pt", "pil")},
    "bytes": lambda: FRAMES[0].permute(1, 2, 3, 0).numpy(),
    "bytes in torch": lambda: FRAMES.transpose(1, 2),
    "a list of arrays": lambda: list(returned("np")[0]),
    "a list of tensors": lambda: list(returned("pt")[0]),
    "float16": lambda: returned("np").astype(np.float16),
    "on JAX": lambda: runtime.to_jax(returned("pt")[0]),
    "bfloat16 on JAX": lambda: runtime.to_jax(returned("pt").bfloat16()),
    "with transparency": lambda: [image.convert("RGBA") for image in returned("pil")[0]],
    "a hair beyond 1": lambda: returned("np") * 1.0001,
}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("torchax_is_on", [False, True], ids=["", "torchax on"])
@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_what_a_pipeline_returns_is_saved(tmp_path, make, torchax_is_on):
    frames = make()
    if torchax_is_on:
        runtime.enable()
    save_video(frames, tmp_path / "frames", fps=8)
    pictures = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "frames").iterdir())]
    want = runtime.without_torchax(lambda: FRAMES[0].permute(1, 2, 3, 0).numpy())
    assert np.abs(np.stack(pictures).astype(int) - want).max() <= 1


def test_a_saved_mp4_is_one_of_the_commands(tmp_path):
    save_video(returned("pil")[0], tmp_path / "a.mp4", fps=8)
    assert (read_all(tmp_path / "a.mp4").float() - FRAMES.float()).abs().mean() < 4


REFUSED = {
    "two videos": (
        lambda: returned("np").repeat(2, 0),
        r"2 videos, ndarray of shape \(2, 5, 24, 40, 3\): save fr",
    ),
    "a VAE's frames": (lambda: SIGNED, r"Tensor of shape \(1, 3, 5, 24, 40\).*transpose\(0, 1\) / 2 \+ 0.5"),
    "latents": (lambda: torch.zeros(1, 3, 16, 4, 6), "decode latents first"),
    "[-1, 1]": (lambda: SIGNED.transpose(1, 2), "from -1 to 0.569, floats.*frames / 2"),
    "[0, 255]": (lambda: returned("np") * 255, "values from 0 to 200, .*uint8"),
    "NaN": (lambda: returned("np") * np.nan, "values from nan"),
    "integers": (lambda: FRAMES.transpose(1, 2).int(), "Tensor of int32"),
    "a result": (lambda: {"frames": returned("np")}, "dict of object: give a pipeline's frames"),
    "a path": (lambda: "cat.mp4", "got str of"),
    "one image": (lambda: returned("pil")[0][0], r"got Image of shape \(24, 40, 3\)"),
    "no frame": (list, r"list of shape \(0,\)"),
    "two sizes": (lambda: [Image.new("RGB", (8, 8)), Image.new("RGB", (8, 16))], "frames of several sizes"),
    "an odd side": (lambda: FRAMES.transpose(1, 2)[..., 1:], "24 x 39 pixels: an .mp4 needs even sides"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused_by_name(tmp_path, make, words):
    with pytest.raises(VideoError, match=words):
        save_video(make(), tmp_path / "a.mp4", fps=8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fps", ["8", None])
def test_a_rate_is_a_number(tmp_path, fps):
    with pytest.raises(VideoError, match="give the number of frames a second"):
        save_video(returned("np"), tmp_path / "a.mp4", fps=fps)
