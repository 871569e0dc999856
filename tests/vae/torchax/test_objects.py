"""A ported VAE is an ordinary PyTorch object: its copies, threads, changed modules and programs around it.

The Flax build is one too, as far as it has no modules of PyTorch.
"""

import copy
import gc
import pickle
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torchax

from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh, port, runtime, upstream
from cogvideox_torchax.runtime.models import PROGRAMS
from tests import reference
from tests.processes import ROOT, USERS, run_python
from tests.vae.conftest import Z, check_close, decoded, decodes_as, shallow_latents, shallow_stock

in_each_build = pytest.mark.parametrize("build", ["torchax", "flax"])


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


@in_each_build
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.slow_cases("deepcopy-flax", "pickled-torchax")
def test_a_copy_has_weights_of_its_own(build, copied, stock):
    vae, other = reference.built(build, stock), shallow_stock(seed=1)
    made = copied(vae)
    assert decodes_as(made, stock)
    made.load_state_dict({name: reference.beside(made, value) for name, value in other.state_dict().items()})
    assert decodes_as(made, other)
    assert decodes_as(vae, stock)


@in_each_build
def test_a_copy_stays_on_its_mesh_and_a_pickle_leaves_it(build, stock):
    vae = port(reference.built(build, stock), mesh=make_mesh(1, 2))
    copied, loaded = copy.deepcopy(vae), pickled(vae)
    assert (copied.mesh, loaded.mesh, type(loaded)) == (vae.mesh, None, type(vae))
    assert copy.copy(getattr(vae, "flax_vae", vae)).mesh is vae.mesh
    assert {type(weight) for weight in loaded.parameters()} <= {torch.nn.Parameter}, "in PyTorch"
    assert all(decodes_as(model, stock) for model in (copied, loaded))


def test_a_copy_of_a_part_stays_on_jax(vae):
    assert runtime.on_jax(copy.deepcopy(vae.decoder.conv_in).conv.bias)
    assert runtime.on_jax(copy.copy(vae.decoder.conv_out.conv.bias))


def test_nothing_of_a_dropped_model_is_kept_though_a_hook_holds_it(stock):
    vae = reference.on_jax(copy.deepcopy(stock))
    owner = types.SimpleNamespace(vae=vae)
    hook = types.MethodType(lambda self, module, args, output: None, owner)
    vae.decoder.mid_block.register_forward_hook(hook)
    decoded(vae)
    dropped = weakref.ref(vae)
    del owner, hook, vae
    gc.collect()
    assert dropped() is None


@pytest.mark.slow
def test_threads_over_a_mesh_get_what_one_gets(stock):
    vae, x = (
        reference.on_jax(port(copy.deepcopy(stock), mesh=make_mesh(1, 2))),
        reference.video(1, height=4, width=8),
    )

    @torch.no_grad()
    def work(number):
        reference.check_as_stock(vae, stock, shallow_latents(width=4 + 2 * (number % 2)), x)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_a_thread_that_enabled_nothing_streams_and_runs_one_video_at_a_time(vae, stock):
    vae.enable_slicing()
    z, x = shallow_latents(1, batch=2), reference.video(1, height=4, width=8, batch=2)
    drawn = stock(x, sample_posterior=True, generator=torch.Generator().manual_seed(3)).sample

    @torch.no_grad()
    def work():
        reference.check_as_stock(vae, stock, z, x)
        check_close(torch.cat(list(vae.decode_stream(runtime.to_jax(z))), 2), reference.decoded(stock, z))
        moments = [runtime.to_torch(part.parameters) for part in vae.encode_stream(runtime.to_jax(x))]
        check_close(torch.cat(moments, 2), reference.encoded(stock, x))
        got = vae(runtime.to_jax(x), sample_posterior=True, generator=torch.Generator().manual_seed(3)).sample
        check_close(runtime.to_torch(got), drawn)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


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
    assert not any(upstream.is_traced(runtime.array_of(weight)) for weight in vae.parameters())
    assert torch.equal(decoded(vae), plain)


def test_a_replaced_part_is_run_and_the_one_before_is_let_go(vae):
    decoded(vae)
    old, other = weakref.ref(vae.decoder), shallow_stock(seed=1)
    vae.decoder = reference.on_jax(copy.deepcopy(other)).decoder
    assert decodes_as(vae, other)
    gc.collect()
    assert old() is None


def test_a_forward_that_hides_a_modules_weights_is_refused(vae, stock):
    inherited = vae.decoder.forward
    vae.decoder.forward = lambda *args, **kwargs: inherited(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"decoder.forward is a function of its own.*MethodType"):
            decoded(vae)
    del vae.decoder.forward
    assert decodes_as(vae, stock)


