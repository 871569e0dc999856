"""Ports, moves, copies and calls of a VAE in any order: the reference's result, or an error that says why."""

import copy
import pickle

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX as DiffusersAutoencoder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cogvideox_torchax import enable, make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference

SIZE = {"height": 2, "width": 4}


@pytest.fixture(scope="module")
def stocks():
    """Return the two sets of weights that a model may have."""
    enable()
    return [reference.small_vae(seed=seed, **reference.THREE_LEVELS) for seed in (0, 1)]


class Run:
    """A model and which weights it has, after some steps of the orders below."""

    def __init__(self, stocks):
        self.stocks, self.held = stocks, 0
        self.vae = runtime.without_torchax(copy.deepcopy, stocks[0])

    @property
    def on_jax(self):
        return runtime.on_jax(next(self.vae.parameters()))

    @property
    def is_ported(self):
        return type(self.vae) is not DiffusersAutoencoder

    # The steps

    def port(self):
        assert port(self.vae) is self.vae

    def port_to_a_mesh(self):
        port(self.vae, mesh=make_mesh(1, 2))

    def move_to_jax(self):
        self.vae.to("jax")

    def move_to_the_host(self):
        if self.is_ported or not self.on_jax:  # torchax leaves a stock model's weights in memory of JAX's
            self.vae.to("cpu")

    def copy(self):
        self.vae = runtime.without_torchax(copy.deepcopy, self.vae)

    def pickle(self):
        self.vae = runtime.without_torchax(lambda: pickle.loads(pickle.dumps(self.vae)))

    def load(self):
        self.held = 1 - self.held
        state = self.stocks[self.held].state_dict()
        put = runtime.to_jax if self.on_jax else lambda tensor: tensor
        self.vae.load_state_dict({name: put(tensor) for name, tensor in state.items()})

    def decode_plain(self):
        self._check(lambda z: self.vae.decode(z).sample)

    def decode_on_jax(self):
        self._check(lambda z: self.vae.decode(runtime.to_jax(z)).sample, wants_jax=True)

    def stream(self):
        if self.is_ported:
            self._check(lambda z: torch.cat(list(self.vae.decode_stream(z)), dim=2), wants_jax=self.on_jax)

    def _check(self, decode, wants_jax=False):
        if not self.is_ported and (self.on_jax or wants_jax):
            return  # stock modules, operation by operation through torchax
        z = reference.latents(2, **SIZE)
        if wants_jax != self.on_jax:
            with pytest.raises(ValueError, match=r"for weights .*: move "):
                decode(z)
            return
        got = runtime.to_torch(decode(z))
        assert relative_error(got, reference.decoded(self.stocks[self.held], z)) < FLOAT32_RELATIVE


STEPS = [name for name in vars(Run) if not name.startswith("_") and name not in ("on_jax", "is_ported")]


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(order=st.lists(st.sampled_from(STEPS), min_size=3, max_size=7))
@example(order=["port_to_a_mesh", "move_to_jax", "stream", "load", "decode_on_jax", "copy", "stream"])
@example(order=["move_to_jax", "port", "decode_plain", "decode_on_jax", "move_to_the_host", "decode_plain"])
@example(
    order=["port", "move_to_jax", "decode_on_jax", "pickle", "load", "decode_plain", "move_to_jax", "stream"]
)
@pytest.mark.slow
def test_whatever_the_order_the_result_is_the_references(stocks, order):
    run = Run(stocks)
    for step in order:
        getattr(run, step)()
    run.stream()
