"""The Flax build's own features beside the contract of `tests/vae/torchax/test_autoencoder.py`.

Its arrays, whose axes are N T H W C; its files and weights, bit for bit; its methods as diffusers' VAE.
It needs torchax nowhere enabled; a test that wants it enables it.
"""

import copy
import inspect
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
from flax import nnx

from cogvideox_torchax import flax as package, runtime, upstream
from cogvideox_torchax.arrays.places import ArrayProgram
from cogvideox_torchax.flax import (
    FlaxAutoencoderKLCogVideoX,
    FlaxAutoencoderKLCogVideoXConfig,
    FlaxVAEForPipelines,
    Posterior,
)
from cogvideox_torchax.vae import checkpoint, directions
from cogvideox_torchax.vae.nnx import autoencoder, wrapper
from tests import reference, small_pipelines
from tests.processes import printed_by
from tests.vae.conftest import NAME, WEIGHTS, Z, check_close, decodes_as

pytestmark = pytest.mark.usefixtures("torchax_off")


@pytest.fixture(scope="module")
def model(flax_vae):
    return flax_vae.flax_vae


def test_arrays_in_and_arrays_out_equal_diffusers(small_vae, model):
    z, x = reference.latents(1), reference.video(1)
    want = small_vae.encode(x).latent_dist
    results = *model.encode(wrapper.to_array(x)), model.decode(wrapper.to_array(z))
    for ours, theirs in zip(results, (want.mean, want.logvar, small_vae.decode(z).sample), strict=True):
        check_close(np.moveaxis(ours, -1, 1), theirs)


def test_a_key_samples():
    posterior = Posterior(*(jnp.full((1, 2, 3, 5, 16), value) for value in (3.0, -2.0)))
    one, other = (posterior.sample(jax.random.key(seed)) for seed in (7, 8))
    assert not jnp.array_equal(one, other)
    noise = (one - 3.0) / jnp.exp(-1.0)
    np.testing.assert_allclose([noise.mean(), noise.std()], [0, 1], rtol=0, atol=0.1)


def test_the_log_variance_is_clamped():
    moments = jnp.array([[0.0, 100.0], [0.0, -100.0]])[None, None, None]
    assert Posterior.from_moments(moments).logvar.ravel().tolist() == [20.0, -30.0]


LATENTS = jnp.zeros((1, 3, 3, 5, 16))


@pytest.mark.parametrize(
    ("direction", "x", "words"),
    [
        pytest.param("encode", jnp.zeros((1, 3, 24, 3)), "rank 4", id="rank"),
        pytest.param("encode", jnp.zeros((1, 1, 24, 40, 4)), "4 channels", id="channels"),
        pytest.param(
            "encode",
            jnp.zeros((1, 1, 22, 40, 3)),
            "22 x 40 pixels.*multiples of 4; crop it to 20 x 40",
            id="size",
        ),
        pytest.param("encode", jnp.zeros((1, 0, 24, 40, 3)), "empty video", id="empty"),
        pytest.param(
            "encode",
            np.zeros((1, 1, 24, 40, 3), np.int32),
            "int32: convert 0 to 255 .*from_uint8",
            id="integers",
        ),
        pytest.param(
            "encode", torch.zeros(1, 1, 24, 40, 3), "got Tensor .* FlaxVAEForPipelines", id="a tensor"
        ),
        pytest.param("encode", np.full((1, 1, 24, 40, 3), np.nan, np.float32), "NaN or Inf", id="NumPy's"),
        pytest.param("decode", LATENTS[0, 0], "latents of rank 3", id="rank of latents"),
        pytest.param(
            "decode",
            LATENTS.at[0, 2, 1, 0, 3].set(jnp.nan),
            "latents: video 0, frame 2, channel 3, row 1, column 0",
            id="latents",
        ),
    ],
)
@pytest.mark.parametrize("whole_or_stream", ["", "_stream"])
def test_bad_input_is_named_by_the_call_itself(model, direction, whole_or_stream, x, words):
    with pytest.raises(ValueError, match=words):
        getattr(model, f"{direction}{whole_or_stream}")(x)  # with no `next`


def test_another_output_dtype_is_refused(model):
    with pytest.raises(ValueError, match="output_dtype .*int32.*: None or jnp.uint8"):
        model.decode_stream(LATENTS, output_dtype=jnp.int32)


def test_models_of_one_structure_share_a_program_and_a_changed_attribute_gives_another(model):
    z, model = wrapper.to_array(reference.latents(2)), copy.copy(model)  # its decoder is replaced below

    def program():
        return autoencoder.compiled(model.network(directions.DECODE)[0], model.placement(directions.DECODE))

    first, shared = model.decode(z), program()
    traced = shared.compilations
    model.decoder = nnx.clone(model.decoder)
    assert (model.decode(z) == first).all()
    nnx.update(model.decoder, jax.tree.map(lambda weight: 2 * weight, nnx.state(model.decoder, nnx.Param)))
    assert (model.decode(z) != first).any()
    assert (program(), shared.compilations) == (shared, traced), (
        "other modules, and new weights, are arguments"
    )
    model.decoder.set_attributes(rematerialize=True)
    assert program() is not shared


