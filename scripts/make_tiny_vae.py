"""Makes the bundled model of a trained one: its weights rounded to bfloat16.

python scripts/make_tiny_vae.py run/vae cogvideox_torchax/assets/tiny-vae
"""

import sys

import torch

from cogvideox_torchax import AutoencoderKLCogVideoX


def make(trained: str, directory: str) -> None:
    """Write config.json and bfloat16 weights of the model in `trained` into a directory.

    Other files of the directory stay as they are.
    """
    vae = AutoencoderKLCogVideoX.from_pretrained(trained)
    config = {name: value for name, value in vae.config.items() if name != "_name_or_path"}
    rounded = AutoencoderKLCogVideoX.from_config(config).to(torch.bfloat16)
    rounded.load_state_dict(vae.state_dict())
    rounded.save_pretrained(directory)


if __name__ == "__main__":
    make(*sys.argv[1:])
