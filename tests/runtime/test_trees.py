"""The key of a module tree: each change that a traced program would not have seen gives another key."""

import copy
import functools
import types

import pytest
import torch
from torch import nn

from cogvideox_torchax.runtime.trees import Tree


class Scaled(nn.Linear):
    size = 0

    def __init__(self):
        super().__init__(4, 4)
        self.options = {"scales": [1.0], "deep": {"list": [[]]}, "tuple": ([set()],)}
        self.kinds = [1]
        self.shift = torch.zeros(4)
        self.activation = functools.partial(torch.add, alpha=1)
        self.processor = types.SimpleNamespace(factor=1.0, names=[])


@pytest.fixture
def network():
    return nn.Sequential(Scaled(), Scaled())


CHANGES = {
    "a part in the place of another": lambda network: network.__setitem__(0, Scaled()),
    "a part more": lambda network: network[0].add_module("part", nn.Identity()),
    "two parts swapped": lambda network: network._modules.update({"0": network[1], "1": network[0]}),
    "a part's class": lambda network: setattr(network[0], "__class__", nn.Linear),
    "a part's method": lambda network: setattr(network[0], "forward", lambda x: x),
    "an attribute more": lambda network: setattr(network[0], "more", 1),
    "an attribute less": lambda network: delattr(network[0], "options"),
    "an attribute's value": lambda network: setattr(network[0], "in_features", 5),
    "an attribute of the root": lambda network: setattr(network, "more", 1),
    "another object without attributes": lambda network: setattr(
        network[0], "activation", functools.partial(torch.add, alpha=2)
    ),
    "an item inside an attribute": lambda network: network[0].options["scales"].append(2.0),
    "an item of a dictionary in it": lambda network: network[0].options["deep"].update(gain=3),
    "an item of a list in a list": lambda network: network[0].options["deep"]["list"][0].append("a"),
    "an item of a set in a list in a tuple": lambda network: network[0].options["tuple"][0][0].add("a"),
    "another container with equal items": lambda network: setattr(network[0], "kinds", (1,)),
    "an equal item of another type": lambda network: setattr(network[0], "kinds", [True]),
    "an attribute of an object": lambda network: setattr(network[0].processor, "factor", 2.0),
    "an item of an object's list": lambda network: network[0].processor.names.append("a"),
    "a hook": lambda network: network[0].register_forward_hook(print),
    "a write into a plain tensor": lambda network: network[0].shift.add_(1),
    "an attribute of a class": lambda network: setattr(Scaled, "size", Scaled.size + 1),
    "a module used twice": lambda network: network._modules.update({"1": network[0]}),
    "an object's own container inside of itself": lambda network: network[0].kinds.append(network[0].kinds),
    "a weight under another name": lambda network: network[0]._parameters.update(
        offset=network[0]._parameters.pop("bias")
    ),
    "a weight more": lambda network: network[0].register_buffer("more", torch.zeros(1)),
    "a weight less": lambda network: setattr(network[0], "bias", None),
    "a weight tied to another": lambda network: setattr(network[1], "weight", network[0].weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(network, change):
    parts = list(network)  # a part that is replaced lives on
    before = Tree(network)
    assert Tree(network).key == before.key
    CHANGES[change](network)
    assert Tree(network).key != before.key
    del parts


@pytest.mark.usefixtures("torchax_off")
def test_a_copy_is_no_change_of_the_copied_classes(network):
    Base = type("Base", (), {})
    network[0].processor = type("Processor", (Base,), {"factor": 1.0})()
    before = Tree(network)
    copy.deepcopy([network, Base()])
    assert Tree(network).key == before.key


def test_new_weights_are_no_change_and_neither_is_another_root_around_the_parts(network):
    before = Tree(network)
    network[0].weight = nn.Parameter(torch.ones(4, 4))
    network[0].load_state_dict(Scaled().state_dict(), assign=True)
    assert Tree(network).key == before.key
    assert Tree(nn.Sequential(*network)).key == before.key
