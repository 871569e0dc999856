"""Training steps: the same on every backend and on a mesh, and what they are made of."""

import copy
import math
from dataclasses import replace
from unittest.mock import Mock, call

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from torch.nn import functional

from cogvideox_torchax import backends, make_mesh, port, runtime
from cogvideox_torchax.train import start
from cogvideox_torchax.train.clips import Sampler, Shape, load, parts
from cogvideox_torchax.train.optimizers import (
    OTHERS_RATE,
    CompiledOptimizers,
    Optimizers,
    orthogonal,
    schedule,
)
from cogvideox_torchax.train.stages import Plan, TrainingSettings
from cogvideox_torchax.train.trainer import Trainer
from tests.train.conftest import TINY

pytestmark = pytest.mark.usefixtures("torchax_off")

PLAN = Plan(steps=40, clips=2, frames=9, size=16)


@pytest.fixture
def only(monkeypatch):
    """Return a function that makes every step take clips of so many frames: one shape to compile."""
    return lambda frames: monkeypatch.setattr(Plan, "shape", lambda *_: Shape(2, frames, 16))


@pytest.fixture
def sampler(material):
    sources = [load(part, frames=9, size=16) for part in parts(["clip.mp4", "picture.png"])]
    # Of these clips no weight's gradient is near to 0: there Adam makes a step of its rounding.
    return Sampler(sources, seed=1)


@pytest.fixture(scope="module")
def stock():
    vae = AutoencoderKLCogVideoX(**TINY)
    start.initialize(vae, seed=0)
    return vae


def trainer_of(stock, sampler, plan=PLAN, kind="torch"):
    """Return a trainer of a copy."""
    return Trainer(backends.backend(kind).from_native(copy.deepcopy(stock)), sampler, plan)


def trained(vae, kind, sampler, steps):
    """Losses of a few steps, and the state after them."""
    training = Trainer(backends.backend(kind).from_native(vae), sampler, PLAN)
    training.step_number = 10
    return [training.step() for _ in range(steps)], training.state()


@pytest.mark.parametrize(("dp", "frames", "steps"), [(None, 9, 2), (2, 1, 1)])
@pytest.mark.slow
def test_steps_on_jax_are_those_in_pytorch(stock, sampler, only, dp, frames, steps):
    only(frames)
    want, wanted = trained(copy.deepcopy(stock), "torch", sampler, steps)
    vae = port(copy.deepcopy(stock), mesh=dp and make_mesh(dp, 1))
    got, state = trained(vae, "torchax", sampler, steps)
    assert [loss.total for loss in got] == pytest.approx([loss.total for loss in want], rel=1e-5)
    assert [loss.gradient for loss in got] == pytest.approx([loss.gradient for loss in want], rel=1e-4)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (state[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


def test_on_jax_a_training_has_the_state_that_it_has_in_pytorch(stock, sampler):
    state, wanted = (trainer_of(stock, sampler, kind=kind).state() for kind in ("torchax", "torch"))
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_a_step_takes_the_batch_of_its_number_and_of_its_shape_in_the_plan(stock, monkeypatch):
    plan = replace(PLAN, seed=2**64 - 1)  # the largest that the command takes
    training = trainer_of(stock, Mock(), plan)
    losses = (torch.zeros((), requires_grad=True),) * 5
    monkeypatch.setattr(training, "_losses", Mock(return_value=losses))
    for _ in range(plan.steps):
        training.step()
    asked = [call(number, plan.shape(number)) for number in range(plan.steps)]
    assert training._sampler.batch.call_args_list == asked
    assert training._losses.call_args.args[0] is training._sampler.batch.return_value


def test_losses_are_what_they_are_called(stock, sampler):
    training = trainer_of(stock, sampler, replace(PLAN, settings=TrainingSettings(mean_color_weight=2.0)))
    x = sampler.batch(0, Shape(2, 9, 16))
    found = training._losses(x, torch.Generator().manual_seed(3))
    posterior = stock.encode(x).latent_dist
    drawn = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(3))
    y = stock.decode(posterior.mean + posterior.std * drawn).sample
    l1, mse = functional.l1_loss(y, x), functional.mse_loss(y, x)
    kl = posterior.kl().sum() / posterior.mean.numel()
    colour = (y.mean((3, 4)) - x.mean((3, 4))).square().mean().sqrt()
    wanted = (l1 + 4 * mse + 1e-3 * kl + 2 * colour, l1, mse, kl, colour)
    assert [loss.item() for loss in found] == pytest.approx([loss.item() for loss in wanted], rel=1e-4)


def test_the_average_follows_its_formula(stock, sampler, only):
    only(1)
    training = trainer_of(stock, sampler)
    want = {name: weight.clone() for name, weight in stock.named_parameters()}
    for number in range(3):
        training.step()
        decay = min(0.9995, (1 + number) / (10 + number))
        for name, weight in training.vae.named_parameters():
            want[name] = decay * want[name] + (1 - decay) * weight.detach()
    state = training.state()
    for name, tensor in want.items():
        assert torch.allclose(state[f"average/{name}"], tensor, rtol=1e-5, atol=1e-7), name


def test_a_training_learns(stock, sampler, only):
    """Steps on one batch: what an optimizer of the wrong sign, or weights that stay, would not do."""
    only(9)
    training = trainer_of(stock, sampler, Plan(steps=1000, clips=2, frames=9, size=16))
    losses = []
    for _ in range(20):
        training.step_number = 99  # the full learning rate, the same clips
        losses.append(training.step().total)
    assert losses[-1] < 0.7 * losses[0]
    before = {name: weight.clone() for name, weight in training.state().items()}
    with training.averaged() as vae:
        inside = {name: weight.clone() for name, weight in vae.named_parameters()}
    for name, first in stock.named_parameters():
        average, weight = (before[f"{kind}/{name}"] for kind in ("average", "weights"))
        assert not torch.equal(average, first), f"the average of {name} stays"
        assert not torch.equal(average, weight)
        assert torch.equal(average, inside[name])
    assert all(torch.equal(before[name], weight) for name, weight in training.state().items())


@pytest.mark.parametrize("kind", ["torch", "torchax"])
@pytest.mark.slow_cases("torchax")
def test_a_gradient_that_is_not_finite_changes_nothing(stock, sampler, only, kind, monkeypatch):
    only(1)
    training = trainer_of(stock, sampler, Plan(steps=10, clips=1, frames=1, size=16, stills=False), kind)
    training.step()
    before = {name: tensor.clone() for name, tensor in training.state().items()}
    real = Trainer._losses
    monkeypatch.setattr(Trainer, "_losses", lambda *args: (real(*args)[0] * math.inf, *real(*args)[1:]))
    with pytest.raises(FloatingPointError, match="the gradient of step 1 is"):
        training.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.state().items())


