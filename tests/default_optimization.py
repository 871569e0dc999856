"""Runs the cases of `test_default_optimization.py`; prints, as JSON, what went wrong in each.

A process of its own, as XLA reads its flags once.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable

import torch

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference, small_pipelines


def check(got, want):
    error = relative_error(runtime.to_torch(got), want)
    assert error < FLOAT32_RELATIVE, error


def encode():
    x, stock = reference.video(5, height=6, width=16), small_pipelines.vae()
    want = stock.encode(x).latent_dist.parameters
    check(reference.on_jax(stock).encode(runtime.to_jax(x)).latent_dist.parameters, want)


def decode():
    z, stock = reference.latents(5, width=8), small_pipelines.vae()
    want, vae = stock.decode(z).sample, reference.on_jax(stock)
    check(vae.decode(runtime.to_jax(z)).sample, want)
    parts = list(vae.decode_stream(z))
    assert len(parts) == 2, "two chunks are two programs: without a cache and with one"
    check(torch.cat(parts, 2), want)


def mesh():
    z, stock = reference.latents(1, width=12), small_pipelines.vae()  # padded to 16
    want = stock.decode(z).sample
    vae = reference.on_jax(port(stock, mesh=make_mesh(1, 8)))
    check(vae.decode(runtime.to_jax(z)).sample, want)


def flax():
    from cogvideox_torchax.flax import FlaxVAEForPipelines

    z, x, stock = reference.latents(1, width=8), reference.video(1, height=6, width=16), small_pipelines.vae()
    ours = FlaxVAEForPipelines.from_diffusers(stock)
    check(ours.decode(z).sample, stock.decode(z).sample)
    check(ours.encode(x).latent_dist.parameters, stock.encode(x).latent_dist.parameters)


CASES: dict[str, Callable[[], None]] = {
    "flax": flax,  # first: it needs torchax nowhere enabled
    "decode": decode,
    "encode": encode,
    "mesh": mesh,
}


def run(case: Callable[[], None]) -> str:
    try:
        with torch.no_grad():
            case()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: run(case) for name, case in CASES.items()}
    print(json.dumps(found))
