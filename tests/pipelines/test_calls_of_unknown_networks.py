"""Calls of a network that this package does not know: their programs, arguments, weights and places."""

import copy
import pickle

import pytest
import torch
from torch import nn

from cogvideox_torchax import make_mesh, runtime
from tests.pipelines.unknown_networks import (
    ported_network,
)


class Scaled(nn.Module):
    """A network whose call has numbers, containers and options; it counts how often it is traced."""

    traces: list[str] = []  # noqa: RUF012 - of all copies, as a trace runs a copy

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4096)

    def forward(self, given, *, scale=1.0, repeats=1, mode=None):
        self.traces.append(mode)
        x = self.linear(given["x"]) * scale
        for _ in range(repeats):
            x = x + given["more"][0]
        return {"mode": mode, "x": x, "half": (x / 2, None)}


@pytest.fixture
def scaled():
    Scaled.traces.clear()
    return ported_network(Scaled)


def call_scaled(model, **options):
    given = {"x": torch.ones(2, 4), "more": [torch.full((2, 1), 2.0)]}
    result = model(given, **options)
    return {"mode": result["mode"], "x": runtime.to_torch(result["x"]), "half": result["half"]}


def test_arguments_and_results_are_trees_of_the_callers_own(scaled):
    result = call_scaled(scaled, mode="dark")
    assert result["mode"] == "dark"
    assert result["half"][1] is None
    expected = call_scaled(copy.deepcopy(scaled).to("cpu"), mode="dark")
    assert torch.allclose(result["x"], expected["x"], atol=1e-5)
    assert torch.equal(runtime.to_torch(result["half"][0]), result["x"] / 2)


def test_a_number_that_varies_becomes_an_argument_and_one_that_is_branched_on_does_not(scaled, caplog):
    for index in range(5):
        call_scaled(scaled, scale=0.5 + index)
    # The first value is a constant; the second an argument, and a constant once more, to compare.
    assert len(Scaled.traces) == 3
    Scaled.traces.clear()
    for repeats in (1, 2, 3, 2):
        result = call_scaled(scaled, repeats=repeats, scale=0.25 * repeats)
        weights = scaled.linear
        base = runtime.to_torch(weights.weight).sum(1) + runtime.to_torch(weights.bias)
        assert torch.allclose(result["x"], base * 0.25 * repeats + 2.0 * repeats, atol=1e-4)
    call_scaled(scaled, repeats=3, scale=9.0)
    assert len(Scaled.traces) <= 8, "a value of a branch is traced once"
    assert not caplog.records, "nothing runs operation by operation"
    for value in (1, True, 1, True):  # they are equal, and no program of one may serve the other
        assert type(call_scaled(scaled, mode=value)["mode"]) is type(value)


def test_a_second_call_compiles_nothing_and_another_mode_is_another_program(scaled):
    for mode in ("a", "b", "a", "b"):
        assert call_scaled(scaled, mode=mode)["mode"] == mode
    assert Scaled.traces == ["a", "b"]


def test_weights_are_arguments_and_modules_select_the_program(scaled):
    first = call_scaled(scaled)["x"]
    with torch.no_grad(), runtime.active():
        scaled.linear.weight.mul_(2)
        scaled.linear.bias.mul_(2)
    assert torch.allclose(call_scaled(scaled)["x"], (first - 2) * 2 + 2, atol=1e-4)
    assert len(Scaled.traces) == 1
    hook = scaled.linear.register_forward_hook(lambda _module, _args, y: y * 0)
    assert torch.equal(call_scaled(scaled)["x"], torch.full((2, 4096), 2.0))
    hook.remove()


def test_weights_are_split_over_the_mesh_where_they_do_not_fit():
    model = ported_network(Scaled, mesh=make_mesh(2, 4))
    whole = call_scaled(model)["x"]
    assert str(model.parallelism) == "batch over dp, weights whole, tokens not split"
    model.place_on(make_mesh(2, 4), memory=1.0)
    split = call_scaled(model)["x"]
    assert str(model.parallelism) == "batch over dp, weights split, tokens not split"
    assert torch.equal(whole, split)
    array = runtime.array_of(model.linear.weight)
    assert array.addressable_shards[0].data.size == array.size // 8


def test_a_copy_a_pickle_and_a_move_stay_the_network(scaled):
    expected = call_scaled(scaled)["x"]
    for other in (copy.deepcopy(scaled), copy.copy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert type(other) is type(scaled)
        assert torch.allclose(call_scaled(other)["x"], expected, atol=1e-5)
    scaled.to("cpu")
    assert torch.allclose(call_scaled(scaled)["x"], expected, atol=1e-5)
    assert not runtime.is_on_jax(scaled)
    scaled.to("jax")
    assert torch.equal(call_scaled(scaled)["x"], expected)


def test_forms_of_calls_do_not_pile_up(scaled):
    for index in range(70):
        call_scaled(scaled, mode=f"mode {index}")
    assert len(runtime.programs_of(scaled)._kept) <= runtime.Programs.KINDS


@pytest.mark.parametrize("parallel", ["context", "tensor"])
def test_a_split_of_tokens_or_channels_is_refused_for_an_unknown_network(parallel):
    with pytest.raises(ValueError, match=f"parallel='{parallel}' for a Scaled, whose tokens and channels"):
        ported_network(Scaled, mesh=make_mesh(2, 4), parallel=parallel)
