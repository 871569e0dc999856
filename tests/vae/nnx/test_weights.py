"""Diffusers' format and the NNX state, both ways, bit for bit; configs; what a wrong model is told."""

import inspect
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from flax import nnx
from safetensors.torch import load_file, save_file

from cogvideox_torchax.flax import (
    FlaxAutoencoderKLCogVideoX,
    FlaxAutoencoderKLCogVideoXConfig,
    FlaxVAEForPipelines,
)
from cogvideox_torchax.vae.checkpoint import ModelError
from cogvideox_torchax.vae.nnx import weights
from tests import reference

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    "options", [{}, {"use_quant_conv": True, "use_post_quant_conv": True}], ids=["published", "quant convs"]
)
def test_every_tensor_of_the_full_model_has_one_place(options):
    with torch.device("meta"):
        stock = AutoencoderKLCogVideoX(**options)
    want = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    config = FlaxAutoencoderKLCogVideoXConfig.from_dict(stock.config)
    state = nnx.state(nnx.eval_shape(lambda: FlaxAutoencoderKLCogVideoX(config, rngs=nnx.Rngs(0))))
    places = [
        (weights.diffusers_name(path), weights.torch_shape(path, variable.shape))
        for path, variable in nnx.to_flat_state(state)
    ]
    assert len(places) == len(want) == 436 + 4 * bool(options)
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


def test_tensors_are_taken_one_at_a_time(small_vae):
    alive: list[weakref.ref] = []

    def tensors():
        for name, tensor in weights.from_torch(small_vae.state_dict()):
            array = tensor.copy()
            alive.append(weakref.ref(array))
            yield name, array
            del array
            # The one before may still be on its way out of JAX's hands.
            assert sum(array() is not None for array in alive) <= 3

    config = FlaxAutoencoderKLCogVideoXConfig.from_dict(small_vae.config)
    FlaxAutoencoderKLCogVideoX.from_tensors(config, tensors())
    assert len(alive) == len(small_vae.state_dict())


def test_param_dtype_stores_and_dtype_computes():
    stock = reference.small_vae(**reference.TWO_LEVELS)
    vae = FlaxAutoencoderKLCogVideoX.from_state_dict(
        stock.config, stock.state_dict(), dtype=jnp.bfloat16, param_dtype=jnp.float32
    )
    assert {str(array.dtype) for array in jax.tree.leaves(nnx.state(vae, nnx.Param))} == {"float32"}
    found = vae.decode(jnp.zeros((1, 1, 2, 3, 16))), vae.encode(jnp.zeros((1, 1, 4, 6, 3))).mean
    assert [vae.dtype, *(array.dtype for array in found)] == [jnp.bfloat16] * 3


NAME = "decoder.mid_block.resnets.1.conv2.conv.weight"


def _transpose(state):
    state["encoder.conv_in.conv.weight"] = state["encoder.conv_in.conv.weight"].transpose(0, 1)


WRONG = {
    "missing": (lambda s: s.pop(NAME), f"missing {NAME}"),
    "left over": (lambda s: s.update(extra=torch.zeros(2)), "unexpected extra"),
    "shape": (
        _transpose,
        r"encoder.conv_in.conv.weight of the state dict has the shape \(3, 8, 3, 3, 3\): the config asks "
        r"for \(8, 3, 3, 3, 3\)",
    ),
    "twice": (lambda s: s.update({f"_orig_mod.{NAME}": s[NAME]}), f"gives {NAME} twice"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
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


BAD_CONFIGS = {
    "unknown field": ({"use_attention": True}, "use_attention = True"),
    "activation": ({"act_fn": "gelu"}, "act_fn is 'gelu'"),
    "block type": ({"up_block_types": ["Other"] * 4}, "up_block_types is"),
    "compression": ({"temporal_compression_ratio": 3}, "temporal_compression_ratio is 3"),
    "groups": ({"norm_num_groups": 7}, "norm_num_groups is 7"),
}


@pytest.mark.parametrize(("change", "words"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_config_that_cannot_be_honoured_is_refused(small_vae, change, words):
    with pytest.raises(ModelError, match=words):
        FlaxAutoencoderKLCogVideoXConfig.from_dict({**small_vae.config, **change})


def test_fields_that_change_nothing_are_let_through(small_vae):
    extra = {"sample_size": 256, "_name_or_path": "x", "something_new": None}
    config = FlaxAutoencoderKLCogVideoXConfig.from_dict({**small_vae.config, **extra})
    assert config == FlaxAutoencoderKLCogVideoXConfig.from_dict(small_vae.config)
