"""Fine-tune the decoder on your own clip, with a torch optimizer and the VAE on JAX.

    python examples/finetune_the_vae.py my.mp4 -o my-vae --steps 100

The encoder is not changed, so a pipeline's transformer still fits the latents. The saved model loads in
diffusers without this package. `cogvideox-torchax train` does more: many clips, both halves, checkpoints,
averaged weights.
"""

import argparse

import torch
from diffusers import AutoencoderKLCogVideoX

from cogvideox_torchax import enable, port, runtime
from cogvideox_torchax.files import video
from cogvideox_torchax.vae.pixels import from_uint8


def clip(path: str, frames: int, height: int, width: int) -> torch.Tensor:
    """Return the first frames of a video, float32 (1, 3, T, H, W) in [-1, 1]."""
    read = video.read_frames(path, video.Framing(height, width), frames)
    return from_uint8(torch.stack(list(read), dim=2), "float32")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The decoder fine-tuned on a clip of one's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("video", help="to fine-tune on")
    parser.add_argument("-o", "--output", default="vae", metavar="DIR", help="of the model")
    parser.add_argument(
        "--model", default="zai-org/CogVideoX-5b", help="a VAE's directory, or a pipeline's hub id"
    )
    parser.add_argument("--subfolder", help='"vae" for a whole pipeline')
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer")
    parser.add_argument("--frames", type=int, default=9, help="of the clip, from its start")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(240, 360), metavar=("HEIGHT", "WIDTH"), help="in pixels"
    )
    parser.add_argument("--rate", type=float, default=1e-5, help="of learning")
    args = parser.parse_args()

    frames = clip(args.video, args.frames, *args.size)
    vae = port(AutoencoderKLCogVideoX.from_pretrained(args.model, subfolder=args.subfolder))
    enable()
    vae = vae.to("jax").train()
    vae.enable_gradient_checkpointing()
    vae.encoder.requires_grad_(False)
    optimizer = torch.optim.AdamW(vae.decoder.parameters(), lr=args.rate)
    x = runtime.to_jax(frames)
    with torch.no_grad():
        z = vae.encode(x).latent_dist.mode()
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = (vae.decode(z).sample - x).abs().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: L1 {float(loss.detach()):.4f}")
    vae.save_pretrained(args.output)


if __name__ == "__main__":
    main()
