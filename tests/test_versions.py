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


@pytest.mark.parametrize(
    ("tested", "version", "holds"),
    [
        pytest.param(TORCH, "2.11.0", True, id="the oldest"),
        pytest.param(TORCH, "2.12.3", True, id="one between"),
        pytest.param(TORCH, "2.13.0", True, id="the newest"),
        pytest.param(TORCH, "2.13.0+cu130", True, id="the newest, for a device"),
        pytest.param(TORCH, "2.13.4", False, id="a patch of the newest"),
        pytest.param(TORCH, "2.10.9", False, id="one before the oldest"),
        pytest.param(TORCH, "2.11.0rc1", False, id="a candidate of the oldest"),
        pytest.param(TORCH, "2.14.0", False, id="the next"),
        pytest.param(TORCH, "2.14.0.dev20261101", False, id="a development build of the next"),
        pytest.param(TORCH, "3.13.0", False, id="the next major one"),
        pytest.param(NIGHTLY, "0.0.14.dev20261026", True, id="the tested development build"),
        pytest.param(NIGHTLY, "0.0.14.dev20260901", False, id="an earlier development build"),
        pytest.param(NIGHTLY, "0.0.14.dev20261130", False, id="a later development build"),
        pytest.param(NIGHTLY, "0.0.14", False, id="the release that it leads to"),
        pytest.param(NIGHTLY, "0.0.15", False, id="the next release, still of 0.0"),
    ],
)
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
