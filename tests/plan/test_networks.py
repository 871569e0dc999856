"""Plans of a transformer's step, a prompt and a training step, of small networks, on this machine's CPU."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
import torch

from cogvideox_torchax import cli, make_mesh, runtime
from cogvideox_torchax.pipelines.networks import step_tensors
from cogvideox_torchax.plan import chips, models, networks, programs
from cogvideox_torchax.plan.chips import PlanError
from tests import reference, small_pipelines

pytestmark = pytest.mark.usefixtures("torchax_off")

SMALL = {**small_pipelines.TRANSFORMER, "use_rotary_positional_embeddings": True, "num_layers": 4}
SMALL_TEXT = {**networks.TEXT_ENCODER, "vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 64}


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(networks.TRANSFORMERS, "5b", SMALL)
    monkeypatch.setattr(networks, "TEXT_ENCODER", {**SMALL_TEXT, "num_heads": 8, "num_layers": 3})


def whole(network, tensors):
    """Compile the program of all layers on a mesh of one device, as the plan has it."""
    network.place_on(make_mesh(1, 1))
    compiled = network.program.lower(*network.program.structs(tensors)).compile()
    return programs.read_program("whole", 0, compiled, None, 0.0)


def test_a_plan_from_few_layers_is_that_of_all():
    runtime.enable()
    size = {"frames": 3, "height": 4, "width": 8}
    devices = jax.devices("cpu")
    plan = networks.plan_step("5b", torch.float32, devices, None, **size)
    network = networks.weightless_transformer("5b", torch.float32, 4)
    want = whole(network, step_tensors(network, batch=2, **size))
    assert plan.layers == 4
    assert plan.program.argument_bytes == want.argument_bytes
    assert plan.program.flops == pytest.approx(want.flops, rel=0.01)
    assert want.temp_bytes <= plan.program.temp_bytes < 2 * want.temp_bytes  # an upper bound
    assert plan.seconds is None  # a CPU's compiler gives no cycles


def test_a_plan_of_a_prompt_is_of_the_models_own_text_encoder(tmp_path):
    small_pipelines.text_encoder(num_layers=5).save_pretrained(tmp_path / "text_encoder")
    (tmp_path / "model_index.json").write_text("{}")
    runtime.enable()
    plan = networks.plan_prompt(str(tmp_path), torch.float32, jax.devices("cpu"), None, tokens=16)
    assert plan.layers == 5
    assert plan.program.argument_bytes < 1e6, "its own width"


SIZE = ("--frames", "9", "--height", "32", "--width", "64")


def planned(network, *more):
    """Return the plan of a network on the CPU, by the command line."""
    common = ("--platform", "cpu", "--dtype", "float32", "-o", "plan.json")
    assert cli.main(["plan", "--network", network, *common, *more]) == 0
    return json.loads(Path("plan.json").read_text())


def test_a_plan_on_the_command_line():
    step = ("step", *SIZE)
    found = planned(*step, "--dp", "2", "--tp", "4")
    assert found["summary"]["network"].startswith("step, 4 layers")
    assert found["summary"]["parallel"] == "context over tp, weights whole (tp=4 divides 8 heads)"
    assert found["programs"][0]["collectives"]["all-to-all"][0] > 0
    of_tensors = planned(*step, "--tp", "8", "--parallel", "tensor")
    assert of_tensors["summary"]["parallel"] == "tensor over tp (requested)"
    assert planned("prompt")["summary"]["network"].startswith("prompt, 3 layers")


CACHES = {
    # Of 50 steps, how many are of each kind, the full one first; arrays (N, S, C) that are kept.
    "first-block:0.1": (["--skips", "20"], "30 in full, 20 of skipping step 1", 2),
    "pab": ([], "33 in full, 17 of skipping step 1", 4),
    "fastercache": ([], "24 in full, 13 of skipping step 1, 13 of skipping step 2", None),
    "taylorseer:5": ([], "13 in full, 37 of skipping step 1", None),
}


@pytest.mark.parametrize(
    ("cache", "more", "counts", "arrays"), [(k, *v) for k, v in CACHES.items()], ids=CACHES
)
@pytest.mark.slow_cases(but=["pab"])
def test_a_plan_of_a_cache_counts_its_steps_and_what_it_keeps(cache, more, counts, arrays):
    document = planned("step", *SIZE, "--cache", cache, *more)
    assert document["summary"]["steps"] == counts
    full, *skipping = document["programs"]
    assert all(program["flops"] < full["flops"] for program in skipping)
    kept = document["summary"]["kept_GiB"] * 2**30
    if arrays:
        assert kept == arrays * 2 * (16 + 3 * 2 * 4) * 128 * 4  # of the tokens of text and picture
    # Weights, inputs and kept arrays are alive while a step runs, read or not; results are written over them.
    assert {program["argument_bytes"] for program in skipping} == {full["argument_bytes"]}
    assert full["output_bytes"] < kept


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--cache", "first-block"], "give both or neither"),
        (["--cache", "pab", "--skips", "3"], "give both or neither"),
        (["--cache", "magcache"], "RATIOS.json"),
        (["--cache", "first-block", "--skips", "50"], "the first of which is computed"),
    ],
)
def test_a_cache_that_cannot_be_planned_is_one_line(more, words, refused):
    assert words in refused("plan", "--network", "step", *more)


def test_the_published_transformers_have_their_published_sizes(monkeypatch):
    monkeypatch.undo()
    sizes = {}
    for name, config in networks.TRANSFORMERS.items():
        network = networks.weightless_transformer(name, torch.bfloat16, config["num_layers"])
        assert all(parameter.device.type == "meta" for parameter in network.parameters())
        sizes[name] = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    assert sizes == pytest.approx({"2b": 1.69, "5b": 5.57, "1.5-5b": 5.57}, abs=0.01)


CHIP = chips.CHIPS["v6e"]


def program(layers, *, by_bytes=0):
    """Return a plan of so many layers: for each a second of kernels and one of links."""
    shares = {"other": 1.0 + 2.0 * layers, "kernels": 1.0 * layers}
    sums = {"all-reduce": 1.0 * layers}
    attention = programs.KernelTime(layers, 0.0, None, 1.0 * layers, by_bytes, 0)
    of_layers = {"kernel_times": {"attention": attention}, "collective_seconds": sums}
    return networks.ProgramPlan(
        "step", 1, 0, 0, sum(shares.values()), layers, shares, 0, 0, 0, 0, {}, 0, **of_layers
    )


def test_attention_and_collectives_are_those_of_all_layers():
    plan = networks._extrapolated_plan("step", [program(2), program(3)], 5, 7 * CHIP.flops, CHIP)
    assert (plan.by_schedule, plan.attention_seconds, plan.seconds) == (True, 5.0, 1 + 2 * 5 + 5)
    rows = networks.network_table(plan, CHIP)
    assert (rows["attention_counted"], rows["of_it_attention_s"]) == ("by schedule", 5.0)
    assert (rows["collectives_s"], rows["with_collectives_s"]) == (5.0, 16 + 5)
    assert dataclasses.replace(plan, attention_seconds=None).seconds is None


def test_attention_without_a_schedule_counts_at_the_peak_and_is_told():
    plan = networks._extrapolated_plan("step", [program(2), program(3, by_bytes=1)], 5, 7 * CHIP.flops, CHIP)
    assert (plan.attention_seconds, plan.seconds) == (7.0, 1 + 2 * 5 + 7)
    assert networks.network_table(plan, CHIP)["attention_counted"] == "at the chip's peak"


def test_what_each_layer_gives_and_takes_is_counted_for_all():
    few = [dataclasses.replace(program(n), output_bytes=10 * n, argument_bytes=100 * n) for n in (2, 3)]
    plan = networks._extrapolated_plan("step", few, 5, 0.0, CHIP)
    assert (plan.program.output_bytes, plan.program.argument_bytes) == (50, 500)


def test_a_size_that_no_patches_fit_is_refused():
    with pytest.raises(PlanError, match="multiples of 2"):
        networks.plan_step("5b", torch.float32, jax.devices("cpu"), None, frames=3, height=3, width=8)


@pytest.mark.slow
def test_a_training_step_is_planned_by_its_halves_with_what_the_optimizer_keeps(monkeypatch, capsys):
    monkeypatch.setitem(models.CONFIGS, "5b", {**reference.SMALL, **reference.TWO_SHALLOW_LEVELS})
    document = planned("train-step", "--frames", "1", "--height", "8", "--width", "8")
    assert "train-step" in capsys.readouterr().out
    encode, decode = document["programs"]
    assert (encode["name"], decode["name"]) == ("train encode", "train decode")
    weights = sum(4 * weight.numel() for weight in models.weightless_vae("5b", torch.float32).parameters())
    summary, gib = document["summary"], 2**30
    assert summary["optimizer_GiB"] * gib == pytest.approx(2 * weights)
    # Every weight has its gradient, and so has the input.
    assert weights < summary["gradients_GiB"] * gib < 1.1 * weights
    parts = ("weights_and_inputs_GiB", "temporaries_GiB_at_most", "gradients_GiB", "optimizer_GiB")
    assert summary["peak_memory_GiB_at_most"] == pytest.approx(sum(summary[part] for part in parts))
