"""A shallow VAE of stock diffusers, and the same ported and on JAX: made, called, and compared."""

import copy

import pytest
import torch

from cogvideox_torchax.vae.tolerances import BFLOAT16_RMS_RATIO, FLOAT32_RELATIVE, relative_error, rms_error
from tests import reference


def on_backends(backends, cases, *, quick, slow):
    """Return pytest's parameters (backend, *values) of each case on each backend.

    `cases` has the values of each case by its name. `quick` and `slow` name, for each backend, the cases that
    `make test` and `make test-all` run. All others are left to `make test-product`.
    """
    return [
        pytest.param(
            backend,
            *values,
            id=f"{name} by {backend}",
            marks=()
            if name in quick.get(backend, ())
            else pytest.mark.slow
            if name in slow.get(backend, ())
            else pytest.mark.product,
        )
        for name, values in cases.items()
        for backend in backends
    ]


WEIGHTS = "diffusion_pytorch_model.safetensors"
"""The file of a saved model's weights."""
NAME = "decoder.conv_in.conv.weight"
"""The name of one of them."""


def shallow_stock(seed=0):
    return reference.small_vae(seed, **reference.TWO_SHALLOW_LEVELS)


def shallow_latents(frames=1, batch=1, height=2, width=4):
    return reference.latents(frames, batch=batch, height=height, width=width)


Z = shallow_latents()


def decoded(vae, z=Z):
    return reference.run_decode(vae, z)


def check_close(got, want):
    """Check a result in float32 by the contract."""
    assert reference.largest_error(got, want) < FLOAT32_RELATIVE


def decodes_as(vae, stock, z=Z):
    """Return whether it decodes as a stock model does."""
    return relative_error(decoded(vae, z), stock.decode(z).sample) < FLOAT32_RELATIVE


RUNS = {
    "decode": (reference.run_decode, reference.decoded),
    "encode": (reference.run_encode, reference.encoded),
}
"""How a build computes, and stock diffusers, on the host."""


def check_bfloat16(vae, kind, x, stock):
    """Check a model's error in bfloat16, which may not be larger than PyTorch's by the contract."""
    run, of_stock = RUNS[kind]
    got, want = run(vae, x.bfloat16()), of_stock(stock, x)
    in_torch = of_stock(copy.deepcopy(stock).bfloat16(), x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert rms_error(got, want) <= BFLOAT16_RMS_RATIO * rms_error(in_torch, want)


@pytest.fixture(scope="session")
def stock():
    return shallow_stock()


@pytest.fixture
def vae(stock):
    return reference.built("torchax", stock)
