"""The Flax build as diffusers' VAE: its files and weights, bit for bit, and its calls in pipelines."""

import copy
import importlib
import inspect
import json
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from flax import nnx
from safetensors.torch import load_file, save_file

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.flax import (
    FlaxAutoencoderKLCogVideoX,
    FlaxAutoencoderKLCogVideoXConfig,
    FlaxVAEForPipelines,
)
from cogvideox_torchax.vae.checkpoint import ModelError
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.nnx.config import DOWN_BLOCK, UP_BLOCK
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference, small_pipelines
from tests.processes import printed_by
from tests.vae.torchax.conftest import Z, decodes_as, shallow_stock

WEIGHTS = "diffusion_pytorch_model.safetensors"


def test_every_tensor_of_the_full_model_has_one_place():
    with torch.device("meta"):
        stock = AutoencoderKLCogVideoX(use_quant_conv=True, use_post_quant_conv=True)  # beside the published
    want = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    config = FlaxAutoencoderKLCogVideoXConfig.from_dict(stock.config)
    state = nnx.state(nnx.eval_shape(lambda: FlaxAutoencoderKLCogVideoX(config, rngs=nnx.Rngs(0))))
    places = [
        (weights.diffusers_name(path), weights.torch_shape(path, variable.shape))
        for path, variable in nnx.to_flat_state(state)
    ]
    assert len(places) == len(want) == 436 + 4
    assert dict(places) == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_and_save_give_back_the_same_files(tmp_path, dtype):
    torch_dtype = getattr(torch, dtype)
    stock = reference.small_vae(use_quant_conv=True, **reference.TWO_LEVELS).to(torch_dtype)
    stock.save_pretrained(tmp_path / "vae")
    vae = FlaxVAEForPipelines.from_pretrained(tmp_path / "vae", dtype=torch_dtype)
    assert vae.dtype == torch_dtype
    vae.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "vae" / WEIGHTS).read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("vae", "again")]
    assert configs[0] == configs[1]


