"""Generate a video from a picture and a prompt, with a LoRA that is loaded, scaled, and removed.

    python examples/image_to_video_with_a_lora.py cat.png 'A cat walks.' --lora my-lora -o cat.mp4

It also writes a video from the same noise without the LoRA: cat-without.mp4.
"""

import argparse
from pathlib import Path

import torch
from diffusers import CogVideoXImageToVideoPipeline
from diffusers.utils import load_image

from cogvideox_torchax import port, save_video


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A video from a picture, with a LoRA and without.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("image", help="the first frame")
    parser.add_argument("prompt", help="what to show")
    parser.add_argument("--lora", required=True, help="a directory or a hub id")
    parser.add_argument("--scale", type=float, default=1.0, help="of the LoRA")
    parser.add_argument("-o", "--output", type=Path, default="video.mp4", help="the file to write")
    parser.add_argument("--model", default="zai-org/CogVideoX-5b-I2V", help="a directory or a hub id")
    parser.add_argument("--frames", type=int, default=49, help="of the video")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    args = parser.parse_args()

    pipe = CogVideoXImageToVideoPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
    port(pipe)
    pipe.load_lora_weights(args.lora, adapter_name="mine")  # before porting or after, both work
    pipe.set_adapters(["mine"], [args.scale])

    def generate(path: Path) -> None:
        made = pipe(
            image=load_image(args.image),
            prompt=args.prompt,
            num_frames=args.frames,
            num_inference_steps=args.steps,
            generator=torch.Generator("cpu").manual_seed(0),
            max_sequence_length=pipe.transformer.config["max_text_seq_length"],
        )
        save_video(made.frames[0], path, fps=8)

    generate(args.output)
    pipe.unload_lora_weights()
    generate(args.output.with_stem(f"{args.output.stem}-without"))


if __name__ == "__main__":
    main()
