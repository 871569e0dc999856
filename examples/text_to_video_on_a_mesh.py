"""Generate a video from a prompt, over several devices.

    python examples/text_to_video_on_a_mesh.py 'A cat walks on the grass.' -o cat.mp4 --dp 2 --tp 4

Without a TPU, eight devices on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu
"""

import argparse

import torch
from diffusers import CogVideoXPipeline

from cogvideox_torchax import make_mesh, port, save_video


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A video from a prompt, over several devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("prompt", help="what to show")
    parser.add_argument("-o", "--output", default="video.mp4", help="the file to write")
    parser.add_argument("--model", default="zai-org/CogVideoX-5b", help="a directory or a hub id")
    parser.add_argument("--dp", type=int, default=1, help="devices for the halves of guidance")
    parser.add_argument(
        "--tp", type=int, help="devices for tokens and frames' width; None for all that --dp leaves"
    )
    parser.add_argument("--frames", type=int, default=49, help="of the video")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    args = parser.parse_args()

    pipe = CogVideoXPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
    port(pipe, mesh=make_mesh(dp=args.dp, tp=args.tp))  # in place of pipe.to("cuda")
    print(pipe.transformer.parallelism)  # what is split over the devices, and why
    made = pipe(
        args.prompt,
        num_frames=args.frames,
        num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(args.seed),
        max_sequence_length=pipe.transformer.config["max_text_seq_length"],
    )
    save_video(made.frames[0], args.output, fps=8)


if __name__ == "__main__":
    main()
