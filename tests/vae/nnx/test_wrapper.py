"""FlaxVAEForPipelines where diffusers expects its own VAE: what pipelines call, and a module's own calls."""

import copy
import importlib
import json
import pickle
import sys

import pytest
import torch

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.plan import report
from cogvideox_torchax.vae.checkpoint import ModelError
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference, small_pipelines


@pytest.mark.parametrize("enabled", [False, True])
def test_tensors_on_jax_give_tensors_on_jax(small_vae, flax_vae, enabled):
    x, z = reference.video(1), reference.latents(1)
    if enabled:
        runtime.enable()
    encoded, decoded = flax_vae.encode(runtime.to_jax(x)), flax_vae.decode(runtime.to_jax(z))
    got = encoded.latent_dist.parameters, decoded.sample
    assert runtime.is_enabled() is enabled
    assert not runtime.on_jax(flax_vae.decode(z).sample)
    want = reference.encoded(small_vae, x), reference.decoded(small_vae, z)
    for ours, theirs in zip(got, want, strict=True):
        assert runtime.on_jax(ours)
        assert relative_error(runtime.to_torch(ours), theirs) < FLOAT32_RELATIVE


def test_an_unchanged_pipeline_runs_with_it():
    pipe = small_pipelines.build()
    want = pipe(**small_pipelines.inputs("text")).frames
    pipe.vae = FlaxVAEForPipelines.from_diffusers(pipe.vae)
    got = pipe.to("cpu")(**small_pipelines.inputs("text")).frames
    assert reference.largest_error(got, want) < FLOAT32_RELATIVE


def test_it_is_diffusers_vae_by_every_name_that_pipelines_use(small_vae, flax_vae):
    x = reference.video(1)
    assert (flax_vae.dtype, flax_vae.device) == (torch.float32, torch.device("cpu"))
    draws = [
        model.encode(x).latent_dist.sample(torch.Generator().manual_seed(7))
        for model in (flax_vae, small_vae)
    ]
    assert relative_error(*draws) < FLOAT32_RELATIVE
    for call, given in ((flax_vae.encode, x), (flax_vae.decode, reference.latents(1))):
        assert isinstance(call(given, return_dict=False), tuple)


def test_every_field_of_the_config_reaches_the_pipeline():
    options = {
        "scaling_factor": 0.7,
        "invert_scale_latents": True,
        "shift_factor": 0.5,
        "latents_mean": (0.1,) * 16,
        "latents_std": (2.0,) * 16,
        "force_upcast": False,
        "sample_height": 32,
        "sample_width": 48,
    }
    stock = reference.small_vae(**options)
    vae = FlaxVAEForPipelines.from_diffusers(stock)
    given, kept = (
        {name: value for name, value in model.config.items() if not name.startswith("_")}
        for model in (stock, vae)
    )
    assert {name: kept[name] for name in options} == options
    assert json.loads(json.dumps(kept)) == json.loads(json.dumps(given)), "but for tuples and lists"


