"""What users replace is seen: methods of classes, before `port` or after it, and of objects."""

import functools
import types
from unittest import mock

import diffusers
import pytest
import torch
import transformers
from diffusers import FirstBlockCacheConfig
from diffusers.models.activations import GELU
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as vae_classes
from diffusers.models.transformers import cogvideox_transformer_3d as transformer_classes
from torch import nn

from cogvideox_torchax import port, runtime
from cogvideox_torchax.vae.torchax.autoencoder import port_vae
from tests import reference, small_pipelines
from tests.pipelines import test_blocks
from tests.pipelines.test_blocks import step
from tests.reference import largest_error

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

    @functools.wraps(method)  # diffusers reads a processor's signature
    def replacement(self, *args, **kwargs):
        return change(method(self, *args, **kwargs))

    return mock.patch.object(kind, name, replacement)


def changed_if_large(result):
    return changed(result) if result[0].abs().mean().item() > 0.01 else result


def stock():
    return test_blocks.stock(num_layers=1)


def ported(model=None):
    parts = (None, None, None, model or stock())
    return port(diffusers.CogVideoXPipeline(*parts, scheduler=small_pipelines.scheduler())).transformer


@pytest.fixture(scope="module")
def model():
    return ported()


OF_THE_TRANSFORMER = {
    "the transformer": replaced(Transformer),
    "a block": replaced(transformer_classes.CogVideoXBlock),
    "an attention processor": replaced(transformer_classes.CogVideoXAttnProcessor2_0, "__call__"),
    "a feed-forward": replaced(transformer_classes.FeedForward),
    "a modulated norm": replaced(transformer_classes.CogVideoXLayerNormZero),
    "a norm": replaced(nn.LayerNorm),
    "a projection": replaced(nn.Linear),
    "GELU": replaced(GELU),
    "a patch embedding": replaced(transformer_classes.CogVideoXPatchEmbed),
    "a forward that branches": replaced(Transformer, change=changed_if_large),
}


@pytest.mark.parametrize("patch", OF_THE_TRANSFORMER.values(), ids=OF_THE_TRANSFORMER)
def test_a_method_of_the_transformers_classes_replaced_after_the_port_acts_as_in_pytorch(patch, model):
    before = step(model)
    with patch:
        expected = step(stock())
        assert largest_error(expected, before) > 1e-3, "the replacement changes nothing"
        assert largest_error(step(model), expected) < 1e-5
    assert torch.equal(step(model), before), "taken out again"


def test_a_processors_call_that_takes_more_gets_it(model):
    kind = transformer_classes.CogVideoXAttnProcessor2_0

    def call(self, attn, hidden_states, *args, factor=1.0, image_rotary_emb=None, **options):
        return original(
            self, attn, hidden_states * factor, *args, image_rotary_emb=image_rotary_emb, **options
        )

    original = kind.__call__
    with mock.patch.object(kind, "__call__", call):
        expected, plain = (step(stock(), attention_kwargs=given) for given in ({"factor": 3.0}, None))
        assert largest_error(expected, plain) > 1e-3
        assert largest_error(step(model, attention_kwargs={"factor": 3.0}), expected) < 1e-5


def test_a_forward_that_changes_an_attribute_runs_operation_by_operation_and_is_named_once(caplog):
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return changed(original(self, *args, **kwargs)) if self.calls % 2 else original(self, *args, **kwargs)

    original = Transformer.forward
    with mock.patch.object(Transformer, "forward", forward):  # before port
        expected, results = (torch.stack([step(each) for _ in range(3)]) for each in (stock(), ported()))
    assert largest_error(results, expected) < 1e-5
    assert [record.getMessage() for record in caplog.records] == [
        "transformer: CogVideoXTransformer3DModel runs operation by operation, since it changes its modules' "
        "attributes"
    ]


decoded = functools.partial(reference.run_decode, z=reference.latents(3, height=4, width=8))
encoded = functools.partial(reference.run_encode, x=reference.video(5, height=8, width=16))


