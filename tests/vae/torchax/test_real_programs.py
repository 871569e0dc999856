"""Programs around a ported VAE: threads, replaced parts, hooks, copies, pickles."""

import copy
import gc
import pickle
import re
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX as DiffusersAutoencoder
from torch import nn

from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh, port, runtime
from cogvideox_torchax.runtime.models import PROGRAMS
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference


@pytest.fixture
def vae(stock):
    return reference.on_jax(copy.deepcopy(stock))


def latents(frames=1, batch=1, height=2, width=4):
    return reference.latents(frames, batch=batch, height=height, width=width)


def decoded(vae, z):
    return runtime.to_torch(vae.decode(runtime.to_jax(z)).sample)


def in_threads(count, work):
    """Run `work(number)` in threads that start together; the first error is raised here."""
    together = threading.Barrier(count)

    def run(number):
        together.wait()
        with torch.no_grad():
            work(number)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run, range(count)))


@pytest.mark.slow
def test_eight_threads_get_what_one_gets(vae, stock):
    sizes = [(1, 2, 4), (2, 3, 4), (3, 2, 4), (4, 2, 6)]
    inputs = [latents(n, height=h, width=w) for n, h, w in sizes]
    videos = [reference.video(n, height=8, width=16) for n in (1, 5, 9)]
    want = [stock.decode(z).sample for z in inputs]
    moments = [stock.encode(x).latent_dist.parameters for x in videos]
    decoded(vae, inputs[0])  # one shape is compiled already, the others are new

    def work(number):
        for turn in range(3):
            i, j = (number + turn) % len(inputs), (number + turn) % len(videos)
            assert relative_error(decoded(vae, inputs[i]), want[i]) < FLOAT32_RELATIVE
            streamed = torch.cat(list(vae.decode_stream(inputs[i])), dim=2)
            assert relative_error(streamed, want[i]) < FLOAT32_RELATIVE
            posterior = vae.encode(runtime.to_jax(videos[j])).latent_dist
            got = runtime.to_torch(posterior.parameters)
            assert relative_error(got, moments[j]) < FLOAT32_RELATIVE

    in_threads(8, work)
    assert relative_error(decoded(vae, inputs[0]), want[0]) < FLOAT32_RELATIVE


def test_threads_over_a_mesh_get_what_one_gets(stock):
    vae = reference.on_jax(port(copy.deepcopy(stock), mesh=make_mesh(1, 2)))
    inputs = [latents(1, width=4), latents(1, width=6)]
    want = [stock.decode(z).sample for z in inputs]

    def work(number):
        assert relative_error(decoded(vae, inputs[number % 2]), want[number % 2]) < FLOAT32_RELATIVE

    in_threads(4, work)


def test_a_thread_that_enabled_nothing_streams_one_video_at_a_time_and_draws_of_the_posterior(vae, stock):
    vae.enable_slicing()
    z, x = latents(1, batch=2), reference.video(5, height=16, width=32, batch=2)
    on_jax = [runtime.to_jax(tensor) for tensor in (z, x)]
    drawn = stock(x, sample_posterior=True, generator=torch.Generator().manual_seed(3)).sample

    def work(_):
        got = torch.cat(list(vae.decode_stream(on_jax[0])), dim=2)
        assert relative_error(got, reference.decoded(stock, z)) < FLOAT32_RELATIVE
        moments = [runtime.to_torch(part.parameters) for part in vae.encode_stream(on_jax[1])]
        assert relative_error(torch.cat(moments, 2), reference.encoded(stock, x)) < FLOAT32_RELATIVE
        got = vae(on_jax[1], sample_posterior=True, generator=torch.Generator().manual_seed(3)).sample
        assert relative_error(runtime.to_torch(got), drawn) < FLOAT32_RELATIVE

    in_threads(1, work)


def test_a_later_hook_is_seen_and_a_trace_that_it_fails_leaves_the_model_as_it_was(vae):
    plain = decoded(vae, latents())
    before = {name: id(weight) for name, weight in vae.named_parameters()}

    def fail(module, args, output):
        raise RuntimeError("from a hook")

    hook = vae.decoder.conv_out.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="from a hook"):
        decoded(vae, latents())
    hook.remove()
    assert {name: id(weight) for name, weight in vae.named_parameters()} == before
    assert all(isinstance(runtime.array_of(weight), jax.Array) for weight in vae.parameters())
    assert not any(isinstance(runtime.array_of(weight), jax.core.Tracer) for weight in vae.parameters())
    assert torch.equal(decoded(vae, latents()), plain)


