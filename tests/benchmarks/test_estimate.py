"""Estimated times: off made-up text, of small programs on this machine, and for a TPU that is not there."""

import json
from types import SimpleNamespace

import jax
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.estimate import chips, command, programs, training
from benchmarks.estimate.hlo import instructions
from cogvideox_torchax import make_mesh
from cogvideox_torchax.cli.common import DEMO_MODEL
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.plan.programs import compile_program
from cogvideox_torchax.vae.directions import ENCODE
from tests import reference

pytestmark = pytest.mark.usefixtures("torchax_off")

HLO = """
%fused.1 (a: bf16[8,8]) -> bf16[8,8] {
  ROOT %c = bf16[8,8]{1,0} convolution(%a, %a)
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %f = bf16[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused.1, backend_config={"estimated_cycles":"100"}
  %y = bf16[8,8]{0,1} copy(%f), backend_config={"estimated_cycles":"20"}
  %z = bf16[8,8]{0,1} fusion(%y), kind=kLoop, calls=%fused.2, backend_config={"estimated_cycles":"3"}
}
"""


def test_cycles_go_to_what_they_are_spent_on_and_in_a_loop_as_often_as_it_runs():
    wanted = {programs.CONVOLUTION: 100, programs.COPY: 20, programs.OTHER: 3}
    assert programs.cycles_by_kind(list(instructions(HLO))) == wanted
    looped = HLO.replace("%fused.1 (", "%body (").replace("calls=%fused.1", "calls=%fused.3")
    looped += """
ENTRY %again (x: bf16[8,8]) -> bf16[8,8] {
  %w = bf16[8,8]{1,0} while(%x), body=%main, backend_config={"known_trip_count":{"n":"7"}}
}
"""
    counted = programs.cycles_by_kind(list(instructions(looped)))
    assert counted == {programs.COPY: 7 * 20, programs.OTHER: 7 * (100 + 3)}


def test_a_job_takes_its_programs_as_often_as_they_run_and_its_collectives_beside_them():
    plans = [SimpleNamespace(seconds=1.0, seconds_with_collectives=1.5)] * 2
    assert programs.times((1, 5), plans) == {
        "estimate_s": 6.0,
        "collectives_s": 3.0,
        "with_collectives_s": 9.0,
    }


def test_an_estimate_for_a_tpu_without_one(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    size = ["--frames", "1", "--height", "16", "--width", "24", "--encode"]
    path = tmp_path / "estimate.json"
    assert main(["estimate", "--model", str(DEMO_MODEL), *size, "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    (program,), summary = document["programs"], document["summary"]
    assert program["seconds"] == summary["estimate_s"] == sum(program["shares"].values())
    assert program["seconds"] > program["floor_s"] == summary["floor_s"] > 0
    assert set(program["shares"]) <= {programs.CONVOLUTION, programs.COPY, programs.OTHER}
    assert document == document | {"topology": "v6e:1x1", "format": command.FORMAT, "counts": [1]}
    assert "time goes to" in capsys.readouterr().out


@pytest.mark.parametrize("words", command.CASES.values(), ids=command.CASES)
def test_the_kept_estimates_are_of_options_that_are_taken(words):
    assert command.parsed(words.split()).training == ("--training" in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "no-such-case"], "got case no-such-case: one of plan-v6e-1-decode-torchax"),
        (["--cases", "train-step-v6e-1", "--dp", "2"], "got --dp 2: a case has its own options"),
        (["--platform", "cpu"], "its compiler gives no cycles"),
    ],
)
def test_an_estimate_that_cannot_be_made_is_one_line(arguments, words, refused):
    assert words in refused("estimate", *arguments, main=main)


@pytest.mark.slow
def test_a_training_step_takes_both_gradients_and_what_the_optimizer_keeps(monkeypatch):
    monkeypatch.setitem(jobs.CONFIGS, "5b", {**reference.SMALL, **reference.TWO_SHALLOW_LEVELS})
    vae = jobs.weightless_vae("5b", torch.float32)
    weights = sum(4 * weight.numel() for weight in vae.parameters())
    mesh = make_mesh(1, 1, devices=jax.devices("cpu"))
    works = list(training.gradient_works(vae, jobs.Job(ENCODE, 1, 8, 8), mesh))
    encode, decode = plans = [compile_program(work, mesh) for work in works]
    assert (encode.name, decode.name) == ("train encode", "train decode")
    request = SimpleNamespace(about={"optimizer_GiB": 2 * weights / 2**30})
    found = training.memory(request, plans, chips.CHIPS["v6e"])
    # Every weight has its gradient, and so has the input.
    assert weights < found["gradients_GiB"] * 2**30 < 1.1 * weights
    parts = ("weights_and_inputs_GiB", "temporaries_GiB_at_most", "gradients_GiB")
    peak = sum(found[part] for part in parts) + request.about["optimizer_GiB"]
    assert (found["peak_memory_GiB"], found["fits"]) == (pytest.approx(peak), True)


def test_the_optimizer_keeps_two_float32_moments_of_each_weight():
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    args = command.parsed(
        ["--training", "--model", str(DEMO_MODEL), "--frames", "1", "--height", "8", "--width", "8"]
    )
    vae = jobs.weightless_vae(str(DEMO_MODEL), torch.float32)
    kept = training.requested(args).about["optimizer_GiB"] * 2**30
    assert kept == pytest.approx(2 * 4 * sum(weight.numel() for weight in vae.parameters()))


@pytest.mark.parametrize(
    ("kind", "coordinates", "topology"),
    [
        ("TPU v6 lite", [[3, 1, 0]], "v6e:1x1"),
        ("TPU v6 lite", [[x, y, 0] for y in range(4) for x in range(2)], "v6e:2x4"),
        ("TPU v5", [[x, y, 0] for y in range(2) for x in range(2)], "v5p:2x2x1"),
    ],
)
def test_the_topology_of_real_devices_is_read_off_their_coordinates(kind, coordinates, topology):
    assert chips.topology_of(kind, coordinates) == topology
