"""What users change acts as in PyTorch, and is named in a line of the log; the rest keeps its kernels."""

import contextlib
import functools
import re
import time
import types
from collections import OrderedDict
from unittest import mock

import diffusers
import pytest
import torch
import transformers
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as vae_classes
from diffusers.models.transformers import cogvideox_transformer_3d as transformer_classes
from torch import nn

from benchmarks.plan.networks import described_program, step_tensors
from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.runtime import programs
from cogvideox_torchax.runtime.trees import change_in
from tests import reference, small_pipelines
from tests.pipelines.test_blocks import step, stock as of_layers
from tests.pipelines.test_pipeline import frames
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


stock = functools.partial(of_layers, num_layers=1)


def pipeline_of(**parts):
    return small_pipelines.build(**{"transformer": None, "text_encoder": None, "tokenizer": None, **parts})


def ported(model=None, **options):
    return port(pipeline_of(vae=None, transformer=model or stock()), **options).transformer


# Changes: functions of a model, applied to stock's and to the ported one. A patch of a class is entered.


def hooked(name, **options):
    """Return a change: a hook after a module, which changes its result."""

    def hook(module, args, *rest):
        return changed(rest[-1])

    return lambda model: model.get_submodule(name).register_forward_hook(hook, **options)


def hooked_before(name):
    def hook(module, args, kwargs):
        if args:
            return (changed(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed(kwargs["hidden_states"])}

    return lambda model: model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def with_forward(name):
    """Return a change: a `forward` that is set on an object."""

    def forward(self, *args, **kwargs):
        return changed(type(self).forward(self, *args, **kwargs))

    def change(model):
        module = model.get_submodule(name)
        module.forward = types.MethodType(forward, module)

    return change


def replacing(name, make):
    """Return a change: another module, `make(module)`, in the place of one."""
    return lambda model: model.set_submodule(name, make(model.get_submodule(name)))


class Around(nn.Sequential):
    """A user's module around another one."""

    def forward(self, *args, **kwargs):
        return changed(self[0](*args, **kwargs))


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized(name):
    return lambda model: nn.utils.parametrize.register_parametrization(
        model.get_submodule(name), "weight", Twice()
    )


class Processor(transformer_classes.CogVideoXAttnProcessor2_0):
    def __call__(
        self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None
    ):
        given = hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        return changed(super().__call__(attn, *given))


def with_lora(*names, alpha=64, **options):
    def change(model):
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(3)
        given = {"r": 2, "lora_alpha": alpha, "target_modules": [*names], "init_lora_weights": False}
        inject_adapter_in_model(LoraConfig(**given, **options), model)

    return change


def set_a_method(name, method):
    """Return a change: a method of an object, other than its forward, whose result is changed."""

    def change(model):
        module = model.get_submodule(name)
        original = getattr(module, method)
        setattr(module, method, lambda *args: changed(original(*args)))

    return change


BLOCK = "transformer_blocks.0"
TRANSFORMER_CHANGES = {
    "a hook on a projection": (hooked(f"{BLOCK}.attn1.to_v"), f"{BLOCK}.attn1.to_v has a hook"),
    "a hook with keywords": (hooked(f"{BLOCK}.attn1", with_kwargs=True), f"{BLOCK}.attn1 has a hook"),
    "a hook before a norm": (hooked_before(f"{BLOCK}.norm1"), f"{BLOCK}.norm1 has a hook"),
    "a hook on a block": (hooked(BLOCK), f"{BLOCK} has a hook"),
    "a forward of a feed-forward": (with_forward(f"{BLOCK}.ff"), f"{BLOCK}.ff has a forward of its own"),
    "a forward of the transformer": (with_forward(""), f"the forward set by {__name__} runs"),
    "another module": (
        replacing(f"{BLOCK}.ff", Around),
        f"{BLOCK} has a Around as its ff",
    ),
    "a module around a projection": (
        replacing(f"{BLOCK}.attn1.to_v", Around),
        f"{BLOCK}.attn1.to_v is a Around of {__name__}",
    ),
    "another processor": (
        lambda model: model.set_attn_processor(Processor()),
        f"{BLOCK} has a Processor as its attn1.processor",
    ),
    "another layer after a projection": (
        replacing(f"{BLOCK}.attn1.to_out.1", lambda _: nn.Tanh()),
        f"{BLOCK} has other layers than dropouts after a projection",
    ),
    "a method of an object": (
        set_a_method(f"{BLOCK}.ff.net.0", "gelu"),
        f"{BLOCK}.ff.net.0 has a gelu of its own",
    ),
    "a parametrization": (parametrized("proj_out"), "proj_out has parametrized weights"),
    "a class: the transformer": (replaced(Transformer), "has another method, forward"),
    "a class: a block": (replaced(transformer_classes.CogVideoXBlock), "has another method, forward"),
    "a class: a processor": (
        replaced(transformer_classes.CogVideoXAttnProcessor2_0, "__call__"),
        "has another method, __call__",
    ),
    "a class: a feed-forward": (replaced(transformer_classes.FeedForward), "has another method, forward"),
    "a class: a modulated norm": (
        replaced(transformer_classes.CogVideoXLayerNormZero),
        "has another method, forward",
    ),
    "a class: a norm": (replaced(nn.LayerNorm), "has another method, forward"),
    "a class: a projection": (replaced(nn.Linear), "has another method, forward"),
    "a class: GELU": (replaced(diffusers.models.activations.GELU), "has another method, forward"),
    "a class: a patch embedding": (
        replaced(transformer_classes.CogVideoXPatchEmbed),
        "has another method, forward",
    ),
    "a class: a forward that branches": (
        replaced(Transformer, change=lambda y: changed(y) if y[0].abs().mean().item() > 0.01 else y),
        "runs operation by operation, since",
    ),
}
"""By what is changed: the change, and the words that name it."""

RESNET = "decoder.up_blocks.0.resnets.0"


def repeat_edges(model):
    model.decoder.conv_in.pad_mode, model.decoder.conv_in.conv.padding = "replicate", (0, 0, 0)


def set_circular_edges(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode, module._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]


def make_a_bias_a_buffer(model):
    conv = model.get_submodule(RESNET).conv2.conv
    conv.register_buffer("bias", conv._parameters.pop("bias").detach() * 2)


VAE_CHANGES = {
    "a setting: repeated edges": (repeat_edges, "decoder.conv_in has pad_mode='replicate'"),
    "a setting: circular edges": (
        set_circular_edges,
        "decoder.up_blocks.0.upsamplers.0 has a convolution with padding_mode='circular'",
    ),
    "a weight as a buffer": (make_a_bias_a_buffer, f"{RESNET}.conv2.conv has a weight that is no parameter"),
    "a method of an object": (
        set_a_method(f"{RESNET}.conv1", "fake_context_parallel_forward"),
        f"{RESNET}.conv1 has a fake_context_parallel_forward of its own",
    ),
    "a setting: norms with unlike epsilons": (
        lambda model: setattr(model.get_submodule(RESNET).norm2.norm_layer, "eps", 0.5),
        f"{RESNET} has two kinds of norms",
    ),
    "a hook on a norm": (hooked(f"{RESNET}.norm1"), f"{RESNET}.norm1 has a hook"),
    "a hook with keywords": (hooked(f"{RESNET}.conv2", with_kwargs=True), f"{RESNET}.conv2 has a hook"),
    "a hook before a convolution": (hooked_before("decoder.conv_out"), "decoder.conv_out has a hook"),
    "a hook inside a norm": (
        hooked(f"{RESNET}.norm2.conv_y.conv"),
        f"{RESNET}.norm2.conv_y.conv has a hook",
    ),
    "a hook inside an upsampler": (
        hooked("decoder.up_blocks.0.upsamplers.0.conv"),
        "decoder.up_blocks.0.upsamplers.0.conv has a hook",
    ),
    "a forward of a norm": (with_forward("decoder.norm_out"), "decoder.norm_out has a forward of its own"),
    "another activation": (
        replacing("decoder.mid_block.resnets.0.nonlinearity", lambda _: nn.Tanh()),
        "decoder.mid_block.resnets.0 has a Tanh as its nonlinearity",
    ),
    "a module around a block": (
        replacing(RESNET, Around),
        f"{RESNET} is a Around of {__name__}",
    ),
    "a parametrization": (
        parametrized("decoder.conv_out.conv"),
        "decoder.conv_out has a ParametrizedSafeConv3d as its conv",
    ),
    "a LoRA": (
        with_lora(f"{RESNET}.conv1.conv", "decoder.conv_in.conv", f"{RESNET}.norm2.conv_y.conv"),
        "decoder.conv_in has a Conv3d as its conv",
    ),
    **{
        f"a class: {name}": (replaced(kind), "has another method, forward")
        for name, kind in (
            ("a causal convolution", vae_classes.CogVideoXCausalConv3d),
            ("a 3-D convolution", vae_classes.CogVideoXSafeConv3d),
            ("a spatial norm", vae_classes.CogVideoXSpatialNorm3D),
            ("a residual block", vae_classes.CogVideoXResnetBlock3D),
            ("an upsampler", vae_classes.CogVideoXUpsample3D),
            ("the decoder", vae_classes.CogVideoXDecoder3D),
            ("SiLU", nn.SiLU),
            ("GroupNorm", nn.GroupNorm),
        )
    },
}

ENCODER_CHANGES = {
    "a hook inside a downsampler": (
        hooked("encoder.down_blocks.0.downsamplers.0.conv"),
        "encoder.down_blocks.0.downsamplers.0.conv has a hook",
    ),
    "a LoRA": (
        with_lora("encoder.conv_out.conv", "encoder.down_blocks.0.downsamplers.0.conv"),
        "encoder.down_blocks.0.downsamplers.0 has a Conv2d as its conv",
    ),
}

LAYER = "encoder.block.0.layer.0"
TEXT_CHANGES = {
    "a hook": (hooked(f"{LAYER}.SelfAttention.q"), f"{LAYER}.SelfAttention.q has a hook"),
    "a forward": (
        with_forward("encoder.block.0.layer.1.DenseReluDense.wo"),
        "encoder.block.0.layer.1.DenseReluDense.wo has a forward of its own",
    ),
    "another module": (
        replacing("encoder.final_layer_norm", Around),
        f"encoder.final_layer_norm is a Around of {__name__}",
    ),
    "a parametrization": (
        parametrized(f"{LAYER}.SelfAttention.v"),
        f"{LAYER}.SelfAttention.v has parametrized weights",
    ),
    "a class": (replaced(transformers.T5EncoderModel), "has another method, forward"),
}


def hidden(encoder):
    return runtime.to_torch(encoder(reference.beside(encoder, torch.arange(12).view(1, 12)))[0])


decoded = functools.partial(reference.run_decode, z=reference.latents(3, height=4, width=8))
encoded = functools.partial(reference.run_encode, x=reference.video(5, height=8, width=16))


def ported_vae(**options):
    return reference.on_jax(port(small_pipelines.vae(), **options))


NETWORKS = {
    "transformer": (stock, ported, step, TRANSFORMER_CHANGES, 1e-5),
    "vae": (small_pipelines.vae, ported_vae, decoded, VAE_CHANGES, 2e-5),
    "vae, encoding": (small_pipelines.vae, ported_vae, encoded, ENCODER_CHANGES, 2e-5),
    "text encoder": (
        functools.partial(small_pipelines.text_encoder, num_layers=1),
        lambda **options: port(small_pipelines.one_layer(), **options).text_encoder,
        hidden,
        TEXT_CHANGES,
        1e-5,
    ),
}
"""By network: the functions that make it, stock and ported, and run it; its changes, and its tolerance."""


@contextlib.contextmanager
def undone(model):
    """Leave a model's modules as they were before a `with` block."""
    before = [
        (
            module,
            type(module),
            [(table, table.copy()) for table in tables if type(table) in (dict, OrderedDict)],
        )
        for module in model.modules()
        for tables in [(vars(module), *vars(module).values())]
    ]
    yield
    for module, kind, tables in before:
        module.__class__ = kind
        for table, items in tables:
            table.clear()
            table.update(items)


shared = functools.cache(lambda make, **options: make(**options))
"""Returns a ported network, whose unchanged program is compiled once for all changes."""


def check_change(network, change, words, caplog, *, times=1, **options):
    """Change a ported network and stock's: both compute the same, and the log names the change once."""
    make_stock, make_ported, run, _changes, tolerance = NETWORKS[network]
    model, changed_stock = shared(make_ported, **options), make_stock()
    before = run(model)
    programs._WARNED.clear()  # an earlier test of the same model may have had this warning
    caplog.clear()
    with contextlib.ExitStack() as changes:
        if hasattr(change, "__enter__"):
            changes.enter_context(change)
        else:
            changes.enter_context(undone(model))
            change(model)
            change(changed_stock)
        expected = run(changed_stock)
        assert largest_error(expected, before) > 1e-3, "the change changes nothing"
        for _ in range(2):
            assert largest_error(run(model), expected) < tolerance
    assert sum(words in message for message in caplog.messages) == times, caplog.messages
    assert torch.equal(run(model), before), "taken out again"


CASES = [(network, name) for network, each in NETWORKS.items() for name in each[3]]


@pytest.mark.parametrize(("network", "name"), CASES, ids=map(": ".join, CASES))
@pytest.mark.slow_cases(
    "vae: a class: [!G]*",
    "vae: a module around a block",
    "vae: a hook inside*",
    "vae: a hook with keywords",
    "vae: a method of an object",
    "vae: a forward of a norm",
    "vae: a setting: repeated edges",
    "vae: a hook before*",
    "vae, encoding: a hook*",
    "vae: a parametrization",
    "transformer: a class: a forward that branches",
)
def test_a_change_acts_as_in_pytorch_and_is_named(network, name, caplog):
    check_change(network, *NETWORKS[network][3][name], caplog)


@pytest.mark.parametrize(("network", "name"), CASES, ids=map(": ".join, CASES))
@pytest.mark.slow_cases(but=["transformer: a hook on a block", "vae: a hook on a norm"])
def test_a_change_on_a_mesh_acts_as_in_pytorch_and_is_named(network, name, caplog):
    check_change(network, *NETWORKS[network][3][name], caplog, mesh=make_mesh(2, 4))


def test_what_changes_no_result_is_no_change(monkeypatch):
    model, changed_stock = ported_vae(), small_pipelines.vae()
    for each in (model, changed_stock):
        block = each.get_submodule(RESNET)
        block.conv2.conv.bias = block.conv1.conv.bias
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)
    # As accelerate leaves it when its hooks are taken out:
    model.decoder.conv_in.forward = model.decoder.conv_in.forward
    assert change_in(model.decoder) is None
    assert largest_error(decoded(model), decoded(changed_stock)) < 2e-5


