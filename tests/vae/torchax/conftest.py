"""A shallow VAE of stock diffusers, and the same ported and on JAX."""

import copy

import pytest

from tests import reference
from tests.vae.torchax.shallow import shallow_stock


@pytest.fixture(scope="module")
def stock():
    return shallow_stock()


@pytest.fixture
def vae(stock):
    return reference.on_jax(copy.deepcopy(stock))
