"""A shallow VAE of stock diffusers, and the same ported and on JAX: made, called, and compared."""

import pytest

from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference


def shallow_stock(seed=0):
    return reference.small_vae(seed, **reference.TWO_SHALLOW_LEVELS)


def shallow_latents(frames=1, batch=1, height=2, width=4):
    return reference.latents(frames, batch=batch, height=height, width=width)


Z = shallow_latents()


def decoded(vae, z=Z):
    return reference.run_decode(vae, z)


def decodes_as(vae, stock, z=Z):
    """Return whether it decodes as a stock model does."""
    return relative_error(decoded(vae, z), stock.decode(z).sample) < FLOAT32_RELATIVE


@pytest.fixture(scope="session")
def stock():
    return shallow_stock()


@pytest.fixture
def vae(stock):
    return reference.built("torchax", stock)
