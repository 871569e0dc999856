"""Small videos of tests: their frames, written and read back."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from cogvideox_torchax.files import video


def moving_frames(count=9, height=24, width=40):
    t, row, column = torch.meshgrid(*map(torch.arange, (count, height, width)), indexing="ij")
    return torch.stack([row * 8 + 4 * t, column * 5, 20 * t])[None].clamp(0, 255).to(torch.uint8)


def write(path, frames, rate=10):
    """Write frames as a video, as the commands do."""
    with video.writing(path, rate) as write_chunk:
        for chunk in frames.split(8, dim=2):
            write_chunk(chunk)


def encode_file(path, *given, format=None, **options):
    """Encode frames into a file, or behind what a buffer holds, as `encode` does."""
    with av.open(path, "w", format) as container:
        encode(container, *given, **options)


def encode(container, frames, codec="libx264", rate=10, times=None, pixel=1, **options):
    """Encode frames into an open container by PyAV alone, at times of their own in milliseconds if given."""
    stream = container.add_stream(
        codec,
        rate=rate,
        height=frames.shape[3],
        width=frames.shape[4],
        pix_fmt="yuv420p",
        disposition=av.stream.Disposition.default,
        sample_aspect_ratio=Fraction(pixel),
        # Without trees of macroblocks, equal frames give equal packets.
        options=options | ({"mbtree": "0"} if codec == "libx264" else {}),
    )
    if times:
        stream.codec_context.time_base = Fraction(1, 1000)
    for number, pixels in enumerate(frames[0].permute(1, 2, 3, 0).contiguous().numpy()):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        if times:
            frame.pts, frame.time_base = times[number], Fraction(1, 1000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def read_all(path, size=None, count=None):
    return torch.stack([video.framed(frame, size) for _, frame in video.Video(path).frames(at_most=count)], 2)


def pictures(directory):
    """Return the pictures of a directory as one array (T, H, W, 3) of integers."""
    return np.stack([np.asarray(Image.open(path), int) for path in sorted(Path(directory).iterdir())])
