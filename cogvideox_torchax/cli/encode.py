"""`encode`: make a latent file of a video, or a directory of latents of many videos."""

import argparse

from cogvideox_torchax.cli import batch, common, devices, options
from cogvideox_torchax.dataset import sources
from cogvideox_torchax.files import latents, whole
from cogvideox_torchax.vae.directions import DECODE

COMMAND = options.Command(
    "encode a video, or a directory of them, to latents",
    "clip.mp4 -o clip.safetensors --model zai-org/CogVideoX-5b --dtype bfloat16",
    (
        options.Option(
            "video",
            help="any video that FFmpeg reads; or many: a directory of them, or a list, in .txt a path a "
            "line, in .jsonl objects with path, caption and so on",
        ),
        options.output(
            "the .safetensors file to write; of many, the directory, where what is done already is skipped",
            required=True,
        ),
        *options.model_options(),
        *options.clip_options(),
        options.TAKEN_FPS,
        options.SEED,
        options.TILING,
        *options.ENCODE_MANY,
        *options.PROCESSES,
        options.PROFILE,
    ),
    {"--size": "pass --height and --width"},
)


def run(args: argparse.Namespace) -> int:
    """Encode a video to a latent file, or many videos with `batch`; return the exit code."""
    common.check_video(args.video)
    if sources.is_many(args.video):
        return batch.encode(args)
    batch.check_one(args)  # raises for options that only many clips have
    if not args.output.endswith(".safetensors"):
        raise ValueError(
            f"cannot write {args.output}: latents of one clip go into a .safetensors file; "
            "many clips are a directory, or a list in .txt or .jsonl"
        )
    whole.check_file(args.output)
    clip = common.open_clip(args, fps=args.fps)
    if clip.info.variable and not args.fps:
        common.say("the frame rate varies, and every frame is taken: pass --fps for frames at even times")
    with devices.process_group(args) as group:
        common.take_bundled_model(args)  # sets `args.model` if no --model is given
        vae = common.load_vae(args.model, args.backend, args.dtype, group.mesh)
        clock = common.announcing_clock(args)
        encoded = common.encoder_of(args, vae, fps=args.fps).encode(clip)
        if not group.is_first:
            return 0
        latents.save(encoded, args.output)
        latent_frames = encoded.tensor.shape[2]
        decoded_frames = sum(DECODE.result_lengths(vae, latent_frames))  # the sum over the chunks
        if decoded_frames != clip.num_frames:
            common.say(
                f"{clip.num_frames} frames are {latent_frames} of latents, which decode to {decoded_frames}: "
                f"{common.LENGTHS_THAT_STAY}"
            )
    common.print_results(
        args,
        clock,
        {
            "frames": clip.num_frames,
            "size": f"{clip.framing.height} x {clip.framing.width}",
            "latents": " x ".join(map(str, encoded.tensor.shape)),
        },
    )
    return 0
