"""Generate a video in four steps, by a LoRA that was trained for so few, on all devices.

    python examples/few_steps.py 'A cat walks on the grass.' -o cat.mp4

The LoRA is TDM's for CogVideoX-2b (arXiv 2503.06674). It needs no guidance, so each step is a single pass.
The command line makes the same video: `generate --model zai-org/CogVideoX-2b --steps 4 --guidance-scale 1`,
with `--lora Luo-Yihong/TDM_CogVideoX-2B_LoRA`, `--scheduler CogVideoXDPMScheduler:timestep_spacing=trailing`.
"""

import argparse

import torch
from diffusers import CogVideoXDPMScheduler, CogVideoXPipeline

from cogvideox_torchax import make_mesh, port, save_video


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A video from a prompt, in four steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("prompt", help="what to show")
    parser.add_argument("-o", "--output", default="video.mp4", help="the file to write")
    parser.add_argument("--model", default="zai-org/CogVideoX-2b", help="a directory or a hub id")
    parser.add_argument("--lora", default="Luo-Yihong/TDM_CogVideoX-2B_LoRA", help="a directory or a hub id")
    parser.add_argument("--file", help="of the LoRA, where its directory has several")
    parser.add_argument(
        "--tp", type=int, help="devices that share a pass; None for all that divide the heads"
    )
    parser.add_argument("--frames", type=int, default=49, help="of the video")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    args = parser.parse_args()

    pipe = CogVideoXPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
    pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    pipe.load_lora_weights(args.lora, weight_name=args.file)
    pipe.fuse_lora()  # into the weights, so it costs no time
    pipe.unload_lora_weights()
    heads = pipe.transformer.config.num_attention_heads
    port(pipe, mesh=make_mesh(dp=1, tp=args.tp, heads=heads))  # there is no guidance for dp to split
    made = pipe(
        args.prompt,
        num_frames=args.frames,
        num_inference_steps=args.steps,
        guidance_scale=1,
        generator=torch.Generator("cpu").manual_seed(args.seed),
        max_sequence_length=pipe.transformer.config["max_text_seq_length"],
    )
    save_video(made.frames[0], args.output, fps=8)


if __name__ == "__main__":
    main()
