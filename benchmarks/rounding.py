"""Rounding error of bfloat16 at the published widths: PyTorch's, direct convolution's and Winograd's.

    PYTHONPATH=. python benchmarks/rounding.py

Random weights; root-mean-square errors against float32. A layer is GroupNorm, SiLU and a causal convolution,
as `norm_conv3d` computes them: each pair of channels once, eight frames of normal inputs. It is rounded as in
the reference that the tests hold the kernel to. Then the whole model encodes and decodes nine frames in the
forms that a TPU takes, each `norm_conv3d` rounded so.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

from cogvideox_torchax import runtime
from cogvideox_torchax.files import reports
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import rms_error
from cogvideox_torchax.versions import versions
from jax_kernels import NormParams
from jax_kernels.common import tiles
from jax_kernels.common.tiles import SWITCH
from jax_kernels.conv3d import xla
from jax_kernels.group_norm import moments
from jax_kernels.group_norm import xla as norm_xla
from jax_kernels.norm_conv3d import reference, tpu
from jax_kernels.norm_conv3d.transforms import TRANSFORMS, filtered
from tests.reference import as_on_a_tpu, latents, video

OUTPUT = Path(__file__).parent / "results" / "rounding.json"
PUBLISHED = {"block_out_channels": (128, 256, 256, 512), "layers_per_block": 3, "norm_num_groups": 32}
FRAMES, HEIGHT, WIDTH = 8, 12, 16
DIRECT = 0
"""The tile of direct convolution."""


def shapes(stock: AutoencoderKLCogVideoX) -> list[tuple[int, int]]:
    """Return the channels into and out of each convolution after a norm."""
    kernels = [part.shape for name, part in stock.named_parameters() if name.endswith("conv.weight")]
    return sorted({(shape[1], shape[0]) for shape in kernels if shape[2:] == (3, 3, 3) and shape[1] > 16})


def by_torch(x: torch.Tensor, *parts: torch.Tensor, groups: int) -> torch.Tensor:
    """Return GroupNorm, SiLU and the causal convolution of (N, C, T, H, W), in the dtype of all of them."""
    weight, shift, kernel, bias = parts
    hidden = torch.nn.functional.silu(torch.nn.functional.group_norm(x, groups, weight, shift, 1e-6))
    hidden = torch.cat([hidden[:, :, :1]] * 2 + [hidden], dim=2)
    return torch.nn.functional.conv3d(hidden, kernel, bias, padding=(0, 1, 1))


def layer(inputs: int, outputs: int) -> dict[str, Any]:
    """Return the errors of one layer."""
    torch.manual_seed(0)
    x = torch.randn(1, inputs, FRAMES, HEIGHT, WIDTH)
    kernel = torch.randn(outputs, inputs, 3, 3, 3) / (27 * inputs) ** 0.5
    parts = x, 1 + 0.2 * torch.randn(inputs), 0.2 * torch.randn(inputs), kernel, 0.2 * torch.randn(outputs)
    groups = PUBLISHED["norm_num_groups"]
    want = by_torch(*parts, groups=groups)
    half = by_torch(*(part.bfloat16() for part in parts), groups=groups)
    pixels, weight, shift, taps, bias = (jnp.asarray(part.numpy(), jnp.bfloat16) for part in parts)
    operands = jnp.moveaxis(pixels, 1, -1), NormParams(weight, shift), taps.transpose(2, 3, 4, 1, 0), bias
    errors = {}
    for tile in (DIRECT, *TRANSFORMS):
        y, *_ = reference.norm_conv3d(*operands, num_groups=groups, tile=tile)
        errors[tile] = rms_error(torch.from_numpy(np.array(jnp.moveaxis(y, -1, 1), np.float32)), want)
    return row(f"{inputs} to {outputs}", want, half, errors)


def row(name: str, want: torch.Tensor, half: torch.Tensor, errors: dict[int, float]) -> dict[str, Any]:
    scale = rms_error(want, torch.zeros(()))
    result = {"name": name, "torch": rms_error(half.float(), want) / scale}
    return result | {str(tile): error / scale for tile, error in errors.items()}


def whole(stock: AutoencoderKLCogVideoX) -> list[dict[str, Any]]:
    """Return the errors of the whole model."""
    half = copy.deepcopy(stock).bfloat16()
    results = []
    for kind, given in ("encode", video(9, height=48, width=72)), ("decode", latents(3, height=6, width=9)):
        want, by_half = (run(vae, kind, given.to(vae.dtype)) for vae in (stock, half))
        vae, errors = FlaxVAEForPipelines.from_diffusers(half), {}
        for filters in (False, True):
            with rounded_as_the_kernel(filters):
                got = run(vae, kind, runtime.to_jax(given.bfloat16()))
            errors[4 if filters else DIRECT] = rms_error(runtime.to_torch(got).float(), want)
        results.append(row(f"whole model, {kind}", want, by_half, errors))
    return results


@torch.no_grad()
def run(vae: Any, kind: str, given: Any) -> Any:
    return vae.decode(given).sample if kind == "decode" else vae.encode(given).latent_dist.parameters


@contextlib.contextmanager
def rounded_as_the_kernel(filters: bool) -> Iterator[None]:
    """Have ops take a TPU's forms by XLA, `norm_conv3d` with its kernel's rounding."""

    def summed(frames: Any, kernel: Any, columns: Any) -> Any:
        wide, length = frames.astype(jnp.float32), frames.shape[1] - 2
        if not filters or length not in (4, 8):
            return xla.summed(wide, kernel.astype(jnp.float32), columns)

        def multiply(part: Any, taps: Any) -> Any:
            return xla.summed(part.astype(jnp.float32), taps[None].astype(jnp.float32), columns)

        return filtered(frames, kernel, length // 2, multiply)

    forms = SimpleNamespace(
        summed=summed,
        same_width_padding=xla.same_width_padding,
        add_bias_and_residual=xla.add_bias_and_residual,
    )
    jax.clear_caches()  # what was traced with another rounding
    with as_on_a_tpu() as patch:
        patch.setenv(SWITCH, f"off:group_norm,spatial_norm,upsample,downsample,{filters}")
        patch.setattr(moments, "_shard_column_moments", lambda target, x: norm_xla.column_moments(x))
        patch.setattr(tiles, "SMALLEST", 1)
        patch.setattr(tpu, "xla", forms)
        patch.setattr(tpu, "convolved", tpu._xla_form)
        yield


def main() -> None:
    torch.manual_seed(0)
    stock = AutoencoderKLCogVideoX(**PUBLISHED).eval()
    rows = [layer(*shape) for shape in shapes(stock)] + whole(stock)
    reports.write_json(OUTPUT, {"versions": versions("torch", "jax", "flax", "diffusers"), "rows": rows})


if __name__ == "__main__":
    main()
