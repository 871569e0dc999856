"""How far is each layer of the Flax build from diffusers, at the published model's widths, in float32?

JAX_PLATFORMS=cpu python benchmarks/flax_layers.py
"""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import torch

from tests.flax import layers

RESULT = Path(__file__).parent / "results" / "flax_layers.json"


def main() -> None:
    with torch.no_grad():
        errors = {
            name: {"error": layers.error(layer, layers.PUBLISHED), "tolerance": layer.tolerance}
            for name, layer in layers.LAYERS.items()
        }
        frame_by_frame = layers.frame_by_frame_difference()
    packages = ("torch", "diffusers", "jax", "flax")
    report = {
        "question": "largest difference of each Flax layer to diffusers, over the largest reference value",
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "dtype": "float32",
        "layers": errors,
        "frame_by_frame": frame_by_frame,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
