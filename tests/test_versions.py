"""The tested range of the packages that a result depends on."""

import json
import re

import pytest

from cogvideox_torchax import versions
from tests.processes import ROOT


def test_tested_is_from_what_is_pinned_to_the_newest_of_the_matrix():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    kept = json.loads((ROOT / "benchmarks" / "results" / "versions-newest-3.13.json").read_text())["versions"]
    assert {name: versions.Tested(pins[name], kept[name]) for name in versions.TESTED} == versions.TESTED


TORCH = versions.Tested("2.11.0", "2.13.0")
NIGHTLY = versions.Tested("0.0.14.dev20261026", "0.0.14.dev20261026")
HELD = {
    "the oldest": (TORCH, "2.11.0", True),
    "one between": (TORCH, "2.12.3", True),
    "the newest": (TORCH, "2.13.0", True),
    "the newest, for a device": (TORCH, "2.13.0+cu130", True),
    "a patch of the newest": (TORCH, "2.13.4", False),
    "one before the oldest": (TORCH, "2.10.9", False),
    "a candidate of the oldest": (TORCH, "2.11.0rc1", False),
    "the next": (TORCH, "2.14.0", False),
    "a development build of the next": (TORCH, "2.14.0.dev20261101", False),
    "the next major one": (TORCH, "3.13.0", False),
    "the tested development build": (NIGHTLY, "0.0.14.dev20261026", True),
    "an earlier development build": (NIGHTLY, "0.0.14.dev20260901", False),
    "a later development build": (NIGHTLY, "0.0.14.dev20261130", False),
    "the release that it leads to": (NIGHTLY, "0.0.14", False),
    "the next release, still of 0.0": (NIGHTLY, "0.0.15", False),
}


@pytest.mark.parametrize(("tested", "version", "holds"), HELD.values(), ids=HELD)
def test_a_range_holds(tested, version, holds):
    assert tested.holds(version) is holds


def test_what_lies_outside_is_named_and_what_is_not_installed_is_not(monkeypatch):
    found = {"torch": "2.16.0", "jax": versions.TESTED["jax"].newest, "diffusers": "0.30.0"}
    monkeypatch.setitem(versions.TESTED, "diffusers", versions.Tested("0.40.0", "0.42.1"))
    monkeypatch.setattr(versions, "installed", found.get)
    assert versions.untested() == [
        f"torch 2.16.0 is installed, 2.13.0 to {versions.TESTED['torch'].newest} is tested",
        "diffusers 0.30.0 is installed, 0.40.0 to 0.42.1 is tested",
    ]
