"""Plans of the VAE and of networks: for a TPU topology, for a GPU that is not there, and for this machine."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import ConsisIDTransformer3DModel

from benchmarks.__main__ import main
from benchmarks.pages import DEMO_MODEL, FORMAT
from benchmarks.plan import advice, chips, command, hlo, networks, programs, requests, videos
from cogvideox_torchax import make_mesh
from jax_kernels.attention.xla import cudnn_supports
from tests import reference, small_pipelines
from tests.processes import printed_by

pytestmark = pytest.mark.usefixtures("torchax_off")

HLO = """
HloModule jit__trace

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %z = bf16[8,8]{0,1} fusion(%y), kind=kLoop, calls=%fused.2, backend_config={"estimated_cycles":"3"}
  %g = (bf16[8,8], bf16[8,64]{1,0}) all-gather-start(%z), dimensions={1}
  %p = f32[4,4]{1,0} collective-permute(%z)
  %q = bf16[4,4]{1,0} collective-permute(%z)
  %n = () all-to-all()
}
"""


def test_collectives_are_counted_with_their_bytes_and_their_largest_result():
    gathered, permuted = 8 * 64 * 2, 4 * 4 * 4
    assert hlo.collectives(hlo.instructions(HLO)) == {
        "all-gather": hlo.Traffic(1, gathered, gathered),
        "collective-permute": hlo.Traffic(2, permuted + permuted // 2, permuted),
        "all-to-all": hlo.Traffic(1, 0, 0),
    }


def plan_of(words: str):
    """Return the plan that a command of these words writes into the current directory."""
    assert main(["plan", *words.split(), "-o", "plan.json"]) == 0
    return json.loads(Path("plan.json").read_text())


@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_plan_for_a_tpu_without_one():
    document = plan_of(f"--model {DEMO_MODEL} --frames 1 --height 16 --width 24 --encode --save-hlo hlo")
    (program,), chip = document["programs"], chips.CHIPS["v6e"]
    floor = max(program["flops"] / chip.flops, program["bytes_accessed"] / chip.bandwidth)
    # All arrays of so small a model are in VMEM, where the floor counts bytes and the estimate does not.
    assert program["floor_s"] == floor > 0 < program["seconds"] == sum(program["shares"].values())
    summary = document["summary"] | {"floor_s": floor, "estimate_s": program["seconds"], "fits": True}
    assert document == document | {
        **{"topology": "v6e:1x1", "format": FORMAT, "counts": [1]},
        "summary": summary,
    }
    assert "estimated_cycles" in Path("hlo/encode_first.hlo.txt").read_text()


@pytest.mark.slow
def test_two_processes_plan_at_once(monkeypatch):
    chips.topology_devices("v6e:1x1")  # libtpu is this process's from here on
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    printed_by("from benchmarks.plan import chips; chips.topology_devices('v6e:1x1')")


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_plan_for_this_machine(capsys):
    document = plan_of(f"--model {DEMO_MODEL} --frames 1 --height 40 --width 32 --platform cpu --tp 2 --json")
    assert json.loads(capsys.readouterr().out) == document
    (program,) = document["programs"]
    assert (document["summary"]["chunks"], document["counts"], program["flops"] > 0) == (1, [1], True)
    assert not document["summary"].keys() & {"floor_s", "estimate_s"}, "a CPU has no published peaks"
    assert "collective-permute" in program["collectives"]


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # diffusers' own, on JAX
@pytest.mark.parametrize(
    ("backend", "kind", "tp"),
    [
        ("torchax-stock", "encode", 1),
        ("torchax-stock", "decode", 1),
        ("flax", "encode", 1),
        ("flax", "decode", 2),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_directory")
def test_the_other_backends_are_planned_too(model_directory, backend, kind, tp):
    words = f"--model {model_directory} --platform cpu --dtype float32 --frames 9 --height 16 --width 16"
    more = f"{words} --tp {tp} {'--encode' * (kind == 'encode')} --backend"
    ours, theirs = (plan_of(f"{more} {name}")["programs"] for name in ("torchax", backend))
    assert [(each["name"], each["frames"]) for each in theirs] == [
        (each["name"], each["frames"]) for each in ours
    ]
    for got, want in zip(theirs, ours, strict=True):
        # Both builds run the same convolutions. On a CPU these filter by Winograd, which divides the products
        # of a plain convolution, as in the stock modules, by at most 2.25 on a plane.
        assert 0.99 < got["flops"] / want["flops"] < (2.25 if backend == "torchax-stock" else 1.01)
        assert got["argument_bytes"] == pytest.approx(want["argument_bytes"], rel=0.01)


def test_a_video_that_does_not_fit_is_told_what_fits(model_directory, monkeypatch):
    vae = videos.weightless_vae(str(model_directory), torch.float32)
    weights = videos.weight_bytes(vae.decoder)

    def compiled(work, mesh):
        """Take two bytes a pixel of the first chunk, one of a later one, split over the devices."""
        (_n, _c, _t, height, width), _dtype = work.structs.args[0]
        pixels = height * width * vae.spatial_compression_ratio**2
        return mock.Mock(peak_bytes=weights + (1 + (work.name == "first")) * pixels // mesh.size)

    slices = {"1x1": 1, "1x2": 2, "2x2": 4, "2x2x1": 4}
    monkeypatch.setattr(programs, "compile_program", compiled)
    monkeypatch.setattr(
        chips, "topology_devices", lambda name, **_: jax.devices()[: slices[name.partition(":")[2]]]
    )

    def found(memory, more=""):
        words = f"--model {model_directory} --dtype float32 --frames 17 --height 512 --width 768 {more}"
        args = command.parsed(words.split())
        request = requests.requested(args)
        plans = [compiled(work, request.mesh) for work in request.works]
        return dict(advice.changes(args, request, memory, plans))

    whole = 512 * 768
    tiles, larger = found(weights + whole).items()
    height, width = map(int, tiles[0].split()[1].split("x"))
    assert tiles[1] == weights + 2 * height * width <= weights + whole
    assert larger == ("--topology v6e:1x2 --dp 1 --tp 2", weights + whole)
    assert (
        found(weights + whole // 2, "--topology v6e:1x2 --dp 2")["--topology v6e:2x2 --dp 2 --tp 2"]
        == weights + whole // 2
    )
    assert [*found(weights + whole, "--topology v5p:2x2x1")] == [tiles[0]], "not flat: no larger slice"
    # There is room for one latent pixel by two, which is no tile.
    assert found(weights + 2 * 4 * 8, "--topology v5p:2x2x1") == {}


@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_gpu_that_is_not_there_is_planned_for_without_a_floor(monkeypatch):
    asked = mock.Mock(return_value=mock.Mock(devices=jax.devices("cpu")[:1]))
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", asked)
    monkeypatch.setattr(chips, "installed", lambda package: "1.0")
    # A GPU's compiler counts no work.
    compiled = mock.Mock(wraps=jax.jit(jnp.sin).lower(1.0).compile(), **{"cost_analysis.return_value": None})
    monkeypatch.setattr(programs, "compile_afresh", lambda lowered: compiled)
    summary = plan_of(f"--model {DEMO_MODEL} --topology l4 --frames 1 --height 16 --width 16")["summary"]
    assert "core_count: 58 fpus_per_core: 128 " in asked.call_args.kwargs["target_config"]
    assert summary.keys() & {"floor_s", "estimate_s", "not_counted", "fits"} == {"not_counted", "fits"}
    assert summary["memory_of_a_chip_GiB"] == 24e9 / 2**30 > summary["peak_memory_GiB"] > 0


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (
            "h100",
            "GPU needs its compiler, which is in jax-cuda13-pjrt: pip install --no-deps jax-",
        ),
        ("v6e:1x1", "TPU needs its compiler, which is in libtpu: pip install 'cogvideox-torchax[tpu]'"),
    ],
)
def test_a_compiler_that_is_not_installed_is_named(topology, words, monkeypatch, refused):
    monkeypatch.setattr(chips, "installed", {"jaxlib": "1", "jax-cuda13-plugin": "1"}.get)
    assert words in refused("plan", "--topology", topology, main=main)


@pytest.mark.parametrize(("capability", "channels"), [("9.0", 256), ("8.9", 128), ("7.5", 0)])
def test_attention_is_planned_as_the_gpu_chooses_it(monkeypatch, capability, channels):
    device = f"AbstractDevice(device_kind=l4, compute capability {capability}, num_cores=58, platform=gpu)"
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mock.Mock(abstract_device=device))
    taken = [n for n in (128, 256) if cudnn_supports(jnp.zeros((1, 2, 1, n), jnp.bfloat16))]
    assert max(taken, default=0) == channels


def test_a_hollow_model_has_shapes_and_no_weights():
    parameters = [*videos.weightless_vae("5b", torch.bfloat16).parameters()]
    assert sum(parameter.numel() for parameter in parameters) == 215_583_907
    assert {parameter.device.type for parameter in parameters} == {"meta"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v9:1x1"], "one of v5e, v5p, v6e, tpu7x"),
        (["--topology", "v6e:0x1"], "a grid, such as v6e:2x4"),
        (["--height", "100", "--platform", "cpu"], "multiples of 8"),
        (["--model", "./none"], "there is no model directory none"),
        (["--platform", "cpu", "--dp", "99"], "99"),
        (["--platform", "cpu", "--frames", "0"], "at least one is needed"),
        (["--platform", "cpu", "--tiling", "30x48"], "multiples of 8"),
        (["--platform", "cpu", "--tiling", "8x8"], "16 at least; 16x16 is near"),
        (["--platform", "cpu", "--tiling", "tiny"], "such as 240x360"),
        (["--network", "step", "--cache", "first-block"], "give both or neither"),
        (["--network", "step", "--cache", "pab", "--skips", "3"], "give both or neither"),
        (["--network", "step", "--cache", "magcache"], "RATIOS.json"),
        (
            ["--network", "step", "--cache", "first-block", "--skips", "50"],
            "the first of which is computed",
        ),
        (["--network", "train-step", "--encode"], "--encode does not go with --network train-step"),
        (["--network", "prompt", "--backend", "flax"], "--backend does not go with --network prompt"),
        (["--platform", "cpu", "--topology", "v9"], "--topology v9 does not go with --platform cpu"),
        (["--platform", "cpu", "--model", "5c"], "plan knows 2b, 5b, 1.5-5b"),
        (
            ["--platform", "cpu", "--model", str(DEMO_MODEL), "--network", "prompt"],
            "has no T5 text encoder: give a whole pipeline",
        ),
        (
            ["--platform", "cpu", "--model", str(DEMO_MODEL), "--network", "step"],
            "has no transformer: give a whole pipeline",
        ),
        (
            ["--platform", "cpu", "--network", "step", "--height", "72"],
            "16 at least; 64x720 is near",
        ),
        (["--platform", "cpu", "--network", "step", "--frames", "0"], "at least one is needed"),
        (["--network", "prompt", "--frames", "0"], "--frames does not go with --network prompt"),
        (["--parallel", "context"], "--parallel does not go with --network vae"),
        (["--pipeline", "5b", "--cache", "pab"], "--cache does not go with --network pipeline"),
        (["--pipeline", "5b", "--model", "2b"], "give one of them"),
        (["--cases", "no-such-case"], "got case no-such-case: one of plan-v6e-1-decode-torchax"),
        (["--cases", "network-step-5b-v6e-1", "--dp", "2"], "got --dp: a case has its own options"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(arguments, words, refused):
    assert words in refused("plan", *arguments, main=main)


@pytest.mark.parametrize("case", command.CASES)
def test_the_kept_plans_are_of_options_that_are_taken(case, monkeypatch):
    planned = mock.Mock()
    monkeypatch.setattr(command, "deliver", planned)
    assert main(["plan", "--cases", case]) == 0
    args = planned.call_args.args[0]
    assert (Path(args.output).name, args.no_advice, args.platform) == (f"{case}.json", True, "tpu")


def test_the_times_of_a_job_count_each_program_as_often_as_it_runs():
    chip = chips.TPU(flops=10.0, bandwidth=5.0, memory=6, host_link=1.0, clock=1.0, link=1.0)
    figures = (("", 1, 30.0, 5.0, 0, 5, 0, 0, {}, 0.0), ("", 1, 10.0, 20.0, 0, 7, 0, 0, {}, 0.0))
    plans = [programs.ProgramPlan(*each) for each in figures]
    timed = [
        programs.TimedPlan(
            *each, shares={"": 1.0}, compiler_moves_s=0, floor_s=0, collective_seconds={"": 0.5}
        )
        for each in figures
    ]
    on_chip, on_cpu = (
        requests.PlanRequest((), (2, 10), None, each, about={"chunks": 6}, job={}).figures(found)
        for each, found in ((chip, timed), (None, plans))
    )
    assert on_cpu == {"chunks": 6, "peak_memory_GiB": 7 / chips.GIB}
    assert on_chip == on_cpu | {
        **{"memory_of_a_chip_GiB": 6 / chips.GIB, "fits": False, "floor_s": 2 * 3.0 + 10 * 4.0},
        **{"estimate_s": 12.0, "collectives_s": 6.0, "with_collectives_s": 18.0},
    }


@pytest.mark.parametrize(("words", "counts"), [("49", (1, 5)), ("49 --tiling 32x32", (9, 45)), ("9", (1,))])
def test_the_first_chunk_runs_once_and_the_later_program_for_each_other_chunk_in_every_tile(words, counts):
    line = f"--platform cpu --model {DEMO_MODEL} --height 64 --width 64 --network vae --frames {words}"
    assert requests.requested(command.parsed(line.split())).counts == counts


# A step, a prompt, a whole pipeline and training, of small networks, on this machine's CPU


@pytest.fixture
def small_networks(monkeypatch, in_an_empty_directory):
    """Have the networks that are known by name be small."""
    transformer = small_pipelines.TRANSFORMER | {"use_rotary_positional_embeddings": True, "num_layers": 2}
    monkeypatch.setitem(networks.TRANSFORMERS, "5b", transformer)
    text = {"vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 64, "num_heads": 8, "num_layers": 3}
    monkeypatch.setattr(networks, "TEXT_ENCODER", networks.TEXT_ENCODER | text)


@pytest.mark.usefixtures("small_networks")
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


@pytest.mark.usefixtures("small_networks")
def test_a_plan_of_a_prompt_is_of_the_models_own_text_encoder(tmp_path):
    small_pipelines.text_encoder(num_layers=5).save_pretrained(tmp_path / "text_encoder")
    (tmp_path / "model_index.json").write_text("{}")
    work = networks.prompt_work(str(tmp_path), torch.float32, make_mesh(1, 1), tokens=16)
    assert work.about["network"] == "prompt, 5 layers"
    assert networks.weight_bytes(work) < 1e6, "its own width"


SIZE = "--frames 9 --height 32 --width 64"
ON_CPU = "--platform cpu --dtype float32"


@pytest.mark.usefixtures("small_networks")
def test_a_plan_on_the_command_line():
    found = plan_of(f"--network step {ON_CPU} {SIZE} --dp 2 --tp 4")
    assert found["summary"]["network"].startswith("step, 2 layers")
    assert found["summary"]["parallel"] == "context over tp, weights whole (tp=4 divides 8 heads)"
    assert found["programs"][0]["collectives"]["all-to-all"]["count"] > 0
    assert plan_of(f"--network prompt {ON_CPU}")["summary"]["network"].startswith("prompt, 3 layers")


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize(
    ("cache", "more", "counts", "arrays"),
    [
        # Of 50 steps, how many are of each kind, the full one first; arrays (N, S, C) that are kept.
        pytest.param(
            "first-block:0.1", "--skips 20", "30 in full, 20 of skipping step 1", 2, id="first-block:0.1"
        ),
        pytest.param("pab", "", "33 in full, 17 of skipping step 1", 2, id="pab"),
        pytest.param(
            "fastercache",
            "",
            "24 in full, 13 of skipping step 1, 13 of skipping step 2",
            None,
            id="fastercache",
        ),
        pytest.param("taylorseer:5", "", "13 in full, 37 of skipping step 1", None, id="taylorseer:5"),
    ],
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


def test_the_published_transformers_have_their_published_sizes():
    known = {name: networks.weightless_transformer(name, torch.bfloat16) for name in networks.TRANSFORMERS}
    sizes = {name: network.num_parameters() / 1e9 for name, network in known.items()}
    assert sizes == pytest.approx({"2b": 1.69, "5b": 5.57, "1.5-5b": 5.57}, abs=0.01)
    assert {network.device.type for network in known.values()} == {"meta"}


@pytest.mark.usefixtures("small_networks")
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


@pytest.mark.usefixtures("small_networks")
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


@pytest.mark.usefixtures("small_networks")
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


@pytest.mark.usefixtures("small_networks")
def test_weights_in_int8_are_planned_as_they_run():
    def of_networks(weights=""):
        args = command.parsed(f"--pipeline 5b --platform cpu {SIZE} {weights}".split())
        return [(networks.weight_bytes(work), work.flops) for work in requests.requested(args).works[:2]]

    whole, int8 = of_networks(), of_networks("--weights int8")
    for (whole_bytes, whole_flops), (int8_bytes, int8_flops) in zip(whole, int8, strict=True):
        assert 0.5 < int8_bytes / whole_bytes < 0.75, "half of bfloat16's, and embeddings, norms and scales"
        assert int8_flops == whole_flops


@pytest.mark.usefixtures("small_networks")
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
