"""Rounding error of bfloat16 at the published widths: PyTorch's, direct convolution's and Winograd's.

    python -m benchmarks.rounding     # then python -m benchmarks draw

Weights are random, and errors are root-mean-square errors against float32. A layer is GroupNorm, SiLU and a
causal convolution, as `norm_conv3d` computes them, for each pair of channels and eight frames of normal
inputs. It is rounded as in the reference that the tests hold the kernel to. Then the whole model encodes and
decodes nine frames in the forms that a TPU takes, with each `norm_conv3d` rounded in the same way.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

from benchmarks.pages import keep
from cogvideox_torchax import runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import rms_error
from jax_kernels import NormParams
from jax_kernels.common import tiles
from jax_kernels.common.transforms import TRANSFORMS, filtered
from jax_kernels.conv3d import xla
from jax_kernels.group_norm import op as group_norm_op, xla as norm_xla
from jax_kernels.norm_conv3d import reference, tpu
from tests.reference import as_on_a_tpu, latents, video

GROUPS = 32
PUBLISHED = {"block_out_channels": (128, 256, 256, 512), "layers_per_block": 3, "norm_num_groups": GROUPS}
FRAMES, HEIGHT, WIDTH = 8, 12, 16
DIRECT = 0
"""The tile of direct convolution."""


def shapes(stock: AutoencoderKLCogVideoX) -> list[tuple[int, int]]:
    """Return the channels into and out of each convolution after a norm."""
    kernels = [part.shape for name, part in stock.named_parameters() if name.endswith("conv.weight")]
    return sorted({(shape[1], shape[0]) for shape in kernels if shape[2:] == (3, 3, 3) and shape[1] > 16})


def by_torch(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Return GroupNorm, SiLU and the causal convolution of (N, C, T, H, W), in the dtype of all arguments.

    `parts` are the norm's weight and bias, and the convolution's kernel and bias.
    """
    weight, shift, kernel, bias = parts
    hidden = torch.nn.functional.silu(torch.nn.functional.group_norm(x, GROUPS, weight, shift, 1e-6))
    hidden = torch.cat([hidden[:, :, :1]] * 2 + [hidden], dim=2)  # the first frame stands for earlier ones
    return torch.nn.functional.conv3d(hidden, kernel, bias, padding=(0, 1, 1))


def layer(inputs: int, outputs: int) -> dict[str, Any]:
    """Return the `row` of one layer, with so many channels into and out of the convolution."""
    torch.manual_seed(0)
    x = torch.randn(1, inputs, FRAMES, HEIGHT, WIDTH)
    kernel = torch.randn(outputs, inputs, 3, 3, 3) / (27 * inputs) ** 0.5
    parts = x, 1 + 0.2 * torch.randn(inputs), 0.2 * torch.randn(inputs), kernel, 0.2 * torch.randn(outputs)
    want = by_torch(*parts)
    half = by_torch(*(part.bfloat16() for part in parts))
    pixels, weight, shift, taps, bias = (jnp.asarray(part.numpy(), jnp.bfloat16) for part in parts)
    operands = jnp.moveaxis(pixels, 1, -1), NormParams(weight, shift), taps.transpose(2, 3, 4, 1, 0), bias
    errors = {}
    for tile in (DIRECT, *TRANSFORMS):
        y, *_ = reference.norm_conv3d(*operands, num_groups=GROUPS, tile=tile)
        errors[tile] = rms_error(torch.from_numpy(np.array(jnp.moveaxis(y, -1, 1), np.float32)), want)
    return row(f"{inputs} to {outputs}", want, half, errors)


def row(name: str, want: torch.Tensor, half: torch.Tensor, errors: dict[int, float]) -> dict[str, Any]:
    """Return a row of the results: errors over the root mean square of `want`, PyTorch's result in float32.

    `half` is PyTorch's result in bfloat16; `errors` has the error in bfloat16 by Winograd's tile, or
    `DIRECT`.
    """
    scale = rms_error(want, torch.zeros(()))
    result = {"name": name, "torch": rms_error(half.float(), want) / scale}
    return result | {str(tile): error / scale for tile, error in errors.items()}


def whole(stock: AutoencoderKLCogVideoX) -> list[dict[str, Any]]:
    """Return the `row` of each direction of the whole model, without filtering and with it."""
    half = copy.deepcopy(stock).bfloat16()
    results = []
    for kind, given in ("encode", video(9, height=48, width=72)), ("decode", latents(3, height=6, width=9)):
        want, by_half = (run(torchs, kind, given.to(torchs.dtype)) for torchs in (stock, half))
        vae, errors = FlaxVAEForPipelines.from_diffusers(half), {}
        for filters in (False, True):
            with rounded_as_the_kernel(filters):
                got = run(vae, kind, runtime.to_jax(given.bfloat16()))
            errors[4 if filters else DIRECT] = rms_error(runtime.to_torch(got).float(), want)
        results.append(row(f"whole model, {kind}", want, by_half, errors))
    return results


@torch.no_grad()
def run(vae: Any, kind: str, given: Any) -> Any:
    """Return the frames, or the posterior's parameters, that "decode" or "encode" gives."""
    return vae.decode(given).sample if kind == "decode" else vae.encode(given).latent_dist.parameters


@contextlib.contextmanager
def rounded_as_the_kernel(filters: bool) -> Iterator[None]:
    """Have ops take a TPU's forms by XLA, and `norm_conv3d` its kernel's rounding.

    With `filters` convolutions of four and eight frames are filtered by Winograd's algorithm.
    """

    def summed(frames: Any, kernel: Any, column_padding: Any) -> Any:
        """Convolve in float32, or filter; arguments and result are those of `xla.summed`."""
        wide, length = frames.astype(jnp.float32), frames.shape[1] - 2
        if not filters or length not in (4, 8):
            return xla.summed(wide, kernel.astype(jnp.float32), column_padding)

        def multiply(part: Any, taps: Any) -> Any:
            """Return one of the filter's products: of transformed frames and transformed taps."""
            return xla.summed(part.astype(jnp.float32), taps[None].astype(jnp.float32), column_padding)

        return filtered(frames, kernel, length // 2, multiply)

    jax.clear_caches()  # of programs with another rounding
    with as_on_a_tpu() as patch:
        patch.setenv(tiles.SWITCH, f"off:group_norm,spatial_norm,upsample,downsample,{filters}")
        patch.setattr(tiles, "SMALLEST_FRAME", 1)  # else frames this small would not take the kernel
        # No Pallas kernel can run here: the norms' sums, and the fused kernel around `summed`, are XLA's.
        patch.setattr(group_norm_op, "_shard_column_moments", lambda target, x: norm_xla.column_moments(x))
        patch.setattr(tpu, "xla", SimpleNamespace(**{**vars(xla), "summed": summed}))
        patch.setattr(tpu, "convolved", tpu._xla_form)
        yield


if __name__ == "__main__":
    torch.manual_seed(0)
    published = AutoencoderKLCogVideoX(**PUBLISHED).eval()
    keep(
        "rounding",
        {"rows": [layer(*shape) for shape in shapes(published)] + whole(published)},
        *("torch", "jax", "flax", "diffusers"),
    )