def test_of_a_numpy_array_only_a_chunk_goes_to_the_device(model, monkeypatch):
    z = np.zeros((1, 7, 3, 5, 16), np.float32)
    run = mock.Mock(return_value=(jnp.zeros((1, 1, 24, 40, 3)), None))
    monkeypatch.setattr(ArrayProgram, "run", run)
    model.decode(z)
    given = [call.args[1] for call in run.call_args_list]  # the chunk, after the weights
    assert [chunk.shape[1] for chunk in given] == [3, 2, 2]
    assert all(np.shares_memory(chunk, z) for chunk in given)


# Files and weights

OPTIONS = {
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "scaling_factor": 0.7,
    "invert_scale_latents": True,
    "shift_factor": 0.5,
    "latents_mean": (0.1,) * 16,
    "latents_std": (2.0,) * 16,
    "force_upcast": False,
    "sample_height": 32,
    "sample_width": 48,
}
"""Fields of a config, none of which has its default."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_and_save_give_back_the_same_files(tmp_path, dtype):
    reference.small_vae(**OPTIONS, **reference.TWO_LEVELS).to(dtype).save_pretrained(tmp_path / "vae")
    vae = FlaxVAEForPipelines.from_pretrained(tmp_path / "vae", dtype=dtype)
    assert {name: vae.config[name] for name in OPTIONS} == OPTIONS, "a pipeline reads them"
    vae.save_pretrained(tmp_path / "again")
    saved, again = (
        ((folder / WEIGHTS).read_bytes(), json.loads((folder / "config.json").read_text()))
        for folder in (tmp_path / "vae", tmp_path / "again")
    )
    assert saved == again


def test_param_dtype_stores_and_dtype_computes():
    stock = reference.small_vae(**reference.TWO_LEVELS)
    vae = FlaxAutoencoderKLCogVideoX.from_state_dict(
        stock.config, stock.state_dict(), dtype=jnp.bfloat16, param_dtype=jnp.float32
    )
    assert {str(array.dtype) for array in jax.tree.leaves(nnx.state(vae, nnx.Param))} == {"float32"}
    found = vae, vae.decode(jnp.zeros((1, 1, 2, 3, 16))), vae.encode(jnp.zeros((1, 1, 4, 6, 3))).mean
    assert [each.dtype for each in found] == [jnp.bfloat16] * 3


def test_the_configs_defaults_are_diffusers(small_vae):
    parameters = inspect.signature(small_vae.__init__).parameters.values()
    found = json.dumps(FlaxAutoencoderKLCogVideoXConfig().to_dict())  # in which tuples are lists
    assert json.loads(found) == json.loads(json.dumps({each.name: each.default for each in parameters}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"use_attention": True}, "use_attention = True", id="unknown field"),
        pytest.param({"act_fn": "gelu"}, "act_fn is 'gelu'", id="activation"),
        pytest.param({"up_block_types": ["Other"] * 4}, "up_block_types is", id="block type"),
        pytest.param({"temporal_compression_ratio": 3}, "temporal_compression_ratio is 3", id="compression"),
        pytest.param({"norm_num_groups": 7}, "norm_num_groups is 7", id="groups"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(small_vae, change, words):
    with pytest.raises(checkpoint.ModelError, match=words):
        FlaxAutoencoderKLCogVideoXConfig.from_dict({**small_vae.config, **change})


def test_fields_that_change_nothing_are_let_through(small_vae):
    from_dict = FlaxAutoencoderKLCogVideoXConfig.from_dict
    more = {**small_vae.config, "sample_size": 256, "_name_or_path": "x", "something_new": None}
    assert from_dict(more) == from_dict(small_vae.config)


WITHOUT_TORCH = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchax", "diffusers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
directory = sys.argv[1]
import numpy as np
from cogvideox_torchax import make_mesh
from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX, TileSettings
vae = FlaxAutoencoderKLCogVideoX.from_pretrained(directory)
vae.save_pretrained(f"{directory}/saved")
video = np.load(f"{directory}/video.npy")
latents = vae.encode(video).mode()
vae.tiles = TileSettings(3, 4)
vae.place_on(make_mesh(dp=1, tp=2, devices=make_mesh().devices.flat[:2]))
np.savez(f"{directory}/results.npz", latents=latents, frames=vae.decode(latents))
"""


