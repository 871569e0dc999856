"""A VAE of the published widths with random weights, for measurements that need no more.

python benchmarks/random_model.py DIR [float32|bfloat16]
"""

import sys
from pathlib import Path
from typing import Any


def write_model(directory: Path, dtype: str) -> dict[str, Any]:
    """A full-size diffusers model with random weights, in shards."""
    import torch
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX().to(getattr(torch, dtype))
    vae.save_pretrained(directory, max_shard_size="300MB")
    return {
        "parameters": sum(tensor.numel() for tensor in vae.state_dict().values()),
        "tensors": len(vae.state_dict()),
        "bytes": sum(tensor.nbytes for tensor in vae.state_dict().values()),
        "shards": len(list(directory.glob("*.safetensors"))),
    }


if __name__ == "__main__":
    directory, dtype = [*sys.argv[1:], "float32"][:2]
    print(write_model(Path(directory), dtype))