def test_hooks_for_all_modules_are_refused():
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with hook, pytest.raises(ValueError, match="got hooks for all modules"):
        decoded(ported_vae())


def test_a_lora_is_no_change():
    models = ported(), stock()
    for each in models:
        with_lora("to_q", "to_v")(each)
    models[0].place()
    assert change_in(models[0]) is None
    assert largest_error(*map(step, models)) < 1e-5
    kernels = {"qk_norm_rope", "adaptive_layer_norm", "gated_linear", "linear_gelu"}
    assert {*re.findall("|".join(kernels), planned(models[0]))} == kernels


def planned(model):
    """Return the lowered text of a step that is only described, as `plan` describes it."""
    sizes = {"batch": 2, "frames": 4, "height": 4, "width": 8, "text": 7}
    program, specs = described_program(model, step_tensors(model, **sizes))
    return program.lower(*program.structs(specs)).as_text()


def test_a_changed_network_is_planned_as_it_is():
    model = ported()
    hooked(f"{BLOCK}.ff")(model)
    assert {*re.findall("gated_linear|dot_general", planned(model))} == {"dot_general"}


def test_a_processors_call_that_takes_more_gets_it():
    kind = transformer_classes.CogVideoXAttnProcessor2_0

    def call(self, attn, hidden_states, *args, factor=1.0, image_rotary_emb=None, **options):
        return original(
            self, attn, hidden_states * factor, *args, image_rotary_emb=image_rotary_emb, **options
        )

    original = kind.__call__
    with mock.patch.object(kind, "__call__", call):
        expected, plain = (step(stock(), attention_kwargs=given) for given in ({"factor": 3.0}, None))
        assert largest_error(expected, plain) > 1e-3
        assert largest_error(step(shared(ported), attention_kwargs={"factor": 3.0}), expected) < 1e-5


