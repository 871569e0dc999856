"""Effects of networks that this package does not know are as in PyTorch: writes, branches, draws, results."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cogvideox_torchax import runtime
from tests.pipelines.unknown_networks import Made, X, ported_network, stock_and_ported, stock_network
from tests.reference import largest_error


class Writing(nn.Module):
    """A network that writes into its argument, and keeps a sum in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x, keep=False):
        x[:, :2] *= 2
        if keep:
            self.total += x.sum()
        return self.linear(x)


@pytest.mark.usefixtures("torchax_off")
def test_what_a_network_writes_is_written_as_in_pytorch(caplog):
    stock, model = stock_network(Writing).requires_grad_(False), ported_network(Writing)
    for keep in (False, True):
        own, host, on_jax = torch.ones(2, 4), torch.ones(2, 4), runtime.to_jax(torch.ones(2, 4))
        expected = stock(own, keep)
        for x in (host, on_jax):
            assert largest_error(model(x, keep), expected) < 1e-6
            assert torch.equal(runtime.to_torch(x), own)
    assert runtime.to_torch(model.total) == 2 * stock.total
    assert {record.getMessage().partition("since ")[2] for record in caplog.records[1:]} == {
        "it writes into its weights or its arguments"
    }


def collects(self, x, found):
    found["y"] = self.linear(x)
    return x


def adds_twice(self, x, y):
    x.mul_(2)
    return self.linear(x) + y


def counts_its_calls(self, x):
    self.own.factor += 1
    return self.linear(x) * self.own.factor


CALLS = {
    "a type test": (lambda m, x, v: m.linear(x) * (v if isinstance(v, float) else 100), [0.1, 0.2, 0.3]),
    "a tensor test": (lambda m, x, v: m.linear(x) * (7 if torch.is_tensor(v) else v), [0.1, 0.2, 0.3]),
    "a key": (lambda m, x, v: m.linear(x) * {1: 3.0, 2: 5.0, 3: 6.0}[v], [1, 2, 3]),
    "a method of floats": (lambda m, x, v: m.linear(x) * (2 if v.is_integer() else 3), [1.0, 1.5, 2.0]),
    "a size": (lambda m, x, v: m.linear(x).sum() + torch.zeros(2, v, device=x.device), [1, 2, 3]),
    "a sign of zero": (lambda m, x, v: 1 + torch.atan2(0 * x.abs(), torch.full_like(x, v)), [0.0, -0.0]),
}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(("function", "values"), CALLS.values(), ids=CALLS)
def test_a_number_means_what_it_means_in_pytorch(function, values):
    stock, model = stock_and_ported(function)
    for value in (*values, *values):
        expected = stock(X, value).detach()
        assert largest_error(model(X, value), expected) < 1e-6, value


@pytest.mark.usefixtures("torchax_off")
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
    stock, model = stock_and_ported(counts_its_calls)
    for _ in range(3):
        assert largest_error(model(X), stock(X).detach()) < 1e-6


@pytest.mark.usefixtures("torchax_off")
def test_attributes_that_change_in_place_are_seen():
    def function(self, x):
        return self.linear(x) * self.own.factor * self.table

    stock, model = stock_and_ported(function)
    changes = (
        lambda each: None,
        lambda each: setattr(each.own, "factor", 2.0),
        lambda each: each.table.fill_(3.0),
    )
    for change in changes:
        for each in (stock, model):
            change(each)
        assert largest_error(model(X), stock(X).detach()) < 1e-6


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


class Returning(nn.Module):
    """A network with a method that returns an object, as a VAE's `encode` does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x):
        return types.SimpleNamespace(latents=self.linear(x))

    def decode(self, x):
        return self.linear(x) if isinstance(x, torch.Tensor) else self.linear(x.latents)


def test_a_method_with_other_objects_runs_operation_by_operation(caplog):
    model, x = ported_network(Returning), torch.ones(1, 4)
    encoded = model.encode(x)
    assert torch.equal(runtime.to_torch(encoded.latents), runtime.to_torch(model(x)))
    assert runtime.to_torch(model.decode(encoded)).shape == (1, 4)
    words = [record.getMessage().partition("since ")[2] for record in caplog.records]
    assert words[-2:] == ["it returns a SimpleNamespace", "it takes a SimpleNamespace"]
