"""The plan of a small model: for a real TPU topology, and for this machine's CPU."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import topologies

from cogvideox_torchax import cli, make_mesh
from cogvideox_torchax.cli import planning
from cogvideox_torchax.cli.common import DEMO_MODEL
from cogvideox_torchax.plan import chips, jobs, programs
from cogvideox_torchax.plan.hlo import Traffic, collectives, instructions
from cogvideox_torchax.vae.directions import DECODE, Direction
from jax_kernels.attention.xla import cudnn_supports
from tests import reference

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
    assert collectives(instructions(HLO)) == {
        "all-gather": Traffic(1, gathered, gathered),
        "collective-permute": Traffic(2, permuted + permuted // 2, permuted),
        "all-to-all": Traffic(1, 0, 0),
    }


def plan_of(*arguments: object):
    """Return the plan that a command writes into the current directory."""
    assert cli.main(["plan", *map(str, arguments), "-o", "plan.json"]) == 0
    return json.loads(Path("plan.json").read_text())


@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_plan_for_a_tpu_without_one(capsys):
    arguments = ("--model", DEMO_MODEL, "--frames", 1, "--height", 16, "--width", 24)
    document = plan_of(*arguments, "--encode", "--save-hlo", "hlo")
    (program,) = document["programs"]
    chip = chips.CHIPS["v6e"]
    floor = max(program["flops"] / chip.flops, program["bytes_accessed"] / chip.bandwidth)
    assert document["summary"]["floor_s"] == floor > 0
    assert program["argument_bytes"] > 0
    assert "for times: python -m benchmarks estimate" in capsys.readouterr().err
    assert document == document | {"topology": "v6e:1x1", "format": jobs.FORMAT}
    assert document["summary"]["fits"] is True
    assert "estimated_cycles" in Path("hlo/encode_first.hlo.txt").read_text()


def test_two_processes_plan_at_once():
    chips.topology_devices("v6e:1x1")  # libtpu is this process's from here on
    environment = {name: value for name, value in os.environ.items() if name != "ALLOW_MULTIPLE_LIBTPU_LOAD"}
    other = "from cogvideox_torchax.plan import chips; chips.topology_devices('v6e:1x1')"
    subprocess.run([sys.executable, "-c", other], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.slow_cases("2")
@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_plan_for_this_machine(capsys, tp):
    arguments = ("--model", DEMO_MODEL, "--frames", 1, "--height", 40, "--width", 32)
    document = plan_of(*arguments, "--platform", "cpu", "--tp", tp, "--json")
    assert json.loads(capsys.readouterr().out) == document
    (program,) = document["programs"]
    assert (document["summary"]["chunks"], document["counts"], program["flops"] > 0) == (1, [1], True)
    assert "floor_s" not in document["summary"], "a CPU has no published peaks"
    assert ("collective-permute" in program["collectives"]) == (tp == 2)


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
@pytest.mark.slow_cases(but=["flax-encode-1"])
def test_the_other_backends_are_planned_too(tmp_path, backend, kind, tp):
    reference.small_vae().save_pretrained(tmp_path)
    vae = jobs.weightless_vae(str(tmp_path), torch.float32)
    job = jobs.Job(Direction(kind), 9, 16, 16)
    ours, theirs = (
        list(jobs.plan_programs(vae, job, jax.devices("cpu"), tp=tp, backend=name))
        for name in ("torchax", backend)
    )
    assert [program.name for program in theirs] == [program.name for program in ours]
    for got, want in zip(theirs, ours, strict=True):
        assert got.frames == want.frames
        # Both builds run the same convolutions. On a CPU these filter by Winograd, which divides the products
        # of a plain convolution, as in the stock modules, by at most 2.25 on a plane.
        most = 2.25 if backend == "torchax-stock" else 1.01
        assert 0.99 < got.flops / want.flops < most
        assert got.argument_bytes == pytest.approx(want.argument_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_plan_in_tiles_compiles_one_tile(model_directory):
    arguments = ("--model", model_directory, "--frames", 1, "--platform", "cpu")
    tile = plan_of(*arguments, "--height", 64, "--width", 96, "--tiling", "32x48")
    alone = plan_of(*arguments, "--height", 32, "--width", 48)
    assert tile["programs"][0]["flops"] == alone["programs"][0]["flops"]
    # Steps of int(4 * 5 / 6) = 3 of 8 rows and int(6 * 4 / 5) = 4 of 12 columns, in latent pixels.
    assert (tile["summary"]["tiles"], alone["summary"]["tiles"]) == (9, 1)


def test_what_fits_is_said_by_the_largest_of_its_programs(model_directory, monkeypatch):
    vae = jobs.weightless_vae(str(model_directory), torch.float32)
    weights = sum(value.numel() * value.element_size() for value in vae.decoder.parameters())

    def planned(vae, job, devices, *, dp=1, tp=1):
        make_mesh(dp, tp, devices=devices)  # raises if the slice has too few chips
        height, width = job.tile or (job.height, job.width)
        sizes = [2 * height * width // tp, height * width // tp]
        yield from (SimpleNamespace(peak_bytes=weights + size) for size in sizes)

    slices = {"v6e:1x2": jax.devices()[:2], "v6e:2x2": jax.devices()[:4]}
    monkeypatch.setattr(jobs, "plan_programs", planned)
    monkeypatch.setattr(jobs, "topology_devices", slices.get)
    monkeypatch.setitem(chips.CHIPS, "v6e", chip := chips.Chip(1e12, 1e12, weights + 512 * 768, 1e9))
    job, peak = jobs.Job(DECODE, 17, 512, 768), weights + 2 * 512 * 768
    tiled = jobs.largest_tile_that_fits(vae, job, jax.devices()[:1], chip, peak)
    assert tiled is not None
    height, width = map(int, tiled.what.split()[1].split("x"))
    assert tiled.peak_bytes == weights + 2 * height * width <= chip.memory
    tiny = chips.Chip(1e12, 1e12, weights + 2 * 4 * 8, 1e9)  # room for one latent pixel by two, no tile
    assert jobs.largest_tile_that_fits(vae, job, jax.devices()[:1], tiny, peak) is None
    larger = functools.partial(jobs.smallest_mesh_that_fits, str(model_directory), torch.float32, job)
    assert larger("v6e:1x1", 1, peak) == jobs.Change("--topology v6e:1x2 --tp 2", weights + 512 * 768)
    assert larger("v6e:1x2", 1, peak, dp=2) == jobs.Change("--topology v6e:2x2 --tp 2", weights + 512 * 768)
    assert larger("v5p:2x2x1", 1, peak) is None  # comes in other grids


@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_gpu_that_is_not_there_is_planned_for_without_a_floor(monkeypatch):
    asked = mock.Mock(return_value=mock.Mock(devices=jax.devices("cpu")[:1]))
    monkeypatch.setattr(topologies, "get_topology_desc", asked)
    compile_afresh = programs.compile_afresh
    uncounted = {"cost_analysis.return_value": None}  # a GPU's compiler counts no work
    monkeypatch.setattr(
        programs, "compile_afresh", lambda lowered: mock.Mock(wraps=compile_afresh(lowered), **uncounted)
    )
    size = ("--frames", 1, "--height", 16, "--width", 16)
    summary = plan_of("--model", DEMO_MODEL, "--topology", "l4", *size)["summary"]
    assert "core_count: 58 fpus_per_core: 128 " in asked.call_args.kwargs["target_config"]
    assert summary.keys() & {"floor_s", "not_counted", "fits"} == {"not_counted", "fits"}
    assert summary["memory_of_a_chip_GiB"] == 24e9 / 2**30 > summary["peak_memory_GiB"] > 0


@pytest.mark.parametrize(("capability", "channels"), [("9.0", 256), ("8.9", 128), ("7.5", 0)])
def test_attention_is_planned_as_the_gpu_chooses_it(monkeypatch, capability, channels):
    device = f"AbstractDevice(device_kind=l4, compute capability {capability}, num_cores=58, platform=gpu)"
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mock.Mock(abstract_device=device))
    taken = [n for n in (128, 256) if cudnn_supports(jnp.zeros((1, 2, 1, n), jnp.bfloat16))]
    assert max(taken, default=0) == channels


def test_a_hollow_model_has_shapes_and_no_weights():
    vae = jobs.weightless_vae("5b", torch.bfloat16)
    assert sum(parameter.numel() for parameter in vae.parameters()) == 215_583_907
    assert all(parameter.device.type == "meta" for parameter in vae.parameters())
    assert jobs.weightless_vae("1.5-5b", torch.bfloat16).config["invert_scale_latents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v9:1x1"], "one of v5e, v5p, v6e, tpu7x"),
        (["--topology", "v6e"], "a grid, such as v6e:2x4"),
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
        (["--network", "step", "--save-hlo", "hlo"], "--save-hlo does not go with --network step"),
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
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(arguments, words, refused):
    assert words in refused("plan", *arguments)


def test_the_floor_of_a_job_counts_each_program_as_often_as_it_runs():
    chip = chips.Chip(flops=10.0, bandwidth=5.0, memory=6, host_link=1.0)
    first, later = (
        programs.ProgramPlan("", 1, flops, moved, 0, size, 0, 0, {}, 0.0)
        for flops, moved, size in ((30.0, 5.0, 5), (10.0, 20.0, 7))
    )
    on_chip, on_cpu = (
        planning.PlanRequest((), (2, 10), None, each, about={"chunks": 6}, job={}).figures([first, later])
        for each in (chip, None)
    )
    wanted = {"floor_s": 2 * 3.0 + 10 * 4.0, "peak_memory_GiB": 7 / chips.GIB, "fits": False, "chunks": 6}
    assert on_chip == on_chip | wanted
    assert "fits" not in on_cpu


@pytest.mark.parametrize(("words", "counts"), [("49", (1, 5)), ("49 --tiling 32x32", (9, 45)), ("9", (1,))])
def test_the_first_chunk_runs_once_and_the_later_program_for_each_other_chunk_in_every_tile(words, counts):
    line = f"plan --platform cpu --model {DEMO_MODEL} --height 64 --width 64 --network vae --frames {words}"
    assert planning.requested(cli.parser().parse_args(line.split())).counts == counts