def test_without_flax_the_extra_is_named(monkeypatch):
    package = importlib.import_module("cogvideox_torchax.flax")
    for name in [name for name in sys.modules if name.startswith("cogvideox_torchax.vae.nnx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)  # an import of it raises ModuleNotFoundError
    with pytest.raises(ImportError, match=r"pip install 'cogvideox-torchax\[flax\]'"):
        _ = package.FlaxAutoencoderKLCogVideoX


# Methods of torch's modules and diffusers' models


@pytest.fixture(scope="module")
def stock():
    return reference.small_vae(**reference.TWO_LEVELS)


@pytest.fixture(scope="module")
def other():
    return reference.small_vae(seed=1, **reference.TWO_LEVELS)


@pytest.fixture
def vae(stock):
    return FlaxVAEForPipelines.from_diffusers(stock)


Z = reference.latents(1, height=2, width=4)


def is_of(vae, stock):
    """Return whether it decodes with the weights of a stock model."""
    return relative_error(vae.decode(Z).sample, reference.decoded(stock, Z)) < FLOAT32_RELATIVE


def test_its_state_is_the_stock_models_and_its_own(vae, stock):
    state, held = vae.state_dict(), stock.state_dict()
    assert state.keys() == held.keys()
    assert all(torch.equal(state[name], value) for name, value in held.items())
    state["decoder.conv_in.conv.bias"] += 1
    assert is_of(vae, stock)
    assert vae.num_parameters() == stock.num_parameters()
    with pytest.raises(ValueError, match="takes no options"):
        vae.state_dict(prefix="vae.")


@pytest.mark.parametrize("on_jax", [False, True])
def test_loaded_weights_are_those_that_it_runs(vae, stock, other, on_jax):
    assert is_of(vae, stock)
    held = other.state_dict()
    state = {name: runtime.to_jax(value) if on_jax else value for name, value in held.items()}
    answer = vae.load_state_dict(state)
    assert answer.missing_keys + answer.unexpected_keys == []
    assert is_of(vae, other)


def test_weights_that_do_not_fit_are_named_and_none_is_taken(vae, stock, other):
    name, whole = "decoder.conv_in.conv.weight", other.state_dict()
    with pytest.raises(ModelError, match=name):
        vae.load_state_dict({**whole, name: whole[name][:1]})
    assert is_of(vae, stock)
    with pytest.raises(ValueError, match="is strict"):
        vae.load_state_dict(whole, strict=False)


CASTS = {
    "to": (lambda vae: vae.to(torch.bfloat16), torch.bfloat16),
    "to, by name": (lambda vae: vae.to(dtype=torch.bfloat16), torch.bfloat16),
    "to a tensor": (lambda vae: vae.to(torch.ones(1).half()), torch.float16),
    "bfloat16": (lambda vae: vae.bfloat16(), torch.bfloat16),
    "half": (lambda vae: vae.half(), torch.float16),
    "type": (lambda vae: vae.type(torch.bfloat16), torch.bfloat16),
    "and back": (lambda vae: vae.to(torch.bfloat16).float(), torch.float32),
    "to a device": (lambda vae: vae.to("cuda"), torch.float32),
    "to jax": (lambda vae: vae.to("jax"), torch.float32),
    "cpu": (lambda vae: vae.cpu(), torch.float32),
}


@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
def test_a_cast_casts_what_is_stored_taken_and_given(vae, cast, dtype):
    assert cast(vae) is vae
    assert vae.dtype == dtype
    assert {value.dtype for value in vae.state_dict().values()} == {dtype}
    if dtype != torch.float16:  # one program is compiled
        assert vae.decode(Z.to(dtype)).sample.dtype == dtype


@pytest.mark.parametrize("cast", [lambda vae: vae.double(), lambda vae: vae.to(torch.float64)])
def test_a_dtype_that_jax_does_not_have_is_refused_and_nothing_is_cast(vae, stock, cast):
    with pytest.raises(ValueError, match="takes float32, bfloat16 or float16"):
        cast(vae)
    assert is_of(vae, stock)


REFUSED = {
    "gradients": (lambda vae: vae.requires_grad_(), "gradients"),
    "checkpointing": (lambda vae: vae.enable_gradient_checkpointing(), "gradients"),
    "a mesh": (lambda vae: vae.place_on("dp=8"), "make one with make_mesh"),
    "a report of layers": (
        lambda vae: report.report(port(vae, mesh=make_mesh(1, 2)), (1, 16, 1, 2, 4)),
        "a report needs diffusers' model",
    ),
}


@pytest.mark.parametrize(("ask", "words"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_refused_in_one_line(vae, ask, words):
    with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
        ask(vae)


def test_what_changes_nothing_is_let_through(vae, stock):
    assert vae.requires_grad_(False) is vae
    assert vae.eval() is vae
    assert is_of(vae.train(False), stock)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae))])
def test_a_copy_has_weights_of_its_own(vae, stock, other, copied):
    made = copied(vae)
    made.load_state_dict(other.state_dict())
    assert is_of(made, other)
    assert is_of(vae, stock)


def test_a_copy_keeps_a_mesh_and_a_pickle_leaves_it(stock):
    vae = port(FlaxVAEForPipelines.from_diffusers(stock), mesh=make_mesh(1, 2))
    assert copy.deepcopy(vae).mesh is vae.mesh
    assert copy.copy(vae.flax_vae).mesh is vae.flax_vae.mesh
    loaded = pickle.loads(pickle.dumps(vae))
    assert (loaded.mesh, loaded.flax_vae.mesh) == (None, None)
    assert vae.flax_vae.mesh is not None
    assert is_of(loaded, stock)
