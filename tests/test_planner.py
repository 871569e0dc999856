"""The plan of a small model: for a real TPU topology, and for this machine's CPU."""

import json
from pathlib import Path

import pytest
import torch

from cogvideox_torchax import cli, planner
from cogvideox_torchax.cli.common import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("torchax_off")

HLO = """
HloModule jit__trace

%fused.1 (a: bf16[8,8]) -> bf16[8,8] {
  ROOT %c = bf16[8,8]{1,0} convolution(%a, %a)
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %f = bf16[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused.1, backend_config={"estimated_cycles":"100"}
  %y = bf16[8,8]{0,1} copy(%f), backend_config={"estimated_cycles":"20"}
  %z = bf16[8,8]{0,1} fusion(%y), kind=kLoop, calls=%fused.2, backend_config={"estimated_cycles":"3"}
  %g = (bf16[8,8], bf16[8,64]{1,0}) all-gather-start(%z), dimensions={1}
  %p = f32[4,4]{1,0} collective-permute(%z)
}
"""


def test_cycles_go_to_what_they_are_spent_on():
    assert planner.cycles_by_kind(HLO) == {planner.CONVOLUTION: 100, planner.COPY: 20, planner.OTHER: 3}


def test_collectives_are_counted_with_their_largest_result():
    assert planner.collectives(HLO) == {"all-gather": (1, 8 * 64 * 2), "collective-permute": (1, 4 * 4 * 4)}


def test_a_plan_for_a_tpu_without_one(tmp_path, monkeypatch):
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(DEMO_MODEL), "--frames", "1", "--height", "16", "--width", "24"]
    assert cli.main(["plan", *arguments, "--encode", "--json", "plan.json", "--save-hlo", "hlo"]) == 0
    document = json.loads(Path("plan.json").read_text())
    (program,) = document["programs"]
    assert program["seconds"] > program["floor_seconds"] > 0
    assert set(program["shares"]) <= {planner.CONVOLUTION, planner.COPY, planner.OTHER}
    assert program["argument_bytes"] > 0
    assert document["topology"] == "v6e:1x1"
    assert document["summary"]["fits"].startswith("yes")
    assert "estimated_cycles" in Path("hlo/encode_first.hlo.txt").read_text()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_for_this_machine(tmp_path, monkeypatch, tp):
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(DEMO_MODEL), "--frames", "1", "--height", "16", "--width", "32"]
    assert cli.main(["plan", *arguments, "--platform", "cpu", "--tp", str(tp), "--json", "plan.json"]) == 0
    (program,) = json.loads(Path("plan.json").read_text())["programs"]
    assert program["flops"] > 0
    assert program["seconds"] is None
    assert ("collective-permute" in program["collectives"]) == (tp == 2)


def test_a_hollow_model_has_shapes_and_no_weights():
    vae = planner.hollow_vae("5b", torch.bfloat16)
    assert sum(parameter.numel() for parameter in vae.parameters()) == 215_583_907
    assert all(parameter.device.type == "meta" for parameter in vae.parameters())
    assert planner.hollow_vae("1.5-5b", torch.bfloat16).config["invert_scale_latents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v9:1x1"], "one of v4, v5e, v5p, v6e"),
        (["--topology", "v6e"], "a grid, such as v6e:2x4"),
        (["--height", "100", "--platform", "cpu"], "multiples of 8"),
        (["--model", "./none"], "cannot read the config"),
        (["--platform", "cpu", "--dp", "99"], "99"),
    ],
)
def test_a_plan_that_cannot_be_made_is_named(arguments, words, capsys):
    assert cli.main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err