@in_each_build
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.slow_cases("False-flax", "True-torchax")
def test_loaded_weights_are_seen_without_compiling_again_and_another_dtype_is(build, assign, stock):
    vae, other = reference.built(build, stock), shallow_stock(seed=1)
    assert decodes_as(vae, stock)
    answer = vae.load_state_dict(
        {name: runtime.to_jax(value) for name, value in other.state_dict().items()}, assign=assign
    )
    assert answer.missing_keys + answer.unexpected_keys == []
    with reference.compilations() as compiled:
        assert decodes_as(vae, other)
    assert compiled == []
    assert decoded(vae.to(torch.bfloat16), Z.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["wrapped", "in place"])
def test_what_torch_compile_has_made_of_a_part_is_not_run_with_old_weights(vae, stock, where, caplog):
    decoded(vae)
    if where == "wrapped":
        vae.decoder = torch.compile(vae.decoder, backend="eager")
        vae.decoder.mid_block = torch.compile(vae.decoder.mid_block, backend="eager")
    else:
        vae.decoder.compile(backend="eager")
    assert decodes_as(vae, stock)
    assert not caplog.messages, "no change, as XLA compiles in torch's place"
    copied = copy.deepcopy(vae)
    vae.decoder.conv_out.conv.bias.apply_jax_(lambda array: array + 1)
    vae.decoder.mid_block.resnets[0].conv1.conv.weight.apply_jax_(lambda array: array * 2)
    changed = copy.deepcopy(stock)
    changed.decoder.conv_out.conv.bias += 1
    changed.decoder.mid_block.resnets[0].conv1.conv.weight *= 2
    assert decodes_as(vae, changed)
    assert decodes_as(copied, stock)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.slow_cases("True")
def test_all_that_a_model_does_it_does_in_inference_mode_and_trains_afterwards(enabled, tmp_path):
    stock = shallow_stock().bfloat16().float()
    stock.save_pretrained(tmp_path)
    with torch.inference_mode():
        if enabled:
            torchax.enable_globally()
        vae = AutoencoderKLCogVideoX.from_pretrained(tmp_path).to("jax", torch.bfloat16).float()
        assert upstream.torchax_is_on() is enabled
        vae = copy.deepcopy(port(vae.to("cpu").to("jax")))
        assert decodes_as(vae, stock)
        vae.save_pretrained(tmp_path / "saved")
    with torch.enable_grad():
        vae.train().decode(runtime.to_jax(Z)).sample.sum().backward()
    assert vae.decoder.conv_out.conv.weight.grad is not None


def test_a_subclass_is_ported_with_what_it_adds(stock):
    class Louder(type(stock)):
        def decode(self, z, return_dict=True):
            answer = super().decode(z, return_dict=True)
            answer.sample = answer.sample * 2
            return answer

    louder = Louder.from_config(stock.config)
    louder.load_state_dict(stock.state_dict())
    vae, want = reference.on_jax(louder.eval()), stock.decode(Z).sample
    assert isinstance(vae, Louder)
    check_close(decoded(vae), want * 2)
    check_close(torch.cat(list(vae.decode_stream(Z)), dim=2), want)
    assert type(port(vae)) is type(vae)


def test_what_torch_compile_makes_of_it_is_neither_traced_nor_traced_for(vae):
    before = decoded(vae)
    programs = vars(vae)[PROGRAMS]
    vae.compile()
    assert "_compiled_call_impl" in vars(vae)
    assert torch.equal(decoded(vae), before)
    assert vars(vae)[PROGRAMS] is programs
    assert [len(kept) for kept in programs._kept.values()] == [1]
    assert runtime.on_jax(vae(runtime.to_jax(reference.video(1, height=16, width=16))).sample)
    assert copy.deepcopy(vae)._compiled_call_impl is pickled(vae)._compiled_call_impl is None


@pytest.mark.slow
def test_encoding_meshes_and_flax_hold_it_as_users_run_them():
    tests = (
        "vae/torchax/test_objects.py::test_a_thread_that_enabled_nothing_streams_and_runs_one_video_at_a_time",
        "vae/torchax/test_objects.py::test_a_copy_stays_on_its_mesh_and_a_pickle_leaves_it",
        "vae/nnx/test_autoencoder.py::test_arrays_in_and_arrays_out_equal_diffusers",
    )
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    options = "-o addopts= -p no:xdist -p no:cacheprovider"
    done = run_python(code, *options.split(), *(ROOT / "tests" / test for test in tests), **USERS)
    assert done.returncode == 0, done.stdout
