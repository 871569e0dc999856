"""Training steps: the same on every backend and on a mesh, and what they are made of."""

import copy
import math

import pytest
from diffusers import AutoencoderKLCogVideoX

from cogvideox_torchax import backends, make_mesh, port, runtime
from cogvideox_torchax.train import start, trainer
from cogvideox_torchax.train.clips import Sampler, load, parts
from cogvideox_torchax.train.stages import Shape
from cogvideox_torchax.train.trainer import Plan, Trainer
from tests.train.conftest import TINY

PLAN = Plan(steps=40, clips=2, frames=9, size=16)
STEPS = range(10, 13)


@pytest.fixture
def sampler(material, monkeypatch):
    monkeypatch.setattr(trainer, "shape_of", lambda *_, **__: Shape(2, 9, 16))  # one to compile
    sources = [load(part, frames=9, size=16) for part in parts(["clip.mp4", "picture.png"])]
    return Sampler(sources, seed=0)


@pytest.fixture(scope="module")
def stock():
    vae = AutoencoderKLCogVideoX(**TINY)
    start.initialize(vae, seed=0)
    return vae


def trained(backend, sampler):
    """Losses of a few steps, and the state after them."""
    training = Trainer(backend, sampler, PLAN)
    found = []
    for number in STEPS:
        training.step_number = number
        found.append(training.step())
    return found, training.state()


@pytest.mark.parametrize("dp", [None, 2])
def test_steps_on_jax_are_those_in_pytorch(stock, sampler, dp):
    torchs = backends.backend("torch").around(copy.deepcopy(stock))
    want, wanted = runtime.without_torchax(trained, torchs, sampler)
    vae = port(copy.deepcopy(stock), mesh=dp and make_mesh(dp, 1))
    got, state = trained(backends.backend("torchax").around(vae), sampler)
    for ours, torchs in zip(got, want, strict=True):
        assert math.isclose(ours.total, torchs.total, rel_tol=1e-5)
        assert math.isclose(ours.gradient, torchs.gradient, rel_tol=1e-4)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (state[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name
