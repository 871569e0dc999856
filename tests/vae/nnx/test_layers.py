"""Each layer of the Flax build against diffusers' own, from the same weights, over two chunks.

Encoder and decoder as wholes are held to the same tolerance by `tests/test_autoencoder.py`.
"""

import pytest

from tests.vae.nnx import layers


@pytest.mark.parametrize("name", sorted(layers.LAYERS.keys() - {"encoder", "decoder"}))
def test_a_layer_equals_diffusers(name):
    layer = layers.LAYERS[name]
    assert layers.error(layer, layers.SMALL) < layer.tolerance
