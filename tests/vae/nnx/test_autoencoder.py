"""The Flax build's own features beside the contract of `tests/vae/torchax/test_autoencoder.py`.

Array axes are N T H W C.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from cogvideox_torchax.flax import FlaxVAEForPipelines, Posterior
from cogvideox_torchax.runtime.places import ArrayProgram
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.nnx.autoencoder import Network
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE
from tests import reference
from tests.conftest import port_to_eight
from tests.vae.torchax.test_gradients import RELATIVE, backward, decoded, encoded, weighed


@pytest.fixture(scope="module")
def vae(flax_vae):
    return flax_vae.flax_vae


def channels_last(tensor):
    return jnp.asarray(tensor.permute(0, 2, 3, 4, 1).numpy())


def test_arrays_in_and_arrays_out_equal_diffusers(small_vae, vae):
    z, x = reference.latents(1), reference.video(1)
    want = small_vae.encode(x).latent_dist
    results = *vae.encode(channels_last(x)), vae.decode(channels_last(z))
    for ours, theirs in zip(results, (want.mean, want.logvar, small_vae.decode(z).sample), strict=True):
        assert reference.largest_error(np.moveaxis(ours, -1, 1), theirs) < FLOAT32_RELATIVE


def test_a_key_samples_and_repeats():
    posterior = Posterior(*(jnp.full((1, 2, 3, 5, 16), value) for value in (3.0, -2.0)))
    key = jax.random.key(7)
    assert jnp.array_equal(posterior.sample(key), posterior.sample(key))
    assert not jnp.array_equal(posterior.sample(key), posterior.sample(jax.random.key(8)))
    noise = (posterior.sample(key) - 3.0) / jnp.exp(-1.0)
    assert abs(float(noise.mean())) < 0.2
    assert abs(float(noise.std()) - 1.0) < 0.1


def test_the_log_variance_is_clamped():
    moments = jnp.array([[0.0, 100.0], [0.0, -100.0]])[None, None, None]
    assert Posterior.from_moments(moments).logvar.ravel().tolist() == [20.0, -30.0]


@pytest.mark.slow
def test_frame_by_frame_is_another_function_of_the_documented_length(vae):
    z = channels_last(reference.latents(4))
    got = vae.decode_frame_by_frame(z)
    assert got.shape == (1, 13, 12, 20, 3)
    assert np.array_equal(np.asarray(got[:, :1]), np.asarray(vae.decode(z[:, :1])))
    usual = vae.decode(z[:, :3])
    assert float(jnp.abs(got[:, :9] - usual).max() / jnp.abs(usual).max()) > 1e-2


LATENTS = jnp.zeros((1, 3, 3, 5, 16))
BAD = {
    "rank": ("encode", jnp.zeros((1, 3, 24, 3)), "rank 4"),
    "channels": ("encode", jnp.zeros((1, 1, 24, 40, 4)), "4 channels"),
    "size": ("encode", jnp.zeros((1, 1, 22, 40, 3)), "22 x 40 pixels.*multiples of 4; crop it to 20 x 40"),
    "empty": ("encode", jnp.zeros((1, 0, 24, 40, 3)), "empty video"),
    "integers": ("encode", np.zeros((1, 1, 24, 40, 3), np.int32), "int32: convert 0 to 255 .*from_uint8"),
    "a tensor": ("encode", torch.zeros(1, 1, 24, 40, 3), "got Tensor .* FlaxVAEForPipelines"),
    "NumPy's": ("encode", np.full((1, 1, 24, 40, 3), np.nan, np.float32), "NaN or Inf"),
    "rank of latents": ("decode", LATENTS[0, 0], "latents of rank 3"),
    "latents": (
        "decode",
        LATENTS.at[0, 2, 1, 0, 3].set(jnp.nan),
        "latents: video 0, frame 2, channel 3, row 1, column 0",
    ),
}


@pytest.mark.parametrize(("direction", "x", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_named_by_the_call_itself(vae, direction, x, words):
    for call in (getattr(vae, direction), getattr(vae, f"{direction}_stream")):  # with no `next`
        with pytest.raises(ValueError, match=words):
            call(x)


def test_another_output_dtype_is_refused(vae):
    with pytest.raises(ValueError, match="output_dtype .*int32.*: None or jnp.uint8"):
        vae.decode_stream(LATENTS, output_dtype=jnp.int32)


def test_a_model_is_split_again_only_if_its_modules_or_attributes_have_changed(vae, monkeypatch):
    z, split, count = channels_last(reference.latents(2)), Network.split, []
    monkeypatch.setattr(Network, "split", lambda module: count.append(module) or split(module))
    vae = copy.copy(vae)  # its decoder is replaced below
    first = vae.decode(z)
    assert (vae.decode(z) == first).all()
    assert len(count) == 1
    vae.decoder = nnx.clone(vae.decoder)
    assert (vae.decode(z) == first).all()
    assert len(count) == 2, "another module"
    nnx.update(vae.decoder, jax.tree.map(lambda weight: 2 * weight, nnx.state(vae.decoder, nnx.Param)))
    assert (vae.decode(z) != first).any()
    assert len(count) == 2, "new weights are arguments"
    vae.decoder.set_attributes(rematerialize=True)
    vae.decode(z)
    assert len(count) == 3, "a changed attribute"


@pytest.mark.parametrize(
    ("levels", "run", "x", "first_frame", "anew", "devices"),
    [
        # A model, what runs, its input, from which frame on the loss looks, whether blocks are computed anew,
        # devices. The shallow model has no block that changes the number of channels.
        pytest.param(
            *(reference.TWO_LEVELS, decoded, reference.latents(4), 4, False, 1),
            id="decode two chunks, a loss on the second",
        ),
        pytest.param(
            *(reference.TWO_SHALLOW_LEVELS, encoded, reference.video(1, height=4), 0, True, 8),
            id="encode over eight devices, blocks anew",
        ),
    ],
)
@pytest.mark.slow_cases("decode two chunks, a loss on the second")
def test_gradients_equal_pytorchs(levels, run, x, first_frame, anew, devices):
    stock = reference.small_vae(**levels)
    wrapper = FlaxVAEForPipelines.from_diffusers(stock)
    vae = (port_to_eight(wrapper) if devices > 1 else wrapper).flax_vae
    if anew:
        vae.enable_gradient_checkpointing()
    want = backward(stock, run, x, first_frame)
    assert want[:, :, 0].abs().max() > 0, "the loss reaches the first frame"
    graph, parameters, rest = nnx.split(vae, nnx.Param, ...)

    def loss(parameters, x):
        model = nnx.merge(graph, parameters, rest)
        if run is decoded:
            result = model.decode(x)
        else:
            posterior = model.encode(x)
            result = posterior.mean + jnp.exp(0.5 * posterior.logvar)
        weight = weighed(jnp.moveaxis(result, -1, 1).shape, first_frame)
        return (result * np.moveaxis(weight.numpy(), 1, -1)).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    of_weights, of_x = gradients(parameters, np.moveaxis(x.numpy(), 1, -1))
    assert reference.largest_error(np.moveaxis(of_x, -1, 1), want) < RELATIVE
    found = weights.state_dict(of_weights)
    for name, weight in stock.named_parameters():
        if weight.grad is None:  # of the other half
            assert not found[name].any(), name
        else:
            assert reference.largest_error(found[name], weight.grad) < RELATIVE, name


def test_of_a_numpy_array_only_a_chunk_goes_to_the_device(vae, monkeypatch):
    z, given = np.zeros((1, 7, 3, 5, 16), np.float32), []

    def run(_program, _weights, chunk, _cache):
        given.append(chunk)
        return jnp.zeros((1, 1, 24, 40, 3)), None

    monkeypatch.setattr(ArrayProgram, "run", run)
    vae.decode(z)
    assert [chunk.shape[1] for chunk in given] == [3, 2, 2]
    assert all(np.shares_memory(chunk, z) for chunk in given)
