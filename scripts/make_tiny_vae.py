"""Makes the model directory that the package carries: CogVideoX's VAE, every layer of it, narrow, with random
weights.

python scripts/make_tiny_vae.py cogvideox_torchax/assets/tiny-vae
"""

import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX

WIDTHS = (8, 16, 16, 32)
GROUPS = 4


def make(directory: Path, seed: int = 0) -> None:
    """Writes config.json and bfloat16 weights, about 2 MB; affine parameters and biases are drawn too, so
    none is 0."""
    torch.manual_seed(seed)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=WIDTHS,
        norm_num_groups=GROUPS,
        scaling_factor=0.7,
        sample_height=480,
        sample_width=720,
    )
    for name, parameter in vae.named_parameters():
        if parameter.ndim == 1:
            center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter, mean=center, std=0.1)
    vae.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
