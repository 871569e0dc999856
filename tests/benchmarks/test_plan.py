"""Plans of the VAE: for a real TPU topology, for a GPU that is not there, and for this machine's CPU."""

import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.pages import DEMO_MODEL, FORMAT
from benchmarks.plan import advice, chips, command, hlo, programs, requests, videos
from jax_kernels.attention.xla import cudnn_supports
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


VIDEO = "--frames 17 --height 512 --width 768"


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
    summary = {"floor_s": floor, "estimate_s": program["seconds"], "fits": True}
    assert document["summary"] == document["summary"] | summary
    assert document == document | {"topology": "v6e:1x1", "format": FORMAT, "counts": [1]}
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
    assert [program["name"] for program in theirs] == [program["name"] for program in ours]
    for got, want in zip(theirs, ours, strict=True):
        assert got["frames"] == want["frames"]
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

    def found(memory, *more):
        args = command.parsed([*f"--model {model_directory} --dtype float32".split(), *more, *VIDEO.split()])
        request = requests.requested(args)
        plans = [compiled(work, request.mesh) for work in request.works]
        return dict(advice.changes(args, request, memory, plans))

    whole = 512 * 768
    tiles, larger = found(weights + whole).items()
    height, width = map(int, tiles[0].split()[1].split("x"))
    assert tiles[1] == weights + 2 * height * width <= weights + whole
    assert larger == ("--topology v6e:1x2 --dp 1 --tp 2", weights + whole)
    assert (
        found(weights + whole // 2, "--topology", "v6e:1x2", "--dp", "2")["--topology v6e:2x2 --dp 2 --tp 2"]
        == weights + whole // 2
    )
    assert [*found(weights + whole, "--topology", "v5p:2x2x1")] == [tiles[0]], "not flat: no larger slice"
    # There is room for one latent pixel by two, which is no tile.
    assert found(weights + 2 * 4 * 8, "--topology", "v5p:2x2x1") == {}


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
        (["--cases", "network-prompt-v6e-1", "--dp", "2"], "got --dp: a case has its own options"),
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
