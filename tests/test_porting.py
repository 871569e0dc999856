import copy
import json
import types

import pytest
import torch

import cogvideox_torchax
from cogvideox_torchax import AutoencoderKLCogVideoX, port
from cogvideox_torchax.vae.torchax.modules import PORTED
from tests.processes import USERS, run_python


def test_every_hot_module_is_swapped_and_nothing_else_changes(small_vae):
    vae = copy.deepcopy(small_vae)
    before = [(id(module), type(module)) for module in vae.modules()]
    parameters = {name: id(parameter) for name, parameter in vae.named_parameters()}
    assert port(vae) is vae
    assert isinstance(vae, type(small_vae))
    swapped = {type(small_vae): AutoencoderKLCogVideoX, **PORTED}
    after = [(id(module), type(module)) for module in vae.modules()]
    assert after == [(identity, swapped.get(kind, kind)) for identity, kind in before]
    assert {name: id(parameter) for name, parameter in vae.named_parameters()} == parameters
    assert list(vae.state_dict()) == list(small_vae.state_dict())
    assert [(id(module), type(module)) for module in port(vae).modules()] == after


@pytest.mark.parametrize("wrong", [torch.nn.Linear(2, 2), object(), None])
def test_anything_else_is_refused(wrong):
    with pytest.raises(ValueError, match="port got .*: it takes diffusers' AutoencoderKLCogVideoX"):
        port(wrong)


@pytest.mark.parametrize("given", ["a VAE", "a pipeline without a mesh"])
def test_a_split_without_a_mesh_is_refused(small_vae, given):
    vae = copy.deepcopy(small_vae)
    model = vae if given == "a VAE" else types.SimpleNamespace(vae=vae, transformer=torch.nn.Identity())
    with pytest.raises(ValueError, match="parallel='context': it is for a pipeline over a mesh"):
        port(model, parallel="context")
    assert type(vae) is type(small_vae)


@pytest.mark.parametrize("device", ["tpu", "tpu:0"])
def test_a_tpu_is_a_device_of_torchtpu_alone(jax_vae, device):
    with pytest.raises(ValueError, match=r'torchax, move it .to\("jax"\)'):
        jax_vae.to(device)


def test_a_model_on_jax_saves_the_same_file(small_vae, jax_vae, tmp_path):
    small_vae.save_pretrained(tmp_path / "stock")
    jax_vae.save_pretrained(tmp_path / "ours")
    files = [tmp_path / name / "diffusion_pytorch_model.safetensors" for name in ("stock", "ours")]
    assert files[0].read_bytes() == files[1].read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "ours")]
    assert configs[0] == {key: value for key, value in configs[1].items() if key != "_name_or_path"}


def test_made_from_a_config_it_is_ported_too(small_vae):
    assert not any(
        type(module) in PORTED for module in AutoencoderKLCogVideoX.from_config(small_vae.config).modules()
    )


ALONE = """
import sys, cogvideox_torchax as c
assert "torch" not in sys.modules and "jax" not in sys.modules

import importlib, warnings, cogvideox_torchax.flax
from cogvideox_torchax import cli
for options in ((), ("--quiet",)):
    assert cli.main(["encode", __import__("torch").__file__, "-o", "z.safetensors", *options]) == 2
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers
    for logging in (diffusers, transformers):
        logging.get_logger(logging.__name__).warning("accelerate was not found")
        list(logging.tqdm([1], desc="Loading pipeline components"))
    warnings.warn("a warning")

for command in cli.COMMANDS:
    importlib.import_module(f"cogvideox_torchax.cli.{command}")
assert "flax" not in sys.modules
from cogvideox_torchax import port; import cogvideox_torchax.porting
assert all(getattr(c, name) for name in c.__all__) and c.port is port
print("imported")
"""

AS_USERS = """
import copy, gc, torch
gc.disable()  # a tenth of the time
from tests import reference
from tests.vae.conftest import decodes_as, shallow_latents, shallow_stock
stock = shallow_stock()
with torch.no_grad():
    assert decodes_as(reference.on_jax(copy.deepcopy(stock)), stock, shallow_latents(5))
"""
"""Decode by two programs, one without a cache and one with it."""


@pytest.fixture(scope="module")
def ended():
    """Return a process that has imported the package, run commands, asked for every public name, and decoded.

    It has a process of its own also since XLA reads its flags once.
    """
    return run_python(ALONE + AS_USERS, **USERS)


def test_public_names_are_lazy_and_complete(ended):
    assert "imported" in ended.stdout, ended.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cogvideox_torchax.nothing


def test_no_warning_of_another_package_is_shown_and_no_bar_where_quiet(ended):
    assert "accelerate" not in ended.stderr
    assert "a warning" not in ended.stderr
    shown, quiet = ended.stderr.split("cogvideox-torchax encode: ")[1:]
    assert ["Loading pipeline components" in said for said in (shown, quiet)] == [True, False]


def test_the_contract_holds_as_users_run_it(ended):
    assert ended.returncode == 0, ended.stderr
