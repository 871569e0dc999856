"""Every mesh of eight devices, widths with and without a remainder, one video and two, both builds."""

import copy

import pytest
import torch

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference

CASES = ((85, 1, 1), (90, 2, 3), (96, 1, 5), (170, 2, 1))
"""Columns of latents, videos, and latent frames."""


@pytest.fixture(scope="module")
def stock():
    return reference.small_vae(**reference.THREE_LEVELS)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (8, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("backend", ["torchax", "flax"])
def test_a_video_over_any_mesh_is_diffusers_video(stock, backend, mesh):
    mesh = make_mesh(*mesh)
    if backend == "flax":
        vae, put = port(FlaxVAEForPipelines.from_diffusers(stock), mesh=mesh), lambda tensor: tensor
    else:
        vae, put = port(copy.deepcopy(stock), mesh=mesh).to("jax"), runtime.to_jax
    for columns, videos, frames in CASES:
        z = reference.latents(frames, batch=videos, height=2, width=columns)
        x = reference.video(4 * frames - 3, batch=videos, height=8, width=4 * columns)
        decoded, encoded = stock.decode(z).sample, stock.encode(x).latent_dist.parameters
        errors = [
            relative_error(runtime.to_torch(vae.decode(put(z)).sample), decoded),
            relative_error(torch.cat(list(vae.decode_stream(z)), 2), decoded),
            relative_error(runtime.to_torch(vae.encode(put(x)).latent_dist.parameters), encoded),
            relative_error(torch.cat([part.parameters for part in vae.encode_stream(x)], 2), encoded),
        ]
        assert max(errors) < FLOAT32_RELATIVE, (columns, videos, frames, errors)
