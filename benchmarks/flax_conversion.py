"""How long, and in how much memory, does the full-size model convert from diffusers' format to Flax and back?

    JAX_PLATFORMS=cpu PYTHONPATH=. python benchmarks/flax_conversion.py

Random weights in the published model's sizes are written as sharded safetensors, loaded into the Flax build,
saved again, and compared bit for bit. Each step runs in a process of its own, so that its peak is its own.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "flax_conversion.json"


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


def convert(directory: Path, dtype: str, back: bool) -> dict[str, Any]:
    """Loads the model into the Flax build, and saves it where `back`; times and peaks of this process."""
    import jax
    from flax import nnx

    from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX

    jax.block_until_ready(jax.numpy.zeros(()))
    before = _peak_bytes()
    start = time.perf_counter()
    vae = FlaxAutoencoderKLCogVideoX.from_pretrained(directory, dtype=dtype, param_dtype=dtype)
    jax.block_until_ready(nnx.state(vae, nnx.Param))
    measured = {"load_s": time.perf_counter() - start, "load_peak_bytes": _peak_bytes() - before}
    if back:
        start = time.perf_counter()
        vae.save_pretrained(f"{directory}-again")
        measured |= {"save_s": time.perf_counter() - start, "save_peak_bytes": _peak_bytes() - before}
    return measured


def equal_bits(directory: Path) -> bool:
    """Whether the shards and the file that was saved again hold the same names and the same bytes."""
    from cogvideox_torchax.vae import checkpoint

    again = Path(f"{directory}-again")
    first = {
        name: (t.dtype, t.tobytes()) for name, t in checkpoint.read_tensors(directory.glob("*.safetensors"))
    }
    second = {
        name: (t.dtype, t.tobytes()) for name, t in checkpoint.read_tensors(again.glob("*.safetensors"))
    }
    return first == second


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_a_process(step: str, *arguments: str) -> Any:
    command = [sys.executable, __file__, "--step", step, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(output.stdout.splitlines()[-1])


def _measure(dtype: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        directory = f"{temporary}/vae"
        model = _in_a_process("write", directory, dtype)
        load = _in_a_process("load", directory, dtype)
        both = _in_a_process("both", directory, dtype)
        same = _in_a_process("compare", directory, dtype)
    return {
        **model,
        **load,
        "save_s": both["save_s"],
        "save_peak_bytes": both["save_peak_bytes"],
        "load_peak_over_weights": load["load_peak_bytes"] / model["bytes"],
        "save_peak_over_weights": both["save_peak_bytes"] / model["bytes"],
        "bits_equal": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", nargs="?")
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args()
    if args.step:
        directory, dtype = args.arguments
        steps = {
            "write": lambda: write_model(Path(directory), dtype),
            "load": lambda: convert(Path(directory), dtype, back=False),
            "both": lambda: convert(Path(directory), dtype, back=True),
            "compare": lambda: equal_bits(Path(directory)),
        }
        print(json.dumps(steps[args.step]()))
        return
    packages = ("torch", "diffusers", "jax", "flax", "safetensors")
    report = {
        "question": "full-size model, diffusers' format to Flax and back: time, peak memory, bits",
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        **{dtype: _measure(dtype) for dtype in ("float32", "bfloat16")},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
