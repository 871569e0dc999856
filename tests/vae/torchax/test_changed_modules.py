"""Changes of a ported VAE's modules are seen: parts, hooks, LoRAs, attributes, weights, methods."""

import copy
import gc
import types
import weakref

import jax
import pytest
import torch
from torch import nn

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference
from tests.vae.torchax.shallow import Z, decoded, decodes_as, shallow_latents, shallow_stock


def test_a_later_hook_is_seen_and_a_trace_that_it_fails_leaves_the_model_as_it_was(vae):
    plain = decoded(vae)
    before = {name: id(weight) for name, weight in vae.named_parameters()}

    def fail(module, args, output):
        raise RuntimeError("from a hook")

    hook = vae.decoder.conv_out.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="from a hook"):
        decoded(vae)
    hook.remove()
    assert {name: id(weight) for name, weight in vae.named_parameters()} == before
    assert not any(isinstance(runtime.array_of(weight), jax.core.Tracer) for weight in vae.parameters())
    assert torch.equal(decoded(vae), plain)


def test_a_replaced_part_is_run_and_the_one_before_is_let_go(vae):
    decoded(vae)
    old, other = weakref.ref(vae.decoder), shallow_stock(seed=1)
    vae.decoder = reference.on_jax(copy.deepcopy(other)).decoder
    assert decodes_as(vae, other)
    gc.collect()
    assert old() is None
    inner = shallow_stock(seed=2)
    vae.decoder.mid_block.resnets[0] = reference.on_jax(copy.deepcopy(inner)).decoder.mid_block.resnets[0]
    other.decoder.mid_block.resnets[0] = inner.decoder.mid_block.resnets[0]
    assert decodes_as(vae, other)
    vae.decoder.conv_out, other.decoder.conv_out = (
        copy.deepcopy(inner.decoder.conv_out),
        inner.decoder.conv_out,
    )
    assert decodes_as(vae, other)  # a plain, stock part


INNER = [
    "decoder.up_blocks.0.resnets.0.conv2.conv",  # of which the upsampler reads columns that only pad
    *("decoder.conv_in.conv", "decoder.mid_block.resnets.0.norm1.norm_layer", "encoder.conv_out.conv"),
    *("decoder.up_blocks.0.resnets.0.norm2.conv_y.conv", "decoder.up_blocks.1.resnets.0.norm1.conv_b"),
    *("decoder.up_blocks.0.upsamplers.0.conv", "encoder.down_blocks.0.downsamplers.0.conv"),
]
"""Parts of the modules that a kernel stands in for as a whole."""


def with_hooks(model):
    def double(module, args, out):
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    for name in INNER:
        model.get_submodule(name).register_forward_hook(double)


def with_loras(model):
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(3)
    names = [name for name in INNER if not name.endswith(("norm_layer", "conv_b"))]
    config = LoraConfig(r=2, lora_alpha=64, target_modules=names, init_lora_weights=False)
    inject_adapter_in_model(config, model)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # torchax's interpolation
@pytest.mark.parametrize("mesh", [None, (1, 8)], ids=["one device", "a padded mesh"])
@pytest.mark.parametrize("change", [with_hooks, with_loras])
@pytest.mark.slow_cases(but=["with_*-one device"])
def test_what_changes_a_part_within_a_layer_is_not_passed_over(stock, change, mesh):
    z, x = shallow_latents(3, width=12), reference.video(9, height=4, width=24)
    plain = reference.decoded(stock, z), reference.encoded(stock, x)

    def changed():
        model = copy.deepcopy(stock)
        change(model)
        return model

    model = runtime.without_torchax(changed)
    want = runtime.without_torchax(lambda: (model.decode(z).sample, model.encode(x).latent_dist.parameters))
    vae = port(model, mesh=None if mesh is None else make_mesh(*mesh))
    runtime.enable()
    vae.to("jax")
    got = decoded(vae, z), runtime.to_torch(vae.encode(runtime.to_jax(x)).latent_dist.parameters)
    for ours, theirs, unchanged in zip(got, want, plain, strict=True):
        assert relative_error(theirs, unchanged) > 1e-2
        assert relative_error(ours, theirs) < FLOAT32_RELATIVE


