"""Guidance that waits for the scheduler's step gives what it would at once, and uses up no caller's array."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from cogvideox_torchax import port, runtime
from cogvideox_torchax.pipelines import later, scheduler
from cogvideox_torchax.pipelines.later import Later
from tests import small_pipelines


@pytest.fixture(scope="module")
def pipe():
    return port(small_pipelines.build(transformer=small_pipelines.transformer("5b", num_layers=1)))


def latents(pipe, **options):
    return pipe(**small_pipelines.inputs("text", output_type="latent", **options)).frames


@pytest.fixture
def drawn():
    runtime.enable()
    return runtime.to_jax(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16())


def test_what_is_written_down_is_what_torch_computes(drawn):
    def guided(prediction):
        one, other = prediction.float().chunk(2)
        return one + 6.5 * (other - one)

    waiting = guided(Later("tensor", drawn))
    assert isinstance(waiting, Later)
    want = guided(runtime.to_torch(drawn))
    torch.testing.assert_close(runtime.to_torch(waiting.value), want)
    assert waiting.dtype == torch.float32  # any attribute is the tensor's own


def test_what_is_not_written_down_is_done_to_the_tensor(drawn):
    waiting, plain = Later("tensor", drawn), runtime.to_torch(drawn)
    for got, want in (
        (torch.cat([waiting, waiting]), torch.cat([plain, plain])),
        (waiting.chunk(2, dim=1)[1], plain.chunk(2, dim=1)[1]),
        (waiting.float().square(), plain.float().square()),
    ):
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(runtime.to_torch(got), want)


def test_a_prediction_that_was_changed_in_place_is_what_the_step_takes(drawn):
    waiting = Later("tensor", drawn).float()
    waiting.mul_(0.5)
    leaves = []
    expression = later.written(waiting + 1.0, leaves)
    got = runtime.to_torch(runtime.tensor_of(later.computed(expression, leaves)))
    torch.testing.assert_close(got, runtime.to_torch(drawn).float() * 0.5 + 1.0)


def test_any_arithmetic_is_done(drawn):
    waiting, plain = Later("tensor", drawn).float(), runtime.to_torch(drawn).float()
    for got, want in (
        (waiting * 0.5, plain * 0.5),
        (waiting / 2, plain / 2),
        (-waiting, -plain),
        (waiting[:1], plain[:1]),
        (1.0 - waiting, 1.0 - plain),
        (0.5 + waiting, 0.5 + plain),
        (waiting * waiting, plain * plain),
    ):
        torch.testing.assert_close(runtime.to_torch(got), want)
    assert len(waiting) == len(plain)


def test_a_hook_on_the_transformer_gets_tensors_and_may_keep_what_it_sees(pipe):
    seen, given = [], []
    handles = [
        pipe.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        pipe.transformer.register_forward_hook(lambda module, args, result: seen.append(result[0])),
    ]
    try:
        latents(pipe, guidance_scale=1.0)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 4
    assert all(isinstance(part, torch.Tensor) for part in seen)
    assert all(runtime.first_nonfinite(part) is None for part in given)


def test_a_scheduler_made_of_a_ported_ones_class_is_taken(pipe):
    own = pipe.scheduler
    want = runtime.to_torch(latents(pipe))
    try:
        pipe.scheduler = type(own).from_config(own.config)
        assert torch.equal(runtime.to_torch(latents(pipe)), want)
    finally:
        pipe.scheduler = own


def test_outside_of_a_pipeline_a_prediction_is_a_tensor(drawn):
    assert later.prediction(drawn) is drawn
    with later.waiting(looked_at=True):
        assert isinstance(later.prediction(drawn), Later)
        assert not later.nobody_looks()
    assert later.prediction(drawn) is drawn


@pytest.fixture
def steps(monkeypatch):
    """The latents that each step's program took, and what guidance it had to compute."""
    taken, expressions = [], []
    inherited = scheduler._linear_program

    def spied(donated):
        def run(expression, leaves, array, *others):
            taken.append(array)
            expressions.append(expression)
            return inherited(donated)(expression, leaves, array, *others)

        return run

    monkeypatch.setattr(scheduler, "_linear_program", spied)
    return taken, expressions