def test_a_replaced_part_is_run_and_the_one_before_is_let_go(vae):
    z = latents()
    decoded(vae, z)
    old, other = weakref.ref(vae.decoder), reference.small_vae(seed=1, **reference.THREE_LEVELS)
    vae.decoder = reference.on_jax(copy.deepcopy(other)).decoder
    assert relative_error(decoded(vae, z), other.decode(z).sample) < FLOAT32_RELATIVE
    gc.collect()
    assert old() is None
    inner = reference.small_vae(seed=2, **reference.THREE_LEVELS)
    vae.decoder.mid_block.resnets[0] = reference.on_jax(copy.deepcopy(inner)).decoder.mid_block.resnets[0]
    mixed = copy.deepcopy(other)
    mixed.decoder.mid_block.resnets[0] = inner.decoder.mid_block.resnets[0]
    assert relative_error(decoded(vae, z), mixed.decode(z).sample) < FLOAT32_RELATIVE


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("enabled", [False, True])
def test_all_that_a_model_does_it_does_in_inference_mode_and_trains_afterwards(stock, enabled, tmp_path):
    x, z = reference.video(5, height=8, width=16), latents()
    moments, frames = reference.encoded(stock, x), reference.decoded(stock, z)
    stock.save_pretrained(tmp_path)
    with torch.inference_mode():
        if enabled:
            runtime.enable()
        vae = AutoencoderKLCogVideoX.from_pretrained(tmp_path).to("jax", torch.bfloat16).float()
        assert runtime.is_enabled() is enabled
        vae = copy.deepcopy(port(vae.to("cpu").to("jax")))
        posterior = vae.encode(runtime.to_jax(x)).latent_dist
        got = [posterior.parameters, posterior.mode(), vae.decode(runtime.to_jax(z)).sample]
        streamed = next(vae.encode_stream(x)).parameters, next(vae.decode_stream(z))
        mean = moments.chunk(2, dim=1)[0]
        for ours, theirs in zip((*got, *streamed), (moments, mean, frames, moments, frames), strict=True):
            assert relative_error(runtime.to_torch(ours), theirs) < 2e-2  # of weights in bfloat16
        vae.save_pretrained(tmp_path / "saved")
    runtime.enable()
    with torch.enable_grad():
        vae.train().decode(runtime.to_jax(z)).sample.sum().backward()
    assert vae.decoder.conv_out.conv.weight.grad is not None