def test_a_forward_that_changes_an_attribute_runs_operation_by_operation_and_is_named_once(caplog):
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return changed(original(self, *args, **kwargs)) if self.calls % 2 else original(self, *args, **kwargs)

    original = Transformer.forward
    with mock.patch.object(Transformer, "forward", forward):  # before port
        expected, results = (torch.stack([step(each) for _ in range(3)]) for each in (stock(), ported()))
    assert largest_error(results, expected) < 1e-5
    named, by_operation = caplog.messages
    assert "has another method, forward" in named
    assert by_operation == (
        "transformer: CogVideoXTransformer3DModel runs operation by operation, since it changes its modules' "
        "attributes"
    )


TIMES = []


@pytest.mark.parametrize("kind", [Transformer, transformer_classes.CogVideoXBlock])
def test_a_wrapper_around_a_class_that_keeps_times_is_called_in_each_call(kind, monkeypatch, caplog):
    def timed(self, *args, **kwargs):
        TIMES.append(time.perf_counter())
        return method(self, *args, **kwargs)

    model, method = ported(), kind.forward
    expected, before = step(model), len(TIMES)
    monkeypatch.setattr(kind, "forward", timed)
    for calls in (1, 2, 3):
        assert largest_error(step(model), expected) < 1e-5
        assert len(TIMES) - before == calls
    assert caplog.messages[-1].endswith("since it changes TIMES, a variable outside of its modules")