def test_shards_and_compiled_names_load(small_vae, tmp_path):
    small_vae.save_pretrained(tmp_path, max_shard_size="500KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in load_file(shards[0]).items()}
    save_file(tensors, shards[0], metadata={"format": "pt"})
    vae = FlaxAutoencoderKLCogVideoX.from_pretrained(tmp_path)
    for name, array in weights.state_dict(nnx.state(vae, nnx.Param)).items():
        assert np.array_equal(array, small_vae.state_dict()[name].numpy())


def test_param_dtype_stores_and_dtype_computes():
    stock = reference.small_vae(**reference.TWO_LEVELS)
    vae = FlaxAutoencoderKLCogVideoX.from_state_dict(
        stock.config, stock.state_dict(), dtype=jnp.bfloat16, param_dtype=jnp.float32
    )
    assert {str(array.dtype) for array in jax.tree.leaves(nnx.state(vae, nnx.Param))} == {"float32"}
    found = vae.decode(jnp.zeros((1, 1, 2, 3, 16))), vae.encode(jnp.zeros((1, 1, 4, 6, 3))).mean
    assert [vae.dtype, *(array.dtype for array in found)] == [jnp.bfloat16] * 3


CONVOLUTION = "decoder.mid_block.resnets.1.conv2.conv.weight"


def _transpose(state):
    state["encoder.conv_in.conv.weight"] = state["encoder.conv_in.conv.weight"].transpose(0, 1)


WRONG_STATES = {
    "missing": (lambda s: s.pop(CONVOLUTION), f"missing {CONVOLUTION}"),
    "left over": (lambda s: s.update(extra=torch.zeros(2)), "unexpected extra"),
    "shape": (
        _transpose,
        r"encoder.conv_in.conv.weight of the state dict has the shape \(3, 8, 3, 3, 3\): the config asks "
        r"for \(8, 3, 3, 3, 3\)",
    ),
    "twice": (lambda s: s.update({f"_orig_mod.{CONVOLUTION}": s[CONVOLUTION]}), f"gives {CONVOLUTION} twice"),
}


@pytest.mark.parametrize(("change", "words"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_wrong_state_dict_is_named(small_vae, change, words):
    state = dict(small_vae.state_dict())
    change(state)
    with pytest.raises(ModelError, match=words):
        FlaxAutoencoderKLCogVideoX.from_state_dict(small_vae.config, state)


def test_the_configs_defaults_are_diffusers():
    signature = inspect.signature(AutoencoderKLCogVideoX.__init__)
    wanted = {name: parameter.default for name, parameter in list(signature.parameters.items())[1:]}
    found = FlaxAutoencoderKLCogVideoXConfig().to_dict()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(wanted)), "but for tuples and lists"


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
    with pytest.raises(ModelError, match=words):
        FlaxAutoencoderKLCogVideoXConfig.from_dict({**small_vae.config, **change})


def test_fields_that_change_nothing_are_let_through(small_vae):
    extra = {"sample_size": 256, "_name_or_path": "x", "something_new": None}
    config = FlaxAutoencoderKLCogVideoXConfig.from_dict({**small_vae.config, **extra})
    assert config == FlaxAutoencoderKLCogVideoXConfig.from_dict(small_vae.config)


CONFIG = FlaxAutoencoderKLCogVideoXConfig(
    block_out_channels=(4, 4),
    down_block_types=(DOWN_BLOCK,) * 2,
    up_block_types=(UP_BLOCK,) * 2,
    layers_per_block=0,
    norm_num_groups=2,
    latent_channels=2,
    temporal_compression_ratio=2,
)

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
vae.tiles = TileSettings(2, 4)
tiled = vae.decode(latents)
vae.tiles = None
vae.place_on(make_mesh(dp=1, tp=2, devices=make_mesh().devices.flat[:2]))
on_mesh = vae.decode(latents)
np.savez(f"{directory}/results.npz", latents=latents, tiled=tiled, on_mesh=on_mesh)
"""


def test_without_torch_a_model_is_loaded_saved_and_run_in_tiles_and_on_a_mesh_too(tmp_path):
    vae = FlaxAutoencoderKLCogVideoX(CONFIG, rngs=nnx.Rngs(0))
    vae.save_pretrained(tmp_path)
    video = np.random.default_rng(0).uniform(-1, 1, (1, 1, 4, 16, 3)).astype(np.float32)
    np.save(tmp_path / "video.npy", video)
    printed_by(WITHOUT_TORCH, tmp_path)  # with the quick compiler of the tests
    assert (tmp_path / "saved" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()
    saved, given = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "saved", tmp_path))
    assert saved == given
    with np.load(tmp_path / "results.npz") as found:
        z = torch.from_numpy(found["latents"]).movedim(-1, 1)
        in_tiles = FlaxVAEForPipelines(vae)
        in_tiles.enable_tiling(tile_sample_min_height=4, tile_sample_min_width=8)
        tiled = in_tiles.decode(z).sample
        wanted = {
            "latents": vae.encode(video).mode(),
            "tiled": np.moveaxis(tiled.numpy(), 1, -1),
            "on_mesh": vae.decode(found["latents"]),
        }
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, atol=2e-5, err_msg=name)


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
    return shallow_stock()


@pytest.fixture(scope="module")
def other():
    return shallow_stock(seed=1)


@pytest.fixture
def vae(stock):
    return FlaxVAEForPipelines.from_diffusers(stock)


def test_its_state_is_the_stock_models_and_its_own(vae, stock):
    state, held = vae.state_dict(), stock.state_dict()
    assert state.keys() == held.keys()
    assert all(torch.equal(state[name], value) for name, value in held.items())
    state["decoder.conv_in.conv.bias"] += 1
    assert decodes_as(vae, stock)


@pytest.mark.parametrize("on_jax", [False, True])
def test_loaded_weights_are_those_that_it_runs(vae, stock, other, on_jax):
    assert decodes_as(vae, stock)
    held = other.state_dict()
    state = {name: runtime.to_jax(value) if on_jax else value for name, value in held.items()}
    answer = vae.load_state_dict(state)
    assert answer.missing_keys + answer.unexpected_keys == []
    assert decodes_as(vae, other)


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


NAME = "decoder.conv_in.conv.weight"


def with_one_cut(vae):
    """Return other weights than the model's, of which one does not fit."""
    state = {name: value * 2 for name, value in vae.state_dict().items()}
    return {**state, NAME: state[NAME][:1]}


REFUSED = {
    "gradients": (lambda vae: vae.requires_grad_(), "gradients"),
    "checkpointing": (lambda vae: vae.enable_gradient_checkpointing(), "gradients"),
    "a mesh": (lambda vae: vae.place_on("dp=8"), "make one with make_mesh"),
    "a state with a prefix": (lambda vae: vae.state_dict(prefix="vae."), "takes no options"),
    "a part of a state": (lambda vae: vae.load_state_dict(vae.state_dict(), strict=False), "is strict"),
    "weights that do not fit": (lambda vae: vae.load_state_dict(with_one_cut(vae)), NAME),
    "float64": (lambda vae: vae.double(), "takes float32, bfloat16 or float16"),
    "to float64": (lambda vae: vae.to(torch.float64), "takes float32, bfloat16 or float16"),
}


@pytest.mark.parametrize(("ask", "words"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_refused_in_one_line_and_changes_nothing(vae, stock, ask, words):
    with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
        ask(vae)
    assert decodes_as(vae, stock)


def test_what_changes_nothing_is_let_through(vae, stock):
    assert vae.requires_grad_(False) is vae
    assert vae.eval() is vae
    assert decodes_as(vae.train(False), stock)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae))])
def test_a_copy_has_weights_of_its_own(vae, stock, other, copied):
    made = copied(vae)
    made.load_state_dict(other.state_dict())
    assert decodes_as(made, other)
    assert decodes_as(vae, stock)


def test_a_copy_keeps_a_mesh_and_a_pickle_leaves_it(stock):
    vae = port(FlaxVAEForPipelines.from_diffusers(stock), mesh=make_mesh(1, 2))
    assert copy.deepcopy(vae).mesh is vae.mesh
    assert copy.copy(vae.flax_vae).mesh is vae.flax_vae.mesh
    loaded = pickle.loads(pickle.dumps(vae))
    assert (loaded.mesh, loaded.flax_vae.mesh) == (None, None)
    assert vae.flax_vae.mesh is not None
    assert decodes_as(loaded, stock)
