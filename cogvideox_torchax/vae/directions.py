"""The two directions of a VAE, encoding and decoding, and the orders of axes of its arrays."""

from enum import StrEnum
from typing import Any

from cogvideox_torchax.vae import chunks

Axes = str
"""An order of the axes N (videos), C (channels), T (frames), H (rows) and W (columns), such as "NCTHW"."""

NCTHW: Axes = "NCTHW"
NTHWC: Axes = "NTHWC"
HWNTC: Axes = "HWNTC"


class Direction(StrEnum):
    """One of a VAE's two directions: a string, "encode" or "decode", with further attributes."""

    ENCODE = "encode"
    DECODE = "decode"

    @property
    def takes(self) -> str:
        """The kind of input, "video" or "latents"."""
        return "video" if self is ENCODE else "latents"

    @property
    def channels_key(self) -> str:
        """The config's field that has the number of input channels."""
        return "in_channels" if self is ENCODE else "latent_channels"

    def scale(self, spatial_compression_ratio: int) -> int:
        """Return the number of input pixels for each latent pixel, along one axis."""
        return spatial_compression_ratio if self is ENCODE else 1

    def chunks(self, vae: Any, frames: int) -> list[range]:
        """Return the range of frames of each chunk of an input."""
        encodes = self is ENCODE
        a_chunk = vae.num_sample_frames_batch_size if encodes else vae.num_latent_frames_batch_size
        return chunks.plan(frames, a_chunk)

    def result_lengths(self, vae: Any, frames: int) -> list[int]:
        """Return the number of frames of each chunk's result."""
        # Encoding halves the number of frames `steps` times, and decoding doubles it as often.
        result_length = chunks.encoded_length if self is ENCODE else chunks.decoded_length
        steps = chunks.temporal_steps(vae.config["temporal_compression_ratio"])
        return [result_length(len(chunk), steps) for chunk in self.chunks(vae, frames)]


ENCODE, DECODE = Direction  # iterating over an enum gives its members in order
