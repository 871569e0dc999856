"""Networks that this package does not know: their calls and effects are as in PyTorch."""

import copy
import functools
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cogvideox_torchax import make_mesh, port, runtime
from tests import reference, small_pipelines
from tests.reference import largest_error

pytestmark = pytest.mark.usefixtures("torchax_off")


def stock_network(make):
    torch.manual_seed(0)
    return reference.randomized(make())


def ported_network(make, **options):
    """Return a network that this package does not know, ported beside a VAE."""
    holder = types.SimpleNamespace(vae=small_pipelines.vae(), transformer=stock_network(make))
    return port(holder, **options).transformer


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
    return torch.utils._pytree.tree_map_only(torch.Tensor, runtime.to_torch, model(given, **options))


def test_arguments_and_results_are_trees_and_a_copy_a_pickle_and_a_move_stay_the_network(scaled):
    result = call_scaled(scaled, mode="dark")
    assert (result["mode"], result["half"][1]) == ("dark", None)
    assert torch.equal(result["half"][0], result["x"] / 2)
    for other in (copy.deepcopy(scaled), copy.copy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert type(other) is type(scaled)
        assert torch.allclose(call_scaled(other)["x"], result["x"], atol=1e-5)
    for device in ("cpu", "jax"):
        assert torch.allclose(call_scaled(scaled.to(device))["x"], result["x"], atol=1e-5)
        assert runtime.is_on_jax(scaled) == (device == "jax")


def test_a_number_that_varies_becomes_an_argument_and_one_that_is_branched_on_does_not(scaled, caplog):
    for index in range(5):
        call_scaled(scaled, scale=0.5 + index)
    # The first value is a constant; the second an argument, and a constant once more, to compare.
    assert len(Scaled.traces) == 3
    Scaled.traces.clear()
    base = runtime.to_torch(scaled.linear.weight).sum(1) + runtime.to_torch(scaled.linear.bias)
    for repeats in (1, 2, 3, 2):
        result = call_scaled(scaled, repeats=repeats, scale=0.25 * repeats)
        assert torch.allclose(result["x"], base * 0.25 * repeats + 2.0 * repeats, atol=1e-4)
    call_scaled(scaled, repeats=3, scale=9.0)
    assert len(Scaled.traces) <= 8, "a value of a branch is traced once"
    assert not caplog.records, "nothing runs operation by operation"


def test_a_form_of_a_call_is_compiled_once_and_forms_do_not_pile_up(scaled, monkeypatch):
    monkeypatch.setattr(runtime.Programs, "KINDS", 3)
    for mode in ("a", 1, True, "a", 1, True):  # two are equal, and no program of one may serve the other
        assert type(call_scaled(scaled, mode=mode)["mode"]) is type(mode)
    assert Scaled.traces == ["a", 1, True]
    call_scaled(scaled, mode="b")
    assert len(runtime.programs_of(scaled)._kept) == 3


def test_weights_are_arguments_and_modules_select_the_program(scaled):
    first = call_scaled(scaled)["x"]
    with torch.no_grad(), runtime.active():
        scaled.linear.weight.mul_(2)
        scaled.linear.bias.mul_(2)
    assert torch.allclose(call_scaled(scaled)["x"], (first - 2) * 2 + 2, atol=1e-4)
    assert len(Scaled.traces) == 1
    scaled.linear.register_forward_hook(lambda _module, _args, y: y * 0)
    assert torch.equal(call_scaled(scaled)["x"], torch.full((2, 4096), 2.0))


def test_weights_are_split_over_the_mesh_where_they_do_not_fit():
    model = ported_network(Scaled, mesh=make_mesh(2, 4))
    whole = call_scaled(model)["x"]
    assert str(model.parallelism) == "batch over dp, weights whole, tokens not split"
    model.place_on(make_mesh(2, 4), memory=1.0)
    assert torch.equal(whole, call_scaled(model)["x"])
    assert str(model.parallelism) == "batch over dp, weights split, tokens not split"
    array = runtime.array_of(model.linear.weight)
    assert array.addressable_shards[0].data.size == array.size // 8


@pytest.mark.parametrize("parallel", ["context", "tensor"])
def test_a_split_of_tokens_or_channels_is_refused_for_an_unknown_network(parallel):
    with pytest.raises(ValueError, match=f"parallel='{parallel}' for a Scaled, whose tokens and channels"):
        ported_network(Scaled, mesh=make_mesh(2, 4), parallel=parallel)


X = torch.linspace(-1, 1, 8).view(2, 4)


class Made(nn.Module):
    """A network whose forward is the function that a test gives."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("total", torch.zeros(()))

    def forward(self, *args):
        return self.function(self, *args)

    def encode(self, x):
        return types.SimpleNamespace(latents=self.linear(x))

    def decode(self, encoded):
        return self.linear(encoded.latents)


def stock_and_ported(function):
    """Return two networks of equal weights whose forward is a function: in PyTorch, and ported."""
    return tuple(make(functools.partial(Made, function)) for make in (stock_network, ported_network))


def writes_into_its_argument(self, x):
    x[:, :2] *= 2
    return self.linear(x)


def adds_to_a_buffer(self, x):
    self.total += x.square().sum()
    return self.linear(x)


@pytest.mark.parametrize("function", [writes_into_its_argument, adds_to_a_buffer])
def test_what_a_network_writes_is_written_as_in_pytorch(function, caplog):
    stock, model = stock_and_ported(function)
    own = X.clone()
    expected = stock(own)
    for x in (X.clone(), runtime.to_jax(X)):
        assert largest_error(model(x), expected.detach()) < 1e-6
        assert torch.equal(runtime.to_torch(x), own)
    assert torch.allclose(runtime.to_torch(model.total), 2 * stock.total)
    assert [record.getMessage().partition("since ")[2] for record in caplog.records[1:]] == [
        "it writes into its weights or its arguments"
    ]


def collects(self, x, found):
    found["y"] = self.linear(x)
    return x


def adds_twice(self, x, y):
    x.mul_(2)
    return self.linear(x) + y


CALLS = {
    "a type test": (lambda m, x, v: m.linear(x) * (v if isinstance(v, float) else 100), [0.1, 0.2, 0.3]),
    "a tensor test": (lambda m, x, v: m.linear(x) * (7 if torch.is_tensor(v) else v), [0.1, 0.2, 0.3]),
    "a key": (lambda m, x, v: m.linear(x) * {1: 3.0, 2: 5.0, 3: 6.0}[v], [1, 2, 3]),
    "a method of floats": (lambda m, x, v: m.linear(x) * (2 if v.is_integer() else 3), [1.0, 1.5, 2.0]),
    "a size": (lambda m, x, v: m.linear(x).sum() + torch.zeros(2, v, device=x.device), [1, 2, 3]),
    "a sign of zero": (lambda m, x, v: 1 + torch.atan2(0 * x.abs(), torch.full_like(x, v)), [0.0, -0.0]),
}


@pytest.mark.parametrize(("function", "values"), CALLS.values(), ids=CALLS)
def test_a_number_means_what_it_means_in_pytorch(function, values):
    stock, model = stock_and_ported(function)
    for value in (*values, *values):
        assert largest_error(model(X, value), stock(X, value).detach()) < 1e-6, value


def test_objects_and_containers_of_the_users_own_are_changed_as_in_pytorch():
    stock, model = stock_and_ported(collects)
    expected, found = {}, {}
    stock(X, expected)
    model(runtime.to_jax(X), found)
    assert largest_error(found["y"], expected["y"].detach()) < 1e-6
    with pytest.raises(ValueError, match="Made changes a container among its arguments: pass tensors on JAX"):
        model(X, {})
    stock, model = stock_and_ported(adds_twice)
    own, other = X.clone(), X.clone()
    assert largest_error(model(other, other), stock(own, own).detach()) < 1e-6
    assert torch.equal(own, other)


def test_random_numbers_of_a_network_differ_between_calls_and_follow_the_seed(caplog):
    model = ported_network(functools.partial(Made, lambda m, x: F.dropout(m.linear(x), 0.5, training=True)))
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append([runtime.to_torch(model(torch.ones(8, 4))) for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][0], draws[0][1])
    assert not torch.equal(draws[0][0], draws[2][0])
    words = caplog.records[-1].getMessage()
    assert words.endswith("since it draws random numbers, which no program on JAX does")


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_of_weights_and_through_frozen_ones_are_refused_in_words(trained):
    model = ported_network(functools.partial(Made, lambda m, x: m.linear(x))).requires_grad_(trained)
    with torch.enable_grad(), runtime.active():
        x = runtime.to_jax(X).requires_grad_()
        with pytest.raises(ValueError, match="on JAX the transformer has no gradients"):
            (model(x).sum() + x.sum()).backward()


def test_a_method_with_other_objects_runs_operation_by_operation(caplog):
    stock, model = stock_and_ported(None)
    assert largest_error(model.decode(model.encode(X)), stock.decode(stock.encode(X)).detach()) < 1e-6
    words = [record.getMessage().partition("since ")[2] for record in caplog.records]
    assert words[-2:] == ["it returns a SimpleNamespace", "it takes a SimpleNamespace"]