OF_THE_VAE = {
    "_encode": (encoded, replaced(vae_classes.AutoencoderKLCogVideoX, "_encode")),
    "_decode": (decoded, replaced(vae_classes.AutoencoderKLCogVideoX, "_decode")),
    "decode": (decoded, replaced(vae_classes.AutoencoderKLCogVideoX, "decode")),
    "a causal convolution": (decoded, replaced(vae_classes.CogVideoXCausalConv3d)),
    "a 3-D convolution": (decoded, replaced(vae_classes.CogVideoXSafeConv3d)),
    "a spatial norm": (decoded, replaced(vae_classes.CogVideoXSpatialNorm3D)),
    "a residual block": (decoded, replaced(vae_classes.CogVideoXResnetBlock3D)),
    "an upsampler": (decoded, replaced(vae_classes.CogVideoXUpsample3D)),
    "the decoder": (decoded, replaced(vae_classes.CogVideoXDecoder3D)),
    "SiLU": (decoded, replaced(nn.SiLU)),
    "GroupNorm": (decoded, replaced(nn.GroupNorm)),
}


@pytest.fixture(scope="module")
def vae():
    vae = port_vae(small_pipelines.vae())
    vae.place()
    return vae


@pytest.mark.parametrize(("run", "patch"), OF_THE_VAE.values(), ids=OF_THE_VAE)
def test_a_method_of_the_vaes_classes_acts_as_in_pytorch(run, patch, vae):
    before = run(vae)
    with patch:
        expected = run(small_pipelines.vae())
        assert largest_error(expected, before) > 1e-3, "the replacement changes nothing"
        assert largest_error(run(vae), expected) < 2e-5
    assert torch.equal(run(vae), before), "taken out again"


OF_A_PIPELINE = {
    "decode_latents": replaced(diffusers.CogVideoXPipeline, "decode_latents"),
    "prepare_latents": replaced(diffusers.CogVideoXPipeline, "prepare_latents"),
    "the text encoder": replaced(transformers.T5EncoderModel),
}


def test_a_method_of_a_pipeline_replaced_after_the_port_acts_as_in_pytorch():
    def frames(pipe):
        return pipe(**small_pipelines.inputs("text", num_inference_steps=1)).frames

    stock, pipe = small_pipelines.one_layer(), port(small_pipelines.one_layer())
    before = frames(pipe)
    for name, patch in OF_A_PIPELINE.items():
        with patch:
            expected, result = frames(stock), frames(pipe)
        assert largest_error(expected, before) > 1e-3, name
        assert largest_error(result, expected) < 1e-4, name


def test_a_cache_beside_a_replaced_method_is_refused():
    model = ported(test_blocks.stock())
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with replaced(Transformer), pytest.raises(ValueError, match="call disable_cache[(][)], or take"):
        step(model)


def test_a_forward_of_an_object_acts_as_in_pytorch(model, monkeypatch):
    def forward(self, *args, **kwargs):
        return changed(type(self).forward(self, *args, **kwargs))

    results = []
    for each in (stock(), model):
        monkeypatch.setitem(vars(each), "forward", types.MethodType(forward, each))
        results.append(step(each))
    assert largest_error(*reversed(results)) < 1e-5


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_a_forward_that_puts_in_other_modules_is_refused_by_its_name(name):
    def forward(self, *args, **kwargs):
        with mock.patch.dict(self._modules, extra=nn.Identity()):
            return type(self).forward(self, *args, **kwargs)

    pipe = port(small_pipelines.one_layer())
    network = pipe.components[name]
    network.forward = types.MethodType(forward, network)
    with pytest.raises(ValueError, match=f"^{name}.forward was set by {__name__}, which puts in other"):
        pipe(**small_pipelines.inputs("text", num_inference_steps=1))


def test_a_cycle_of_modules_is_refused_by_its_name():
    pipe = small_pipelines.one_layer()
    pipe.transformer.norm_out.outer = nn.ModuleDict({"back": pipe.transformer})
    with pytest.raises(ValueError, match="transformer.norm_out.outer.back is a module that contains itself"):
        port(pipe)
    assert not runtime.is_on_jax(pipe.text_encoder)
