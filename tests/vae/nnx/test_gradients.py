"""Gradients of the Flax build by `jax.grad`: those of stock diffusers in PyTorch, for weights and inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.nnx import weights
from tests import reference
from tests.conftest import port_to_eight
from tests.reference import largest_error
from tests.vae.torchax.test_gradients import RELATIVE, backward, decoded, encoded, weighed

CASES = {
    # What runs, its input, from which frame on the loss looks, whether blocks are computed anew, the devices.
    "decode two chunks, a loss on the second": (decoded, reference.latents(4), 4, False, 1),
    "encode 9 frames over eight devices, blocks anew": (encoded, reference.video(9, height=4), 0, True, 8),
}


@pytest.mark.parametrize(("run", "x", "first_frame", "anew", "devices"), CASES.values(), ids=CASES)
@pytest.mark.slow_cases("decode two chunks, a loss on the second")
def test_gradients_equal_pytorchs(run, x, first_frame, anew, devices):
    stock = reference.small_vae(**reference.TWO_LEVELS)
    wrapper = FlaxVAEForPipelines.from_diffusers(stock)
    vae = (port_to_eight(wrapper) if devices > 1 else wrapper).flax_vae
    if anew:
        vae.enable_gradient_checkpointing()
    want = backward(stock, run, x, first_frame)
    assert want[:, :, 0].abs().max() > 0, "the loss reaches the first frame"
    graph, parameters, rest = nnx.split(vae, nnx.Param, ...)

    @jax.jit
    def gradients(parameters, x):
        def loss(parameters, x):
            model = nnx.merge(graph, parameters, rest)
            if run is decoded:
                result = model.decode(x)
            else:
                posterior = model.encode(x)
                result = posterior.mean + jnp.exp(0.5 * posterior.logvar)
            weight = weighed(jnp.moveaxis(result, -1, 1).shape, first_frame)
            return (result * np.moveaxis(weight.numpy(), 1, -1)).sum()

        return jax.grad(loss, argnums=(0, 1))(parameters, x)

    of_weights, of_x = gradients(parameters, np.moveaxis(x.numpy(), 1, -1))
    assert largest_error(np.moveaxis(of_x, -1, 1), want) < RELATIVE
    found = weights.state_dict(of_weights)
    for name, weight in stock.named_parameters():
        if weight.grad is None:  # of the other half
            assert not found[name].any(), name
        else:
            assert largest_error(found[name], weight.grad) < RELATIVE, name
