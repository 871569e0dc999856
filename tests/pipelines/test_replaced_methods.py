"""What users replace is seen: methods of classes, before `port` or after it, and of objects."""

import logging
import types
from unittest import mock

import diffusers
import pytest
import torch
import transformers
from diffusers import FirstBlockCacheConfig
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as vae_classes
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers import cogvideox_transformer_3d as transformer_classes
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import nn

from cogvideox_torchax import port, runtime
from cogvideox_torchax.vae.torchax.autoencoder import port_vae
from tests import small_pipelines
from tests.reference import largest_error
from tests.runtime.test_views import WRITES

pytestmark = pytest.mark.usefixtures("torchax_off")

Transformer = transformer_classes.CogVideoXTransformer3DModel


def changed(result):
    """Return a result of a module, a tensor or several in a container, whose first tensor is changed."""
    if isinstance(result, tuple):
        return (changed(result[0]), *result[1:])
    if isinstance(result, torch.Tensor):
        return result * torch.linspace(0.7, 1.5, result.shape[-1], device=result.device).to(result.dtype)
    result[next(iter(result))] = changed(result[0])
    return result


def replaced(kind, name="forward", change=changed):
    """Return a patch of a class's method by one whose result is changed."""
    method = getattr(kind, name)

    def replacement(self, *args, **kwargs):
        return change(method(self, *args, **kwargs))

    if name == "__call__":  # diffusers reads a processor's signature

        def replacement(
            self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None
        ):
            inputs = hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            return change(method(self, attn, *inputs))

    return mock.patch.object(kind, name, replacement)


def counted(result_of):
    """Return a patch of the transformer's forward by one that counts its calls on the model."""

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        result = result_of(self, *args, **kwargs)
        return result if self.calls % 2 else changed(result)

    return mock.patch.object(Transformer, "forward", forward)


def branching(result_of):
    """Return a patch of the transformer's forward by one that branches on a value of its result."""

    def forward(self, *args, **kwargs):
        result = result_of(self, *args, **kwargs)
        return changed(result) if result[0].abs().mean().item() > 0.01 else result

    return mock.patch.object(Transformer, "forward", forward)


def inputs():
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(3 * 2 * 4, 16, generator=draw)
    return {
        "hidden_states": torch.randn(2, 3, 16, 4, 8, generator=draw),
        "encoder_hidden_states": torch.randn(2, 16, 32, generator=draw),
        "timestep": torch.tensor([7, 7]),
        "image_rotary_emb": (table.cos(), table.sin()),
        "return_dict": False,
    }


def step(model, calls=1):
    """Return the last of some calls' results, on the host."""
    on_jax = runtime.is_on_jax(model)
    given = inputs()
    if on_jax:
        given = torch.utils._pytree.tree_map_only(torch.Tensor, runtime.to_jax, given)
    return runtime.to_torch([model(**given)[0] for _ in range(calls)][-1])


def stock():
    return small_pipelines.transformer("5b", num_layers=2, time_embed_dim=24)


def ported():
    pipe = diffusers.CogVideoXPipeline(*(None, None, None, stock()), scheduler=small_pipelines.scheduler())
    return port(pipe).transformer


@pytest.fixture(scope="module")
def ported_before():
    model = ported()
    return model, step(model)


OF_THE_TRANSFORMER = {
    "the transformer": replaced(Transformer),
    "a block": replaced(transformer_classes.CogVideoXBlock),
    "an attention processor": replaced(CogVideoXAttnProcessor2_0, "__call__"),
    "a feed-forward": replaced(FeedForward),
    "a modulated norm": replaced(CogVideoXLayerNormZero),
    "a norm": replaced(nn.LayerNorm),
    "a projection": replaced(nn.Linear),
    "GELU": replaced(GELU),
    "a patch embedding": replaced(transformer_classes.CogVideoXPatchEmbed),
    "a forward that counts": counted(Transformer.forward),
    "a forward that branches": branching(Transformer.forward),
}


@pytest.mark.parametrize("patch", OF_THE_TRANSFORMER.values(), ids=OF_THE_TRANSFORMER)
def test_a_method_of_the_transformers_classes_acts_as_in_pytorch(patch, ported_before):
    model, before = ported_before
    with patch:
        expected = step(stock(), calls=2)
        assert largest_error(expected, before) > 1e-3, "the replacement changes nothing"
        assert largest_error(step(ported(), calls=2), expected) < 1e-5, "replaced before port"
        assert largest_error(step(model, calls=2), expected) < 1e-5, "replaced after port"
    vars(model).pop("calls", None)
    assert torch.equal(step(model), before), "taken out again"


