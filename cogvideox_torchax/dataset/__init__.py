"""A data set's clips, encoded to latents and decoded again, one clip at a time, on one machine or on Ray."""

from cogvideox_torchax.dataset.clip import Bucket, Clip, ClipConfig, ClipError, DecodeClip, EncodeClip

__all__ = ["Bucket", "Clip", "ClipConfig", "ClipError", "DecodeClip", "EncodeClip"]
