"""Plans of a step, a prompt, a whole pipeline and of training, of small networks, on this machine's CPU."""

import functools
import json
import math
from dataclasses import replace

import jax
import pytest
import torch
from diffusers import ConsisIDTransformer3DModel

from benchmarks.__main__ import main
from benchmarks.plan import chips, command, networks, programs, requests, videos
from cogvideox_torchax import make_mesh
from tests import reference, small_pipelines
from tests.benchmarks.test_plan import plan_of

pytestmark = pytest.mark.usefixtures("torchax_off")

SMALL = {**small_pipelines.TRANSFORMER, "use_rotary_positional_embeddings": True, "num_layers": 2}
SMALL_TEXT = {"vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 64, "num_heads": 8, "num_layers": 3}


@pytest.fixture(autouse=True)
def _small(monkeypatch, in_an_empty_directory):
    monkeypatch.setitem(networks.TRANSFORMERS, "5b", SMALL)
    monkeypatch.setattr(networks, "TEXT_ENCODER", networks.TEXT_ENCODER | SMALL_TEXT)


def test_a_step_is_planned_whole_with_the_work_that_pytorch_counts():
    work = networks.step_work("5b", torch.float32, make_mesh(1, 2), None, frames=3, height=4, width=8)
    plan = programs.compile_program(work, make_mesh(1, 2))
    weights = networks.weightless_transformer("5b", torch.float32).num_parameters()
    assert work.about["network"] == "step, 2 layers"
    assert plan.argument_bytes == pytest.approx(4 * weights, rel=0.05)  # all layers' weights, and inputs
    # Of two passes through all layers: 2 FLOPs for each weight of a matrix and each token, and attention's.
    assert 2 * work.flops == pytest.approx(2 * 2 * (16 + 3 * 2 * 4) * weights, rel=0.3)
    assert plan.flops >= work.flops


def test_kernels_whose_work_the_compiler_does_not_see_are_counted_by_pytorch():
    compiled = jax.jit(jax.numpy.sin).lower(1.0).compile()
    assert programs.read_program(programs.Work("step", 1, None, None, flops=5.0), compiled, 0.0).flops == 5.0


def test_a_plan_of_a_prompt_is_of_the_models_own_text_encoder(tmp_path):
    small_pipelines.text_encoder(num_layers=5).save_pretrained(tmp_path / "text_encoder")
    (tmp_path / "model_index.json").write_text("{}")
    work = networks.prompt_work(str(tmp_path), torch.float32, make_mesh(1, 1), tokens=16)
    assert work.about["network"] == "prompt, 5 layers"
    assert networks.weight_bytes(work) < 1e6, "its own width"


SIZE = "--frames 9 --height 32 --width 64"
ON_CPU = "--platform cpu --dtype float32"


def test_a_plan_on_the_command_line():
    found = plan_of(f"--network step {ON_CPU} {SIZE} --dp 2 --tp 4")
    assert found["summary"]["network"].startswith("step, 2 layers")
    assert found["summary"]["parallel"] == "context over tp, weights whole (tp=4 divides 8 heads)"
    assert found["programs"][0]["collectives"]["all-to-all"]["count"] > 0
    assert plan_of(f"--network prompt {ON_CPU}")["summary"]["network"].startswith("prompt, 3 layers")


CACHES = {
    # Of 50 steps, how many are of each kind, the full one first; arrays (N, S, C) that are kept.
    "first-block:0.1": ("--skips 20", "30 in full, 20 of skipping step 1", 2),
    "pab": ("", "33 in full, 17 of skipping step 1", 2),
    "fastercache": ("", "24 in full, 13 of skipping step 1, 13 of skipping step 2", None),
    "taylorseer:5": ("", "13 in full, 37 of skipping step 1", None),
}


@pytest.mark.parametrize(
    ("cache", "more", "counts", "arrays"), [(k, *v) for k, v in CACHES.items()], ids=CACHES
)
@pytest.mark.slow_cases(but=["pab"])
def test_a_plan_of_a_cache_counts_its_steps_and_what_it_keeps(cache, more, counts, arrays):
    document = plan_of(f"--network step {ON_CPU} {SIZE} --cache {cache} {more}")
    assert document["summary"]["steps"] == counts
    full, *skipping = document["programs"]
    assert all(program["flops"] < full["flops"] for program in skipping)
    kept = document["summary"]["kept_GiB"] * 2**30
    if arrays:
        assert kept == arrays * 2 * (16 + 3 * 2 * 4) * 128 * 4  # of the tokens of text and picture
    # Weights, inputs and kept arrays are alive while a step runs, read or not; results are written over them.
    assert {program["argument_bytes"] for program in skipping} == {full["argument_bytes"]}
    assert full["output_bytes"] < kept


def test_the_published_transformers_have_their_published_sizes(monkeypatch):
    monkeypatch.undo()
    known = {name: networks.weightless_transformer(name, torch.bfloat16) for name in networks.TRANSFORMERS}
    sizes = {name: network.num_parameters() / 1e9 for name, network in known.items()}
    assert sizes == pytest.approx({"2b": 1.69, "5b": 5.57, "1.5-5b": 5.57}, abs=0.01)
    assert {network.device.type for network in known.values()} == {"meta"}


def test_a_step_of_an_unknown_transformer_costs_what_the_known_one_of_its_sizes_costs(tmp_path):
    """Its class is named by the pipeline's index; its attention is the kernel too."""
    known = small_pipelines.transformer("5b", num_layers=1)
    ConsisIDTransformer3DModel.from_config({**known.config}).save_pretrained(tmp_path / "transformer")
    index = {"_class_name": "ConsisIDPipeline", "transformer": ["diffusers", "ConsisIDTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    known.save_pretrained(tmp_path / "known" / "transformer")

    def work_of(directory, **cache):
        about = (torch.bfloat16, make_mesh(1, 1, devices=jax.devices()[:1]), None)
        return networks.step_work(str(directory), *about, frames=3, height=4, width=8, **cache)

    unknown, known = work_of(tmp_path), work_of(tmp_path / "known")
    assert unknown.flops == pytest.approx(known.flops, rel=0.1)
    assert unknown.about["parallel"] == "batch over dp, weights whole, tokens not split"
    with pytest.raises(chips.PlanError, match="got --cache for a ConsisIDTransformer3DModel"):
        work_of(tmp_path, cache="pab")
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["not_there", "Some"]}))
    with pytest.raises(
        chips.PlanError, match="a transformer of class Some, which cannot be imported from not_there"
    ):
        work_of(tmp_path)


