"""Copies, pickles and saved states of a ported VAE, and what is left of one that is dropped."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from torch import nn

from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh, port, runtime
from tests import reference
from tests.vae.torchax.shallow import Z, decoded, decodes_as


def test_a_copy_is_its_own(vae, stock):
    copied = copy.deepcopy(vae)
    assert torch.equal(decoded(copied), decoded(vae))
    copied.decoder.conv_out.conv.bias.add_(1)
    assert decodes_as(vae, stock)
    assert not decodes_as(copied, stock)
    assert runtime.on_jax(copy.deepcopy(vae.decoder.conv_in).conv.bias)


def test_a_copy_stays_on_its_mesh_and_a_pickle_leaves_it(stock):
    vae = reference.on_jax(port(copy.deepcopy(stock), mesh=make_mesh(1, 2)))
    copied, loaded = copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))
    assert (copied.mesh, loaded.mesh) == (vae.mesh, None)
    assert decodes_as(copied, stock)
    assert isinstance(loaded, AutoencoderKLCogVideoX)
    assert {type(weight) for weight in loaded.parameters()} == {nn.Parameter}
    assert torch.equal(loaded.decode(Z).sample, stock.decode(Z).sample), "in PyTorch, from the same weights"


@pytest.mark.parametrize("saved", ["the model", "its state"])
def test_what_torch_saves_is_in_pytorch(vae, stock, saved, tmp_path):
    path = tmp_path / "saved.pt"
    torch.save(vae if saved == "the model" else vae.state_dict(), path)
    loaded = torch.load(path, weights_only=saved == "its state")
    state = loaded.state_dict() if saved == "the model" else loaded
    assert all(torch.equal(value, state[name]) for name, value in stock.state_dict().items())
    assert {type(value) for value in state.values()} == {torch.Tensor}


def test_a_slice_is_copied_and_saved_as_a_whole_tensor_is(vae, tmp_path):
    part = runtime.to_jax(Z)[0]
    torch.save({"part": part}, tmp_path / "part.pt")
    for loaded in (torch.load(tmp_path / "part.pt")["part"], pickle.loads(pickle.dumps(part))):
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, Z[0])
    copied = copy.deepcopy(part)
    part += 1
    assert torch.equal(runtime.to_torch(copied), Z[0])


@pytest.mark.parametrize("hooked", [False, True])
def test_nothing_of_a_dropped_model_is_kept(stock, hooked):
    vae = reference.on_jax(copy.deepcopy(stock))
    if hooked:
        owner = types.SimpleNamespace(vae=vae)  # of a hook's method, which holds the model
        see = types.MethodType(lambda self, module, args, output: None, owner)
        vae.decoder.mid_block.register_forward_hook(see)
        del owner, see
    decoded(vae)
    dropped = weakref.ref(vae)
    del vae
    gc.collect()
    assert dropped() is None