def test_without_torch_a_model_is_loaded_saved_and_run_in_tiles_on_a_mesh_too(vae, stock, tmp_path):
    stock.save_pretrained(tmp_path)
    x = reference.video(1, height=4, width=14)
    np.save(tmp_path / "video.npy", x.movedim(1, -1).numpy())
    printed_by(WITHOUT_TORCH, tmp_path)  # with the quick compiler of the tests
    assert (tmp_path / "saved" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()
    with np.load(tmp_path / "results.npz") as found:
        z, frames = (torch.from_numpy(found[name]).movedim(-1, 1) for name in ("latents", "frames"))
    vae.enable_tiling(tile_sample_min_height=6, tile_sample_min_width=8)
    check_close(z, stock.encode(x).latent_dist.mode())
    check_close(frames, vae.decode(z).sample)


@pytest.mark.parametrize("enabled", [False, True])
def test_tensors_on_jax_give_tensors_on_jax(small_vae, flax_vae, enabled):
    x, z = reference.video(1), reference.latents(1)
    if enabled:
        torchax.enable_globally()
    got = flax_vae.encode(runtime.to_jax(x)).latent_dist.parameters, flax_vae.decode(runtime.to_jax(z)).sample
    assert upstream.torchax_is_on() is enabled
    assert not runtime.on_jax(flax_vae.decode(z).sample)
    want = reference.encoded(small_vae, x), reference.decoded(small_vae, z)
    for ours, theirs in zip(got, want, strict=True):
        assert runtime.on_jax(ours)
        check_close(runtime.to_torch(ours), theirs)


def test_an_unchanged_pipeline_runs_with_it():
    pipe = small_pipelines.build("image")  # which encodes, draws from the posterior and decodes
    want = pipe(**small_pipelines.inputs("image")).frames
    pipe.vae = FlaxVAEForPipelines.from_diffusers(pipe.vae)
    assert (pipe.vae.dtype, pipe.vae.device) == (torch.float32, torch.device("cpu"))
    check_close(pipe.to("cpu")(**small_pipelines.inputs("image")).frames, want)


def test_without_flax_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cogvideox_torchax.vae.nnx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)  # an import of it raises ModuleNotFoundError
    with pytest.raises(ImportError, match=r"pip install 'cogvideox-torchax\[flax\]'"):
        _ = package.FlaxAutoencoderKLCogVideoX


# Methods of torch's modules and diffusers' models


@pytest.fixture
def vae(stock):
    return FlaxVAEForPipelines.from_diffusers(stock)


def test_its_state_is_the_stock_models_and_its_own(vae, stock):
    assert isinstance(vae, type(stock))
    assert [*vae.modules()] == [vae], "without modules"
    state, held = vae.state_dict(), stock.state_dict()
    assert state.keys() == held.keys()
    assert all(torch.equal(state[name], value) for name, value in held.items())
    state["decoder.conv_in.conv.bias"] += 1
    assert decodes_as(vae, stock)


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        pytest.param(lambda vae: vae.to(torch.bfloat16), torch.bfloat16, id="to"),
        pytest.param(lambda vae: vae.to(dtype=torch.bfloat16), torch.bfloat16, id="to, by name"),
        pytest.param(lambda vae: vae.to(torch.ones(1).half()), torch.float16, id="to a tensor"),
        pytest.param(lambda vae: vae.bfloat16(), torch.bfloat16, id="bfloat16"),
        pytest.param(lambda vae: vae.half(), torch.float16, id="half"),
        pytest.param(lambda vae: vae.type(torch.bfloat16), torch.bfloat16, id="type"),
        pytest.param(lambda vae: vae.to(torch.bfloat16).float(), torch.float32, id="and back"),
        pytest.param(lambda vae: vae.to("cuda"), torch.float32, id="to a device"),
        pytest.param(lambda vae: vae.to("jax"), torch.float32, id="to jax"),
        pytest.param(lambda vae: vae.cpu(), torch.float32, id="cpu"),
        pytest.param(lambda vae: vae.requires_grad_(False), torch.float32, id="no gradients"),
        pytest.param(lambda vae: vae.eval().train(False), torch.float32, id="evaluation"),
    ],
)
def test_a_cast_casts_what_is_stored_taken_and_given(vae, cast, dtype):
    assert cast(vae) is vae
    assert {vae.dtype, *(value.dtype for value in vae.state_dict().values())} == {dtype}
    if dtype != torch.float16:  # one program is compiled
        assert vae.decode(Z.to(dtype)).sample.dtype == dtype


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        pytest.param(lambda vae: vae.requires_grad_(), "gradients", id="gradients"),
        pytest.param(
            lambda vae: vae.enable_gradient_checkpointing(),
            "not support gradient checkpointing",
            id="checkpointing",
        ),
        pytest.param(lambda vae: vae.place_on("dp=8"), "make one with make_mesh", id="a mesh"),
        pytest.param(
            lambda vae: vae.load_state_dict(
                {name: 2 * (value[:1] if name == NAME else value) for name, value in vae.state_dict().items()}
            ),
            NAME,
            id="weights of which one does not fit",
        ),
        pytest.param(lambda vae: vae.double(), "takes float32, bfloat16 or float16", id="float64"),
        pytest.param(
            lambda vae: vae.to(torch.float64), "takes float32, bfloat16 or float16", id="to float64"
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line_and_changes_nothing(vae, stock, ask, words):
    with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
        ask(vae)
    assert decodes_as(vae, stock)