@pytest.fixture(scope="module")
def whole_plan(tmp_path_factory):
    """Save a pipeline; return a function that plans it for chips of so many bytes: CPUs are its slices."""
    directory = tmp_path_factory.mktemp("pipeline")
    small_pipelines.one_layer().save_pretrained(directory)
    options = f"--pipeline {directory} --dtype float32 {SIZE} -o {directory / 'plan.json'}"

    def devices_of(slice_name, **_):
        # A larger slice than there are CPUs takes them twice: nothing is compiled for it.
        return (2 * jax.devices())[: math.prod(map(int, slice_name[4:].split("x")))]

    compiled, compile_program = {}, programs.compile_program

    def compile_once(work, mesh, chip=None):
        """Compile a program for one device; on a mesh each device has a share of its temporaries."""
        if work.name not in compiled:
            compiled[work.name] = compile_program(work, mesh)
        return replace(compiled[work.name], temp_bytes=compiled[work.name].temp_bytes // mesh.size)

    @functools.cache
    def whole_plan(memory, *more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chips, "topology_devices", devices_of)
            patch.setattr(programs, "compile_program", compile_once)
            patch.setitem(chips.CHIPS, "v6e", chips.Chip(1e12, 1e12, memory, 1e9))
            assert main(["plan", *options.split(), *more]) == 0
        return json.loads((directory / "plan.json").read_text())

    return whole_plan


def test_a_whole_pipeline_is_planned_with_all_its_weights_beside_each_program(whole_plan):
    found, pipe = whole_plan(2**40), small_pipelines.one_layer()
    summary = found["summary"]
    assert [each["name"] for each in found["programs"]] == ["prompt", "step", "first", "later"]
    assert found["counts"] == [2, 50, 1, 1]
    assert (summary["fits"], "would_fit" in summary) == (True, False)
    text, transformer, vae, decoder = (
        sum(4 * weight.numel() for weight in network.parameters())
        for network in (pipe.text_encoder, pipe.transformer, pipe.vae, pipe.vae.decoder)
    )
    sizes = {"text_encoder_GiB": text, "transformer_GiB": transformer, "vae_GiB": vae}
    assert {name: summary[name] * 2**30 for name in sizes} == sizes
    prompt, step, *chunks = (plan["peak_bytes"] for plan in found["programs"])
    beside = max(prompt - text, step - transformer, max(chunks) - decoder)
    assert summary["peak_memory_GiB"] * 2**30 == text + transformer + vae + beside
    assert summary["offload_peak_GiB"] * 2**30 == max(prompt, step, max(chunks) + vae - decoder)
    assert summary["offload_moving_s"] == 2 * sum(sizes.values()) / 1e9, "there and back, over 1 GB/s"


def test_a_pipeline_that_does_not_fit_is_told_what_fits(whole_plan):
    summary = whole_plan(2**40)["summary"]
    text, peak = (summary[name] * 2**30 for name in ("text_encoder_GiB", "peak_memory_GiB"))
    found = whole_plan(peak - 1)["summary"]
    assert not found["fits"]
    *_, mesh = found["would_fit"]
    again = whole_plan(peak - 1, *mesh.split())["summary"]
    assert found["would_fit"] == {
        "--offload": found["offload_peak_GiB"],
        "the prompt encoded on the host": pytest.approx((peak - text) / 2**30),
        mesh: again["peak_memory_GiB"],
    }
    assert again["fits"]
    assert whole_plan(peak - 1, "--offload")["summary"]["fits"]
    assert "would_fit" not in whole_plan(peak - 1, "--no-advice")["summary"]
    one_host = ("--topology", "v6e:2x4", "--dp", "2", "--tp", "4")
    peak = whole_plan(2**40, *one_host)["summary"]["peak_memory_GiB"] * 2**30
    assert "--topology v6e:4x4 --dp 2 --tp 8" in whole_plan(peak - 1, *one_host)["summary"]["would_fit"]


def test_weights_in_int8_are_planned_as_they_run():
    def of_networks(weights=""):
        args = command.parsed(f"--pipeline 5b --platform cpu {SIZE} {weights}".split())
        return [(networks.weight_bytes(work), work.flops) for work in requests.requested(args).works[:2]]

    whole, int8 = of_networks(), of_networks("--weights int8")
    for (whole_bytes, whole_flops), (int8_bytes, int8_flops) in zip(whole, int8, strict=True):
        assert 0.5 < int8_bytes / whole_bytes < 0.75, "half of bfloat16's, and embeddings, norms and scales"
        assert int8_flops == whole_flops


@pytest.mark.slow
def test_a_training_step_takes_both_gradients_and_what_the_optimizer_keeps(monkeypatch):
    monkeypatch.setitem(videos.CONFIGS, "5b", {**reference.SMALL, **reference.TWO_SHALLOW_LEVELS})
    found = plan_of(f"--network train-step {ON_CPU} --frames 1 --height 8 --width 8")
    assert [program["name"] for program in found["programs"]] == ["train encode", "train decode"]
    weights = videos.weight_bytes(videos.weightless_vae("5b", torch.float32))
    summary = {name: size * 2**30 for name, size in found["summary"].items() if "GiB" in name}
    assert summary["optimizer_GiB"] == pytest.approx(2 * weights), "two float32 moments of each weight"
    # Every weight has its gradient, and so has the input.
    assert weights < summary["gradients_GiB"] < 1.1 * weights
    parts = ("weights_and_inputs_GiB", "temporaries_GiB_at_most", "gradients_GiB", "optimizer_GiB")
    assert summary["peak_memory_GiB"] == pytest.approx(sum(summary[part] for part in parts))