def test_a_changed_epsilon_of_each_norm_is_seen(vae, stock):
    decoded(vae)
    for model in (vae, stock := copy.deepcopy(stock)):
        for module in model.modules():
            if isinstance(module, torch.nn.GroupNorm):
                module.eps = 0.5
    assert decodes_as(vae, stock)
    given = (torch.randn(1, 8, 1, 2, 4), Z)  # a norm that no convolution follows, as where it has a hook
    got, _ = vae.decoder.norm_out(*map(runtime.to_jax, given))
    assert relative_error(runtime.to_torch(got), stock.decoder.norm_out(*given)[0]) < FLOAT32_RELATIVE


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.options["a"].update(gain=3),
        lambda module: module.options["a"]["list"][0].append("louder"),
        lambda module: module.options["tuple"][0][0].add("louder"),
        lambda module: module.processor.names.append("louder"),
        lambda module: setattr(module, "kinds", (1,)),
        lambda module: setattr(module, "kinds", [True]),
        lambda module: setattr(module, "gain", 3.0),
    ],
)
def test_a_changed_attribute_is_seen_and_a_value_changed_in_place_at_any_depth(vae, change):
    def scaled(module, args, result):
        inner, names = module.options["a"], module.processor.names
        louder = len([*inner["list"][0], *module.options["tuple"][0][0], *names])
        louder += not isinstance(module.kinds, list) or isinstance(module.kinds[0], bool)
        return result[0] * module.gain * inner["gain"] * 3**louder, result[1]

    module = vae.decoder.conv_out
    module.gain = 1.0
    module.options = {"a": {"gain": 1, "list": [[]]}, "tuple": ([set()],)}
    module.kinds = [1]
    module.processor = types.SimpleNamespace(names=[])  # as an attention processor, an object with a state
    module.register_forward_hook(scaled)
    plain = decoded(vae)
    change(module)
    assert relative_error(decoded(vae), 3 * plain) < FLOAT32_RELATIVE


def test_a_plain_weight_in_the_place_of_one_that_is_freed_is_moved(vae, stock):
    decoded(vae)
    changed = copy.deepcopy(stock)
    weight = 2 * changed.decoder.conv_in.conv.weight.detach()
    for model in (vae, changed):
        model.decoder.conv_in.conv.weight = nn.Parameter(weight.clone())
    gc.collect()
    assert decodes_as(vae, changed)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_seen_without_compiling_again_and_another_dtype_is(vae, assign):
    decoded(vae)
    other = shallow_stock(seed=1)
    state = {name: runtime.to_jax(value) for name, value in other.state_dict().items()}
    vae.load_state_dict(state, assign=assign)
    assert decodes_as(vae, other)
    assert vae.program("decode").compilations == 1
    assert decoded(vae.to(torch.bfloat16), Z.bfloat16()).dtype == torch.bfloat16


def test_a_parametrization_is_seen(stock):
    """Weight norm and its like: the module's class is another, and its weight is computed."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    def parametrized():
        model = copy.deepcopy(stock)
        convolution = model.decoder.conv_out.conv
        nn.utils.parametrize.register_parametrization(convolution, "weight", Doubled(), unsafe=True)
        return model

    native = runtime.without_torchax(parametrized)
    vae = reference.on_jax(copy.deepcopy(native))
    assert decodes_as(vae, native)
    assert not decodes_as(vae, stock)


@pytest.mark.parametrize("where", ["wrapped", "in place"])
def test_what_torch_compile_has_made_of_a_part_is_not_run_with_old_weights(vae, stock, where):
    decoded(vae)
    if where == "wrapped":
        vae.decoder = torch.compile(vae.decoder, backend="eager")
        vae.decoder.mid_block = torch.compile(vae.decoder.mid_block, backend="eager")
    else:
        vae.decoder.compile(backend="eager")
    assert decodes_as(vae, stock)
    copied = copy.deepcopy(vae)
    vae.decoder.conv_out.conv.bias.apply_jax_(lambda array: array + 1)
    vae.decoder.mid_block.resnets[0].conv1.conv.weight.apply_jax_(lambda array: array * 2)
    changed = copy.deepcopy(stock)
    changed.decoder.conv_out.conv.bias += 1
    changed.decoder.mid_block.resnets[0].conv1.conv.weight *= 2
    assert decodes_as(vae, changed)
    assert decodes_as(copied, stock)


def test_a_forward_set_on_a_module_is_seen_and_one_that_hides_its_weights_is_refused(vae, stock):
    def louder(self, inputs, conv_cache=None):
        result, cache = type(self).forward(self, inputs, conv_cache)
        return result * 2, cache

    decoded(vae)
    changed, other = copy.deepcopy(stock), shallow_stock(seed=3).decoder.conv_in.conv.state_dict()
    for model in (vae, changed):
        model.decoder.conv_in.forward = types.MethodType(louder, model.decoder.conv_in)
    assert decodes_as(vae, changed)
    changed.decoder.conv_in.conv.load_state_dict(other)
    vae.decoder.conv_in.conv.load_state_dict({name: runtime.to_jax(value) for name, value in other.items()})
    assert decodes_as(vae, changed)

    inherited = vae.decoder.forward
    vae.decoder.forward = lambda *args, **kwargs: inherited(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"decoder.forward is a function of its own.*MethodType"):
            decoded(vae)
    del vae.decoder.forward
    assert decodes_as(vae, changed)


def test_parts_that_take_turns_are_compiled_once_each(vae):
    first, second = vae.decoder, reference.on_jax(shallow_stock(seed=1)).decoder
    programs = []
    for decoder in (first, second, first, second):
        vae.decoder = decoder
        decoded(vae)
        programs.append(vae.program("decode"))
    assert programs[:2] == programs[2:]
    assert [program.compilations for program in programs[:2]] == [1, 1]
