"""`reconstruct`: encode a video and decode it again, without a file of latents."""

import argparse
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.cli import common, devices
from cogvideox_torchax.dataset.clip import ClipPart, DecodeClip
from cogvideox_torchax.files import latents, video
from cogvideox_torchax.vae.directions import DECODE, ENCODE


def run(args: argparse.Namespace) -> None:
    clip = common.open_clip(args)
    with devices.process_group(args) as group:
        fps = args.fps or clip.info.fps
        video.check_writing(args.output, fps)  # raises before the model is loaded
        common.take_bundled_model(args)  # sets `args.model` if no --model is given
        vae = common.load_vae(args.model, args.backend, args.dtype, group.mesh)
        # `result_lengths` has the number of frames of each chunk's result.
        latent_frames = sum(ENCODE.result_lengths(vae, clip.num_frames))
        frames_out = sum(DECODE.result_lengths(vae, latent_frames))
        # What an .mp4 takes over from its source (times, sound, pixel shape), and messages for the user.
        timing, messages = _source_timing(args, clip, frames_out)
        with group.writing(args.output, fps, timing) as sink:
            clock = common.announcing_clock(args)
            written = video.write_all(sink, _reconstruction(vae, clip, latent_frames, args, group))
    if group.is_first:
        for line in messages:
            common.say(line)
        common.print_results(
            args,
            clock,
            {
                "frames_in": clip.num_frames,
                "frames_out": written,
                "sound": "copied" if timing.sound else "left out" if clip.info.sound else "none",
                "size": f"{clip.framing.height} x {clip.framing.width}",
            },
        )


def _reconstruction(
    vae: Any, clip: ClipPart, latent_frames: int, args: argparse.Namespace, group: devices.ProcessGroup
) -> Iterator[torch.Tensor]:
    """Encode and decode a clip; yield each chunk's frames, uint8 (1, 3, t, H, W).

    Latents are decoded as soon as there are enough for a chunk, so memory does not grow with the clip. Of
    several processes each gets the latents, which it decodes, and only the first gets the frames.
    """
    encoder = common.encoder_of(args, vae, group.fetch_to_all)
    decoder = common.unit_of(DecodeClip, args, vae, group.fetch_to_first)
    scale = vae.spatial_compression_ratio
    shape = latent_frames, clip.framing.height // scale, clip.framing.width // scale

    def encoded() -> Iterator[torch.Tensor]:
        """Yield the latents of each chunk, from the first on; called again if decoding ran out of memory."""
        return (chunk[latents.TENSOR] for chunk in encoder.encode_chunks(clip))

    return decoder.decode_chunks(encoded, shape)


def _source_timing(
    args: argparse.Namespace, clip: ClipPart, frames_out: int
) -> tuple[video.SourceTiming, list[str]]:
    """Return what the output takes over from its source, and messages about what is lost or changed.

    Only an .mp4 at the source's rate takes over times and sound: the times if no frame is added or lost.
    """
    info, messages = clip.info, []
    is_mp4 = Path(args.output).suffix.lower() == ".mp4"
    at_own_rate = args.fps in (None, info.fps)  # None, without --fps, is the source's rate
    if frames_out != clip.num_frames:
        messages.append(
            f"{clip.num_frames} frames were read, {frames_out} written: {common.LENGTHS_THAT_STAY}"
        )
    keeps_times = info.variable and at_own_rate and is_mp4 and frames_out == clip.num_frames
    if info.variable:
        shortest, longest = (1000 * float(gap) for gap in info.gaps)
        messages.append(
            f"the frame rate varies, {shortest:.0f} to {longest:.0f} ms from frame to frame: "
            + ("frames keep their times" if keeps_times else "the output's does not")
        )
    sound = info.path if info.sound in video.COPIED_AUDIO_CODECS and at_own_rate and is_mp4 else None
    if info.sound and info.sound not in video.COPIED_AUDIO_CODECS:
        messages.append(
            f"the sound is left out: an .mp4 takes {', '.join(video.COPIED_AUDIO_CODECS)}, not {info.sound}"
        )
    elif info.sound and sound is None:
        messages.append("the sound is left out: it is kept in an .mp4 at the source's own rate")
    times = info.times[: clip.num_frames] if keeps_times else ()
    # The sound is cut where the last frame that was read ends, 1 / fps after that frame's time. It is copied
    # only at the source's rate, so `info.fps` is the output's rate, too.
    seconds = times[-1] + 1 / info.fps if times else clip.num_frames / info.fps
    size, source_size = (clip.framing.height, clip.framing.width), (info.height, info.width)
    # A pixel's width over its height. Resizing makes square pixels. Frames that are cropped, or keep their
    # size, keep the shape of the pixels.
    pixel = info.pixel if clip.framing.crop or size == source_size else Fraction(1)
    return video.SourceTiming(times, sound, seconds, pixel), messages
