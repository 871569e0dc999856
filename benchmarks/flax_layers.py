"""How far is each layer of the Flax build from diffusers, at the published model's widths, in float32?

JAX_PLATFORMS=cpu python benchmarks/flax_layers.py
"""

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import torch

from tests.vae.nnx import layers

RESULT = Path(__file__).parent / "results" / "flax_layers.json"
PUBLISHED = {
    "conv_in": 8.8e-4,
    "group norm": 1.2e-2,
    "resnet block": 0.05,
    "down block": 0.3,
    "encoder": 0.6,
}
"""Mean absolute errors that the documents of an earlier Flax port of this VAE give for the same layers."""


def table() -> str:
    """The measured errors beside the published ones, in Markdown."""
    lines = ["| layer | largest relative error | tolerance | published port, mean absolute error |"]
    lines.append("| --- | --- | --- | --- |")
    for name, row in json.loads(RESULT.read_text())["layers"].items():
        published = f"{PUBLISHED[name]:.2g}" if name in PUBLISHED else ""
        lines.append(f"| {name} | {row['error']:.1e} | {row['tolerance']:.0e} | {published} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] == ["--table"]:
        print(table())
        return
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