def test_guidance_is_in_the_program_of_the_schedulers_step(pipe, steps):
    latents(pipe, use_dynamic_cfg=True)
    _, expressions = steps
    assert len(expressions) == 4
    assert len(set(expressions)) == 1  # another scale is not another program
    assert expressions[0][0] == "sum"


def test_latents_are_used_up_where_nobody_sees_them(pipe, steps):
    given = runtime.to_jax(torch.full((1, 3, 16, 4, 8), 0.5))
    result = latents(pipe, latents=given)
    taken, _ = steps
    assert [array.is_deleted() for array in taken] == [False, True, True, True]
    assert bool(runtime.to_torch(given).eq(0.5).all())
    assert runtime.first_nonfinite(result) is None


def test_latents_that_a_callback_keeps_stay(pipe):
    kept = []

    def callback(pipe, step, timestep, kwargs):
        kept.append(kwargs["latents"])
        return {}

    latents(pipe, callback_on_step_end=callback)
    assert len({runtime.to_torch(step).sum().item() for step in kept}) == 4


@pytest.mark.parametrize("kind", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler])
def test_a_schedulers_numbers_are_those_of_its_own_steps(kind):
    def run(scheduler, device):
        """What every step gives for the same predictions and noise; the steps that look back do."""
        draw, generator = (torch.Generator().manual_seed(seed) for seed in (0, 1))
        sample, *outputs = (torch.randn(5, generator=draw) for _ in range(8))
        scheduler.set_timesteps(7)
        results, clean, before = [], None, None
        sample = device(sample)
        for timestep, output in zip(scheduler.timesteps.tolist(), outputs, strict=True):
            given = (device(output), timestep, sample)
            if kind is CogVideoXDPMScheduler:
                given = (device(output), clean, timestep, before, sample, 0.0, False, generator)
            sample, clean = scheduler.step(*given, return_dict=False)
            before = timestep
            results += [sample, clean]
        return results

    runtime.enable()
    ported = scheduler.port_scheduler(runtime.without_torchax(small_pipelines.scheduler, kind))
    want = runtime.without_torchax(lambda: run(small_pipelines.scheduler(kind), lambda x: x))
    got = run(ported, runtime.to_jax)
    assert all(scheduler._times(given) in ported.watch.linear for given in steps_of(ported))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(runtime.to_torch(one), other, rtol=1e-5, atol=1e-6)


def steps_of(ported):
    """What names each step of a whole run: its timestep, and where it looks back the one before."""
    timesteps = ported.timesteps.tolist()
    looks_back = "old_pred_original_sample" in inspect.signature(type(ported).step).parameters
    backs = [None, *timesteps[:-1]] if looks_back else [None] * len(timesteps)
    return [
        {"timestep": now, "timestep_back": back, "old_pred_original_sample": back}
        for now, back in zip(timesteps, backs, strict=True)
    ]


def test_what_a_callback_changes_between_two_steps_is_seen(pipe):
    def halve(pipe, step, timestep, kwargs):
        if step == 1:
            pipe.transformer.proj_out.weight = torch.nn.Parameter(pipe.transformer.proj_out.weight * 0.5)
        return {}

    before = pipe.transformer.proj_out.weight
    try:
        changed = latents(pipe, callback_on_step_end=halve)
    finally:
        pipe.transformer.proj_out.weight = before
    assert not torch.allclose(runtime.to_torch(changed), runtime.to_torch(latents(pipe)))


def test_a_run_that_nobody_steps_into_asks_for_program_and_weights_once(pipe, monkeypatch):
    asked = []
    inherited = type(pipe.transformer)._program_and_weights

    def spied(network):
        asked.append(network)
        return inherited(network)

    monkeypatch.setattr(type(pipe.transformer), "_program_and_weights", spied)
    latents(pipe)
    assert asked.count(pipe.transformer) == 1
    asked.clear()
    latents(pipe, callback_on_step_end=lambda pipe, step, timestep, kwargs: {})
    assert asked.count(pipe.transformer) == 4
