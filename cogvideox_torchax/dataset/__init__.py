"""Many clips: a data set's videos to latents and back, one clip a unit of work, whatever runs them."""

from cogvideox_torchax.dataset.clip import Bucket, Clip, ClipConfig, DecodeClip, EncodeClip
from cogvideox_torchax.dataset.names import ClipError

__all__ = ["Bucket", "Clip", "ClipConfig", "ClipError", "DecodeClip", "EncodeClip"]
