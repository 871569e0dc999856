"""How far a video over eight devices is from diffusers on one CPU, for meshes, widths and lengths.

    PYTHONPATH=. python benchmarks/mesh_errors.py

    PYTHONPATH=. python benchmarks/mesh_errors.py --table

Every mesh of eight devices with every width, one video and two, both builds: the tests hold a part of it to
the same tolerance. Float32, random weights of a small model with every code path, eight CPU devices that are
really one machine. Each case is computed whole and streamed; the error is the largest difference over the
largest absolute value of the reference.
"""

import argparse
import json
import os
import platform
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false",
)
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import copy
import itertools

import jax
import numpy as np
import torch

from cogvideox_torchax import enable, make_mesh, port, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference

LATENT_FRAMES = [1, 3, 5]
EVERY_LATENT_FRAMES = [1, 2, 3, 4, 5, 8, 9, 13]
EVERY_SAMPLE_FRAMES = [1, 5, 8, 9, 13, 16, 17, 29, 32, 33, 49]
MESHES = [(1, 8), (2, 4), (8, 1), (4, 2)]
VIDEOS = [1, 2]
LATENT_COLUMNS = [85, 90, 96, 170]
TILES = {"tile_sample_min_height": 48, "tile_sample_min_width": 240}


def on_mesh(backend: str, stock, dp: int, tp: int):
    mesh = make_mesh(dp, tp)
    if backend == "flax":
        return port(FlaxVAEForPipelines.from_diffusers(stock), mesh=mesh)
    vae = port(copy.deepcopy(stock), mesh=mesh)
    enable()
    return vae.to("jax")


def where_it_runs(vae, tensor):
    return runtime.to_jax(tensor) if vae.device.type == "jax" else tensor


def decode_error(stock, vae, z) -> float:
    want = stock.decode(z).sample
    whole = runtime.to_torch(vae.decode(where_it_runs(vae, z)).sample)
    streamed = torch.cat(list(vae.decode_stream(z)), 2)
    return max(relative_error(whole, want), relative_error(streamed, want))


def encode_error(stock, vae, x) -> float:
    want = stock.encode(x).latent_dist.parameters
    whole = runtime.to_torch(vae.encode(where_it_runs(vae, x)).latent_dist.parameters)
    streamed = torch.cat([part.parameters for part in vae.encode_stream(x)], 2)
    return max(relative_error(whole, want), relative_error(streamed, want))


def latents(frames: int, batch: int, width: int):
    return reference.latents(frames, batch=batch, height=2, width=width)


def video(frames: int, batch: int, width: int):
    return reference.video(frames, batch=batch, height=8, width=4 * width)


def measure(
    backend: str, stock, dp: int, tp: int, batch: int, width: int, lengths, tiles: bool = False
) -> dict:
    """The errors of one case, by kind and frames."""
    vae = on_mesh(backend, stock, dp, tp)
    if tiles:
        stock = copy.deepcopy(stock)
        for model in (stock, vae):
            model.enable_tiling(**TILES)
    decoded, encoded = lengths
    return {
        "backend": backend,
        "mesh": [dp, tp],
        "videos": batch,
        "latent_columns": width,
        "tiled": tiles,
        "decode": {n: decode_error(stock, vae, latents(n, batch, width)) for n in decoded},
        "encode": {n: encode_error(stock, vae, video(n, batch, width)) for n in encoded},
    }


def worst(result: dict) -> float:
    return float(np.max([*result["decode"].values(), *result["encode"].values()]))  # a NaN is the worst


def table(results: list[dict]) -> str:
    """The largest errors as Markdown, a row for a mesh: all its widths and batches together."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        key = result["backend"], tuple(result["mesh"]), tuple(result["decode"]), result["tiled"]
        groups.setdefault(key, []).append(result)
    rows = [["backend", "mesh", "videos", "latent columns", "latent frames", "decode", "encode"], ["---"] * 7]
    for (backend, (dp, tp), frames, tiled), members in groups.items():
        videos, columns = (
            ", ".join(map(str, sorted({member[name] for member in members})))
            for name in ("videos", "latent_columns")
        )
        errors = (np.max([[*member[kind].values()] for member in members]) for kind in ("decode", "encode"))
        tiles = ", in tiles" if tiled else ""
        rows.append(
            [
                backend,
                f"{dp} x {tp}",
                videos,
                columns + tiles,
                ", ".join(frames),
                *(f"{e:.1e}" for e in errors),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["torchax", "flax"], help="of flax, torchax")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/mesh_errors.json"))
    parser.add_argument("--table", action="store_true", help="print the output file as a table")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.output.read_text())["results"]))
        return
    torch.set_grad_enabled(False)
    stock = reference.small_vae(**reference.THREE_LEVELS)
    short = LATENT_FRAMES, [4 * frames - 3 for frames in LATENT_FRAMES]
    every = EVERY_LATENT_FRAMES, EVERY_SAMPLE_FRAMES
    results = []
    for backend in args.backends:
        cases = itertools.product(MESHES, VIDEOS, LATENT_COLUMNS)
        jobs: list = [(*mesh, videos, columns, short) for mesh, videos, columns in cases]
        jobs += [(1, 8, 1, 90, every), (1, 8, 1, 96, ([1], [1]), True)]
        for job in jobs:
            results.append(measure(backend, stock, *job))
            print(job[:4], worst(results[-1]), flush=True)
            document = {
                "versions": {
                    "jax": jax.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "platform": jax.devices()[0].platform,
                "tolerance": FLOAT32_RELATIVE,
                "results": results,
            }
            args.output.write_text(json.dumps(document, indent=1) + "\n")
    if not np.max([*map(worst, results)]) < FLOAT32_RELATIVE:
        raise SystemExit("a case is outside the tolerance")


if __name__ == "__main__":
    main()
