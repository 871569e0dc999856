"""The two directions of a VAE, encoding and decoding."""

from enum import StrEnum
from typing import Any

from cogvideox_torchax.vae import chunks


class Direction(StrEnum):
    """One of a VAE's two directions: a string, "encode" or "decode", with further attributes.

    Attributes:
        takes: the kind of input, "video" or "latents".
        network: the name of the model's attribute that has the network.
        channels_key: the config's field that has the number of input channels.
        _frames_key: the name of the model's attribute that has the number of frames of a steady chunk.
    """

    takes: str
    network: str
    channels_key: str
    _frames_key: str

    ENCODE = "encode", "video", "encoder", "in_channels", "num_sample_frames_batch_size"
    DECODE = "decode", "latents", "decoder", "latent_channels", "num_latent_frames_batch_size"

    # Python calls this once for each member, with the values above.
    def __new__(cls, name: str, takes: str, network: str, channels_key: str, frames_key: str) -> "Direction":
        member = str.__new__(cls, name)
        member._value_ = name
        member.takes, member.network = takes, network
        member.channels_key, member._frames_key = channels_key, frames_key
        return member

    def scale(self, spatial_compression_ratio: int) -> int:
        """Return the number of input pixels for each latent pixel, along one axis."""
        return spatial_compression_ratio if self is ENCODE else 1

    def chunks(self, vae: Any, frames: int) -> list[range]:
        """Return the range of frames of each chunk of an input."""
        return chunks.plan(frames, getattr(vae, self._frames_key))

    def result_lengths(self, vae: Any, frames: int) -> list[int]:
        """Return the number of frames of each chunk's result."""
        # Encoding halves the number of frames `steps` times, and decoding doubles it as often.
        result_length = chunks.encoded_length if self is ENCODE else chunks.decoded_length
        steps = chunks.temporal_steps(vae.config["temporal_compression_ratio"])
        return [result_length(len(chunk), steps) for chunk in self.chunks(vae, frames)]


ENCODE, DECODE = Direction  # iterating over an enum gives its members in order
