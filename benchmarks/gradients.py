"""Error of gradients through both builds against PyTorch's autograd on stock diffusers, and their memory.

    PYTHONPATH=. python benchmarks/gradients.py

A small model with every code path, random weights: a video is encoded, its mean decoded again, each value of
the result weighed. Float32: the largest error of a gradient over the largest of its own, the worst of all
weights. bfloat16: the root-mean-square error over that of PyTorch in bfloat16, against float32, of all values
together and of the median weight. Memory: bytes that the torchax build keeps between the two passes.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false",
)
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from cogvideox_torchax import enable, make_mesh, port, runtime
from cogvideox_torchax.files import reports
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.tolerances import relative_error
from cogvideox_torchax.versions import versions
from tests import reference

OUTPUT = Path(__file__).parent / "results" / "gradients.json"
FRAMES = (1, 5, 9)
Gradients = dict[str, torch.Tensor]


def weights_of_loss(shape: tuple[int, ...]) -> torch.Tensor:
    """Return the weight in the loss of each value of the reconstruction (N, C, T, H, W)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def by_torch(vae: Any, x: torch.Tensor) -> tuple[Gradients, int]:
    """Return the gradients of a torch model, and the bytes that JAX holds between the two passes."""
    put = runtime.to_jax if vae.device.type == "jax" else lambda tensor: tensor
    x = put(x.to(vae.dtype))
    vae.zero_grad()
    before = held()
    frames = vae.decode(vae.encode(x).latent_dist.mean).sample
    kept = held() - before
    loss = (frames * put(weights_of_loss(tuple(frames.shape)).to(vae.dtype))).sum()
    loss.backward()
    return {name: runtime.to_torch(value.grad).float() for name, value in vae.named_parameters()}, kept


def held() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def by_flax(vae: Any, x: torch.Tensor) -> Gradients:
    """Return the gradients of the Flax build."""
    graph, parameters, rest = nnx.split(vae, nnx.Param, ...)

    def channels_last(tensor: torch.Tensor) -> Any:
        return jnp.asarray(np.moveaxis(tensor.numpy(), 1, -1), vae.dtype)

    @jax.jit
    def gradients(parameters: Any) -> Any:
        def loss(parameters: Any) -> Any:
            model = nnx.merge(graph, parameters, rest)
            frames = model.decode(model.encode(channels_last(x)).mean)
            shape = (frames.shape[0], frames.shape[-1], *frames.shape[1:-1])
            return (frames * channels_last(weights_of_loss(shape))).sum()

        return jax.grad(loss)(parameters)

    found = weights.state_dict(gradients(parameters))
    return {name: torch.from_numpy(np.array(value, np.float32)) for name, value in found.items()}


def built(stock: Any, build: str, devices: int, anew: bool, dtype: torch.dtype) -> Any:
    """Return a build of the stock model, over so many devices, that recomputes blocks or not."""
    mesh = make_mesh(1, devices) if devices > 1 else None
    if build == "flax":
        wrapper = FlaxVAEForPipelines.from_diffusers(copy.deepcopy(stock).to(dtype))
        vae = (port(wrapper, mesh=mesh) if mesh else wrapper).flax_vae
    else:
        vae = port(copy.deepcopy(stock).to(dtype), mesh=mesh)
        enable()
        vae = vae.to("jax").train()
    if anew:
        vae.enable_gradient_checkpointing()
    return vae


def worst(got: Gradients, want: Gradients) -> float:
    assert got.keys() == want.keys()
    return max(relative_error(got[name], value) for name, value in want.items())


def rms_ratios(got: Gradients, half: Gradients, want: Gradients) -> tuple[float, float]:
    """Root-mean-square errors over those of `half`: of all values together, and of the median weight."""
    squares = [
        torch.stack([(found[name] - value).square().sum() for name, value in want.items()])
        for found in (got, half)
    ]
    own, others = squares
    return float((own.sum() / others.sum()).sqrt()), float((own / others).sqrt().median())


def measure(stock: Any, build: str, frames: int, devices: int, anew: bool) -> dict[str, Any]:
    x = reference.video(frames)
    want, _ = runtime.without_torchax(by_torch, stock, x)
    half, _ = runtime.without_torchax(by_torch, copy.deepcopy(stock).bfloat16(), x)
    result: dict[str, Any] = {"build": build, "frames": frames, "devices": devices, "rematerialized": anew}
    for dtype in (torch.float32, torch.bfloat16):
        vae = built(stock, build, devices, anew, dtype)
        got, kept = (by_flax(vae, x), None) if build == "flax" else by_torch(vae, x)
        if dtype == torch.float32:
            result |= {"float32_worst_relative_error": worst(got, want), "kept_bytes": kept}
        else:
            together, median = rms_ratios(got, half, want)
            result |= {"bfloat16_rms_over_pytorchs": together, "of_the_median_weight": median}
        jax.clear_caches()
    return result


def main() -> None:
    stock = reference.small_vae(**reference.THREE_LEVELS)
    cases = [("torchax", n, devices, anew) for n in FRAMES for devices in (1, 8) for anew in (False, True)]
    cases += [("flax", 9, 1, False), ("flax", 9, 1, True), ("flax", 9, 8, False)]
    results = []
    for case in cases:
        results.append(measure(stock, *case))
        print(results[-1], flush=True)
    found = versions("torch", "torchax", "jax", "flax", "diffusers")
    reports.write_json(
        OUTPUT, {"model": {**reference.SMALL, **reference.THREE_LEVELS}, "versions": found, "cases": results}
    )


if __name__ == "__main__":
    main()