def test_compiled_optimizers_step_as_the_others():
    def stepped(kind, move):
        runtime.enable()
        generator = torch.Generator().manual_seed(0)
        shapes = {"conv_in.weight": (4, 2, 3), "tall.weight": (8, 2, 2), "wide.weight": (2, 8), "bias": (4,)}
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        weights = {name: torch.nn.Parameter(move(value)) for name, value in drawn.items()}
        average = [weight.detach().clone() for weight in weights.values()]
        optimizers = kind(weights)
        for _ in range(3):
            for weight in weights.values():
                weight.grad = move(torch.randn(weight.shape, generator=generator))
            optimizers.step(average, 0.5, 0.9)
        return [
            runtime.to_torch(value) for value in (*weights.values(), *average, *optimizers.moments.values())
        ]

    found = stepped(CompiledOptimizers, runtime.to_jax)
    for got, want in zip(found, runtime.without_torchax(stepped, Optimizers, lambda x: x), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 8, 50), (2, 50, 8)])
def test_orthogonal_is_newton_schulzs_iteration(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = matrices / matrices.flatten(1).norm(dim=1)[:, None, None]
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    found = orthogonal(matrices)
    assert (found - x).abs().max() < 1e-5
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3


def shapes_of(steps, **options):
    """Return the shapes of a training's batches."""
    plan = Plan(steps, frames=25, **options)
    return [plan.shape(step) for step in range(steps)]


def test_stills_come_first_and_clips_are_of_lengths_that_come_back_whole():
    shapes = shapes_of(200)
    assert sum(shape.frames == 1 for shape in shapes[:24]) > 16
    assert sum(shape.frames == 25 for shape in shapes[24:]) > 40
    assert {shape.size for shape in shapes[:150]} == {64}
    assert {shape.size for shape in shapes[150:]} == {64, 96}
    assert {shape.frames for shape in shapes} == {1, 9, 25}
    assert shapes == shapes_of(200)
    given = shapes_of(200, stills=False)  # weights that are given need no stills first
    assert sum(shape.frames == 1 for shape in given[:24]) < 8
    assert given[24:] == shapes[24:]


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_learning_rates_are_a_part_of_the_usual(stock, sampler, only, rate):
    """AdamW's first step is its rate, whatever the gradient."""
    only(1)
    plan = Plan(steps=1000, frames=1, size=16, settings=TrainingSettings(learning_rate_factor=rate))
    training = trainer_of(stock, sampler, plan)
    training.step_number = 99
    training.step()
    moved = (training.vae.decoder.conv_out.conv.bias - stock.decoder.conv_out.conv.bias).abs().max()
    assert math.isclose(moved.item(), rate * OTHERS_RATE * schedule(99, 1000), rel_tol=0.01)


def test_half_of_the_clips_are_whole_frames_where_they_are_asked_for():
    settings = TrainingSettings(whole=(128, 192))
    plain, shapes = shapes_of(400, stills=False), shapes_of(400, stills=False, settings=settings)
    pairs = zip(shapes, plain, strict=True)
    assert [shape if shape.size else replace(shape, size=own.size) for shape, own in pairs] == plain
    whole = [shape.size is None for shape in shapes if shape.frames > 1]
    assert 0.4 < sum(whole) / len(whole) < 0.6
    assert {shape.frames for shape in shapes if shape.size is None} == {9, 25}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": TrainingSettings(whole=(32, 48)), "frames": 1}, "give 9 or more"),
        ({"size": 40}, "multiple of 16"),
        ({"frames": 8}, "8 n"),
    ],
)
def test_what_the_vae_cannot_give_back_in_size_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Plan(steps=1, **options)
