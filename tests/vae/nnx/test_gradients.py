"""Gradients of the Flax build by `jax.grad`: those of stock diffusers in PyTorch, for weights and inputs."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.tolerances import relative_error
from tests import reference
from tests.conftest import port_to_eight

RELATIVE = 1e-4
"""Error of a gradient in float32, relative to its largest value."""

CASES = {
    # What runs, its input, from which frame on the loss looks, whether blocks are computed anew, the devices.
    "decode two chunks, a loss on the second": ("decode", reference.latents(4), 8, False, 1),
    "encode 9 frames over eight devices, blocks anew": ("encode", reference.video(9), 0, True, 8),
}


def weighed(frames, first_frame):
    weight = torch.randn(frames.shape, generator=torch.Generator().manual_seed(1))
    weight[:, :, :first_frame] = 0.0
    return weight


@pytest.mark.parametrize(("kind", "x", "first_frame", "anew", "devices"), CASES.values(), ids=CASES)
@pytest.mark.slow_cases("decode two chunks, a loss on the second")
def test_gradients_equal_pytorchs(kind, x, first_frame, anew, devices):
    stock = reference.small_vae(**reference.THREE_LEVELS)
    wrapper = FlaxVAEForPipelines.from_diffusers(copy.deepcopy(stock))
    vae = (port_to_eight(wrapper) if devices > 1 else wrapper).flax_vae
    if anew:
        vae.enable_gradient_checkpointing()
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        result = stock.decode(leaf).sample if kind == "decode" else stock.encode(leaf).latent_dist.parameters
        weight = weighed(result, first_frame)
        (result * weight).sum().backward()
    assert leaf.grad[:, :, 0].abs().max() > 0, "the loss reaches the first frame"

    graph, parameters, rest = nnx.split(vae, nnx.Param, ...)
    weight_last = jnp.asarray(np.moveaxis(weight.numpy(), 1, -1))

    @jax.jit
    def gradients(parameters, x):
        def loss(parameters, x):
            model = nnx.merge(graph, parameters, rest)
            if kind == "decode":
                return (model.decode(x) * weight_last).sum()
            posterior = model.encode(x)
            return (jnp.concatenate([posterior.mean, posterior.logvar], axis=-1) * weight_last).sum()

        return jax.grad(loss, argnums=(0, 1))(parameters, x)

    of_weights, of_x = gradients(parameters, jnp.asarray(np.moveaxis(x.numpy(), 1, -1)))
    assert relative_error(torch.from_numpy(np.moveaxis(np.array(of_x), -1, 1)), leaf.grad) < RELATIVE
    found = weights.state_dict(of_weights)
    wanted = {name: weight.grad for name, weight in stock.named_parameters() if weight.grad is not None}
    assert wanted.keys() <= found.keys()
    for name, gradient in found.items():
        want = wanted.get(name)
        if want is None:  # of the other half
            assert not gradient.any(), name
        else:
            assert relative_error(torch.from_numpy(np.array(gradient)), want) < RELATIVE, name