def test_a_variable_that_a_hook_of_the_vae_changes_is_named_and_stays_as_it_is(caplog):
    vae, seen = shared(ported_vae), []
    with vae.decoder.conv_out.register_forward_hook(lambda *_: seen.append(1)):
        decoded(vae)
    assert seen == []
    assert "DecoderChunk: hooks or methods change seen, a variable outside of its modules" in caplog.text


@pytest.mark.parametrize(
    ("method", "network"), [("_encode", "vae, encoding"), ("_decode", "vae"), ("decode", "vae")]
)
def test_a_method_of_the_vae_itself_acts_as_in_pytorch(method, network, caplog):
    check_change(network, replaced(vae_classes.AutoencoderKLCogVideoX, method), "", caplog, times=0)


OF_A_PIPELINE = {
    "decode_latents": replaced(diffusers.CogVideoXPipeline, "decode_latents"),
    "prepare_latents": replaced(diffusers.CogVideoXPipeline, "prepare_latents"),
    "the text encoder": replaced(transformers.T5EncoderModel),
}


def test_a_method_of_a_pipeline_replaced_after_the_port_acts_as_in_pytorch():
    stock, pipe = small_pipelines.one_layer(), port(small_pipelines.one_layer())
    before = frames(pipe, num_inference_steps=1)
    for name, patch in OF_A_PIPELINE.items():
        with patch:
            expected, result = (frames(each, num_inference_steps=1) for each in (stock, pipe))
        assert largest_error(expected, before) > 1e-3, name
        assert largest_error(result, expected) < 1e-4, name


def test_a_cache_beside_a_replaced_method_acts_as_in_pytorch():
    results = []
    for model in (of_layers(), ported(of_layers())):
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=10.0))
        with replaced(transformer_classes.FeedForward), model.cache_context("cond"):
            results.append(torch.stack([step(model) for _ in range(2)]))
    assert largest_error(*reversed(results)) < 1e-5


class Keeping(nn.Module):
    """A block that keeps its result for the next call, as libraries that cache steps do."""

    def __init__(self, block):
        super().__init__()
        self.block, self.last = block, 0

    def forward(self, *args, **kwargs):
        hidden, text = self.block(*args, **kwargs)
        last, self.last = self.last, hidden
        return hidden + last, text


def test_a_forward_that_puts_in_modules_which_keep_arrays_acts_as_in_pytorch():
    models = stock(), ported()
    for model in models:
        blocks = {"0": Keeping(model.transformer_blocks[0])}

        def forward(self, *args, blocks=blocks, **kwargs):
            with mock.patch.dict(self.transformer_blocks._modules, blocks):
                return type(self).forward(self, *args, **kwargs)

        model.forward = types.MethodType(forward, model)
    for _ in range(3):
        assert largest_error(*map(step, models)) < 1e-5