OF_THE_VAE = {
    "_decode": replaced(vae_classes.AutoencoderKLCogVideoX, "_decode"),
    "decode": replaced(vae_classes.AutoencoderKLCogVideoX, "decode"),
    "a causal convolution": replaced(vae_classes.CogVideoXCausalConv3d),
    "a 3-D convolution": replaced(vae_classes.CogVideoXSafeConv3d),
    "a spatial norm": replaced(vae_classes.CogVideoXSpatialNorm3D),
    "a residual block": replaced(vae_classes.CogVideoXResnetBlock3D),
    "an upsampler": replaced(CogVideoXUpsample3D),
    "the decoder": replaced(vae_classes.CogVideoXDecoder3D),
    "SiLU": replaced(nn.SiLU),
    "GroupNorm": replaced(nn.GroupNorm),
}


def decoded(vae):
    z = torch.randn(1, 16, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    return runtime.to_torch(vae.decode(runtime.to_jax(z) if runtime.is_on_jax(vae) else z).sample)


@pytest.fixture(scope="module")
def vae_before():
    vae = port_vae(small_pipelines.vae())
    vae.place()
    return vae, decoded(vae)


@pytest.mark.parametrize("patch", OF_THE_VAE.values(), ids=OF_THE_VAE)
def test_a_method_of_the_vaes_classes_acts_as_in_pytorch(patch, vae_before):
    vae, before = vae_before
    with patch:
        expected = decoded(small_pipelines.vae())
        assert largest_error(expected, before) > 1e-3, "the replacement changes nothing"
        assert largest_error(decoded(vae), expected) < 2e-5
    assert torch.equal(decoded(vae), before), "taken out again"


def test_an_encoder_of_a_replaced_method_acts_as_in_pytorch():
    x = torch.rand(1, 3, 5, 8, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    vae = port_vae(small_pipelines.vae())
    vae.place()
    with replaced(vae_classes.AutoencoderKLCogVideoX, "_encode"):
        expected = small_pipelines.vae().encode(x).latent_dist.parameters
        result = vae.encode(runtime.to_jax(x)).latent_dist.parameters
    assert largest_error(result, expected) < 1e-5


OF_A_PIPELINE = {
    "decode_latents": replaced(diffusers.CogVideoXPipeline, "decode_latents"),
    "prepare_latents": replaced(diffusers.CogVideoXPipeline, "prepare_latents"),
    "the text encoder": replaced(transformers.T5EncoderModel),
}


def test_a_method_of_a_pipeline_replaced_after_the_port_acts_as_in_pytorch():
    pipe = port(small_pipelines.one_layer())
    before = pipe(**small_pipelines.inputs("text")).frames
    for name, patch in OF_A_PIPELINE.items():
        with patch:
            expected = small_pipelines.one_layer()(**small_pipelines.inputs("text")).frames
            result = pipe(**small_pipelines.inputs("text")).frames
        assert largest_error(expected, before) > 1e-3, name
        assert largest_error(result, expected) < 1e-4, name


def test_a_hook_may_write_through_every_kind_of_view():
    def hook(_module, _args, y):
        for write in WRITES.values():
            write(y.view(2, 4, 6))

    results = []
    for model in (stock(), ported()):
        model.time_embedding.linear_2.register_forward_hook(hook)
        results.append(step(model))
    assert largest_error(*reversed(results)) < 1e-5


def test_what_runs_operation_by_operation_is_named_once(caplog):
    model = ported()
    with caplog.at_level(logging.WARNING, "cogvideox_torchax"), counted(Transformer.forward):
        step(model, calls=3)
    assert [record.getMessage() for record in caplog.records] == [
        "transformer: CogVideoXTransformer3DModel runs operation by operation, since it changes its modules' "
        "attributes"
    ]


def test_a_cache_beside_a_replaced_method_is_refused():
    model = ported()
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with replaced(Transformer), pytest.raises(ValueError, match="call disable_cache[(][)], or take"):
        step(model)


def test_a_forward_of_an_object_acts_as_in_pytorch(ported_before):
    def forward(self, *args, **kwargs):
        return changed(original(*args, **kwargs))

    results = []
    for model in (stock(), ported_before[0]):
        original = model.forward
        model.forward = types.MethodType(forward, model)
        results.append(step(model))
        del model.forward
    assert largest_error(*reversed(results)) < 1e-5


def test_a_forward_that_puts_in_other_modules_is_refused_by_its_name(ported_before):
    model, _ = ported_before
    original, blocks = model.forward, nn.ModuleList([nn.Identity()])

    def forward(self, *args, **kwargs):
        with mock.patch.dict(self._modules, transformer_blocks=blocks):
            return original(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    try:
        with pytest.raises(
            ValueError, match=f"transformer.forward was set by {__name__}, which puts in other"
        ):
            step(model)
    finally:
        del model.forward


def test_a_cycle_of_modules_is_refused_by_its_name():
    pipe = small_pipelines.one_layer()
    pipe.transformer.norm_out.outer = nn.ModuleDict({"back": pipe.transformer})
    with pytest.raises(ValueError, match="transformer.norm_out.outer.back is a module that contains itself"):
        port(pipe)
    assert not runtime.is_on_jax(pipe.text_encoder)