INNER = [
    "decoder.up_blocks.0.resnets.1.conv2.conv",  # of which the upsampler reads columns that only pad
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
@pytest.mark.slow_cases(but=["with_hooks-one device"])
def test_what_changes_a_part_within_a_layer_is_not_passed_over(stock, change, mesh):
    z, x = latents(3, width=5), reference.video(9, height=8, width=20)
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


def test_a_changed_attribute_is_seen(vae, stock):
    z = latents()
    decoded(vae, z)
    for model in (vae, stock := copy.deepcopy(stock)):
        model.decoder.norm_out.norm_layer.eps = 0.5
    assert relative_error(decoded(vae, z), stock.decode(z).sample) < FLOAT32_RELATIVE


@pytest.mark.parametrize(
    "change",
    [
        lambda options: options["a"].update(gain=3),
        lambda options: options["a"]["list"][0].append("louder"),
        lambda options: options["tuple"][0][0].add("louder"),
    ],
)
def test_a_value_changed_in_place_is_seen_at_any_depth(vae, change):
    def scaled(module, args, result):
        inner = module.options["a"]
        return result[0] * inner["gain"] * 3 ** len(
            inner["list"][0] + [*module.options["tuple"][0][0]]
        ), result[1]

    options = vae.decoder.conv_out.options = {"a": {"gain": 1, "list": [[]]}, "tuple": ([set()],)}
    vae.decoder.conv_out.register_forward_hook(scaled)
    z = latents()
    plain = decoded(vae, z)
    change(options)
    assert relative_error(decoded(vae, z), 3 * plain) < FLOAT32_RELATIVE


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_seen_without_compiling_again(vae, assign):
    z = latents()
    decoded(vae, z)
    other = reference.small_vae(seed=1, **reference.THREE_LEVELS)
    state = {name: runtime.to_jax(value) for name, value in other.state_dict().items()}
    vae.load_state_dict(state, assign=assign)
    assert relative_error(decoded(vae, z), other.decode(z).sample) < FLOAT32_RELATIVE
    assert vae.program("decode").compilations == 1


def test_another_dtype_is_seen(vae):
    z = latents()
    decoded(vae, z)
    vae.to(torch.bfloat16)
    assert decoded(vae, z.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_float32_is_multiplied_in_float32(vae, kind):
    program = vae.program(kind)
    shape = (1, 3, 8, 16, 24) if kind == "encode" else (1, 16, 2, 4, 6)
    for first in (None, shape):
        structs = program.structs((shape, jnp.float32), before=first and (first, jnp.float32))
        lowered = program.lower(*structs)
        assert bool(jax.tree.leaves(lowered.args_info[0][2])) == (first is not None)
        text = lowered.as_text()
        products = [line for line in text.splitlines() if re.search(r"\.(dot_general|convolution)\b", line)]
        assert len(products) > 10
        assert all("HIGHEST" in line for line in products)


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
    vae, z = reference.on_jax(copy.deepcopy(native)), latents()
    assert relative_error(decoded(vae, z), native.decode(z).sample) < FLOAT32_RELATIVE
    assert relative_error(decoded(vae, z), stock.decode(z).sample) > 1e-3


@pytest.mark.parametrize("where", ["wrapped", "in place"])
def test_what_torch_compile_has_made_of_a_part_is_not_run_with_old_weights(vae, stock, where):
    z = latents()
    decoded(vae, z)
    if where == "wrapped":
        vae.decoder = torch.compile(vae.decoder, backend="eager")
        vae.decoder.mid_block = torch.compile(vae.decoder.mid_block, backend="eager")
    else:
        vae.decoder.compile(backend="eager")
    assert relative_error(decoded(vae, z), stock.decode(z).sample) < FLOAT32_RELATIVE
    copied = copy.deepcopy(vae)
    vae.decoder.conv_out.conv.bias.apply_jax_(lambda array: array + 1)
    vae.decoder.mid_block.resnets[0].conv1.conv.weight.apply_jax_(lambda array: array * 2)
    changed = copy.deepcopy(stock)
    changed.decoder.conv_out.conv.bias += 1
    changed.decoder.mid_block.resnets[0].conv1.conv.weight *= 2
    assert relative_error(decoded(vae, z), changed.decode(z).sample) < FLOAT32_RELATIVE
    assert relative_error(decoded(copied, z), stock.decode(z).sample) < FLOAT32_RELATIVE


def test_a_forward_set_on_a_module_is_seen_and_one_that_hides_its_weights_is_refused(vae, stock):
    def louder(self, inputs, conv_cache=None):
        result, cache = type(self).forward(self, inputs, conv_cache)
        return result * 2, cache

    z = latents()
    decoded(vae, z)
    changed = copy.deepcopy(stock)
    for model in (vae, changed):
        model.decoder.conv_in.forward = types.MethodType(louder, model.decoder.conv_in)
    want = changed.decode(z).sample
    assert relative_error(decoded(vae, z), want) < FLOAT32_RELATIVE
    bias = reference.small_vae(seed=3, **reference.THREE_LEVELS).decoder.conv_in.conv.bias
    for convolution in (vae.decoder.conv_in.conv, changed.decoder.conv_in.conv):
        tensor = runtime.to_jax(bias) if runtime.on_jax(convolution.bias) else bias
        convolution.load_state_dict({"weight": convolution.weight, "bias": tensor})
    assert relative_error(decoded(vae, z), changed.decode(z).sample) < FLOAT32_RELATIVE

    inherited = vae.decoder.forward
    vae.decoder.forward = lambda *args, **kwargs: inherited(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"decoder.forward is a function of its own.*MethodType"):
            decoded(vae, z)
    del vae.decoder.forward
    assert relative_error(decoded(vae, z), changed.decode(z).sample) < FLOAT32_RELATIVE


def test_parts_that_take_turns_are_compiled_once_each(vae):
    z = latents()
    first, second = (
        vae.decoder,
        reference.on_jax(reference.small_vae(seed=1, **reference.THREE_LEVELS)).decoder,
    )
    programs = []
    for decoder in (first, second, first, second):
        vae.decoder = decoder
        decoded(vae, z)
        programs.append(vae.program("decode"))
    assert programs[:2] == programs[2:]
    assert [program.compilations for program in programs[:2]] == [1, 1]


def test_a_copy_is_its_own(vae, stock):
    z = latents()
    want = decoded(vae, z)
    copied = copy.deepcopy(vae)
    assert torch.equal(decoded(copied, z), want)
    with torch.no_grad():
        copied.decoder.conv_out.conv.bias.add_(1)
    assert torch.equal(decoded(vae, z), want)
    assert relative_error(decoded(copied, z), want) > 1e-3
    part = copy.deepcopy(vae.decoder.conv_in)
    assert runtime.on_jax(next(part.parameters()))


def test_a_copy_stays_on_its_mesh_and_a_pickle_leaves_it(stock):
    z = latents()
    vae = reference.on_jax(port(copy.deepcopy(stock), mesh=make_mesh(1, 2)))
    want = stock.decode(z).sample
    copied = copy.deepcopy(vae)
    assert copied.mesh == vae.mesh
    assert relative_error(decoded(copied, z), want) < FLOAT32_RELATIVE
    loaded = pickle.loads(pickle.dumps(vae))
    assert loaded.mesh is None
    assert isinstance(loaded, AutoencoderKLCogVideoX)
    assert {type(weight) for weight in loaded.parameters()} == {nn.Parameter}
    assert torch.equal(loaded.decode(z).sample, want)  # in PyTorch, from the same weights


@pytest.mark.parametrize("saved", ["the model", "its state"])
def test_what_torch_saves_is_in_pytorch(vae, stock, saved, tmp_path):
    path = tmp_path / "saved.pt"
    torch.save(vae if saved == "the model" else vae.state_dict(), path)
    loaded = torch.load(path, weights_only=saved == "its state")
    state = loaded.state_dict() if saved == "the model" else loaded
    assert all(torch.equal(value, state[name]) for name, value in stock.state_dict().items())
    assert {type(value) for value in state.values()} == {torch.Tensor}


def test_a_slice_is_copied_and_saved_as_a_whole_tensor_is(vae, tmp_path):
    whole = runtime.to_jax(reference.latents(2))
    want = runtime.to_torch(whole)[0]
    part = whole[0]
    torch.save({"part": part}, tmp_path / "part.pt")
    loaded = torch.load(tmp_path / "part.pt", weights_only=True)["part"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, want)
    assert torch.equal(pickle.loads(pickle.dumps(part)), want)
    copied = copy.deepcopy(part)
    part += 1
    assert torch.equal(runtime.to_torch(copied), want)


def test_a_subclass_is_ported_with_what_it_adds(stock):
    class Louder(DiffusersAutoencoder):
        def decode(self, z, return_dict=True):
            answer = super().decode(z, return_dict=True)
            answer.sample = answer.sample * 2
            return answer

    louder = Louder.from_config(stock.config)
    louder.load_state_dict(stock.state_dict())
    vae = reference.on_jax(louder.eval())
    z = latents(3)
    want = stock.decode(z).sample
    assert isinstance(vae, Louder)
    assert relative_error(decoded(vae, z), want * 2) < FLOAT32_RELATIVE
    assert relative_error(torch.cat(list(vae.decode_stream(z)), dim=2), want) < FLOAT32_RELATIVE
    assert type(port(vae)) is type(vae)


@pytest.mark.parametrize("hooked", [False, True])
def test_nothing_of_a_dropped_model_is_kept(stock, hooked):
    class Features:
        """Owner of a hook's method, which holds the model."""

        def __init__(self, vae):
            self.vae = vae
            vae.decoder.mid_block.register_forward_hook(self.see)

        def see(self, module, args, output):
            pass

    vae = reference.on_jax(copy.deepcopy(stock))
    features = Features(vae) if hooked else None
    decoded(vae, latents())
    dropped = weakref.ref(vae)
    del vae, features
    gc.collect()
    assert dropped() is None


def test_what_torch_compile_makes_of_it_is_neither_traced_nor_traced_for(vae):
    before = decoded(vae, latents())
    programs = vars(vae)[PROGRAMS]
    vae.compile()
    assert "_compiled_call_impl" in vars(vae)
    assert torch.equal(decoded(vae, latents()), before)
    assert vars(vae)[PROGRAMS] is programs
    assert [len(kept) for kept in programs._kept.values()] == [1]
    copied, pickled = copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))
    assert copied._compiled_call_impl is pickled._compiled_call_impl is None
