"""bench device: one real run at the smallest sizes, and what it does when something goes wrong."""

import json
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_kernels
from benchmarks import report as drawn
from cogvideox_torchax import cli
from cogvideox_torchax.bench import device, ladder, measure, ops, report, tasks, worker
from cogvideox_torchax.bench.ladder import Size
from cogvideox_torchax.cli import doctor
from cogvideox_torchax.plan import chips, networks
from jax_kernels.common.tiles import SWITCH
from tests import reference

CPU = {
    "platform": "cpu",
    "kind": "cpu",
    "count": 1,
    "used": 1,
    "coordinates": [[0, 0, 0]],
    "torch": "cpu",
}
CHECK = {"passed": True, "relative_error": 1e-6, "rms_error": 1e-7}
PART = {
    "part": "group_norm",
    "lower_s": 0.1,
    "compile_s": 0.5,
    "median_s": 0.02,
    "min_s": 0.01,
    "max_s": 0.03,
    "runs": 20,
    "peak_bytes": None,
}
GOOD = {"whole": {"median_s": 0.02}, "status": "ok", "check": CHECK, "parts": [PART]}


MADE = {
    **report.about(),
    "device": CPU,
    "dtype": "float32",
    "mesh": {"dp": None, "tp": None},
}


def options(**changed):
    return device.DeviceOptions(**{"small": "none", "jobs": ("kernels",), **changed})


def run(monkeypatch, answer, before=None, **changed):
    """Run with calls of `answer(request, environment)` for measurements, and of what they ask for else."""
    started = []

    def ask(self, do, request, environment):
        started.append((do, environment))
        if do == "probe":
            return {"status": "ok", **CPU}
        if do == "reference" and changed.get("small") is None:
            return {"status": "ok", "rms": 0.0}
        return json.loads(json.dumps(answer(do, request, environment)))

    monkeypatch.setattr(worker.Worker, "ask", ask)
    return device.run(options(**changed), lambda line: None, before=before), started


def switches(started):
    """Return the switch of Pallas kernels in each measurement's environment."""
    return [environment.get(SWITCH) for do, environment in started if do == "measure"]


def kernels(found):
    return {result["job"].removeprefix("kernels "): result["status"] for result in found["results"]}


@pytest.fixture
def tiny(monkeypatch, tmp_path_factory):
    """Take the smallest of everything; return the directory of its VAE."""
    directory = tmp_path_factory.mktemp("vae")
    reference.small_vae(**reference.SHALLOW).save_pretrained(directory)
    for name, row in ladder.JOBS.items():
        size = Size("small", 17, 8, 8) if name in ("decode", "encode") else Size("small", 5, 16, 16)
        size = Size("small", 1, 8, 8) if name == "still" else size
        monkeypatch.setitem(ladder.JOBS, name, replace(row, small=size))
    return str(directory)


def in_this_process(do, request, environment, monkeypatch):
    """As a worker answers, of two runs."""
    few = {"warmups": 1, "runs": 2, "fewest": 2} if do == "measure" else {}
    with monkeypatch.context() as patch:
        patch.setenv(SWITCH, environment.get(SWITCH, "on"))
        return json.loads(json.dumps(worker.answer(do, request | few)))


BY_ALL = ("torchax", "torchax-stock", "flax", "torch")
BY_PIPELINES = ("torchax", "torchax-stock", "torch")
PARTS = {
    "kernels group_norm": {"torchax": ["group_norm"]},
    "kernels attention": {"torchax": ["attention"]},
    "decode": {way: ["first", "later"] for way in BY_ALL},
    "encode": {way: ["first", "later"] for way in BY_ALL},
    "still": {way: ["first"] for way in BY_ALL},
    "train": {way: ["train encode", "train decode"] for way in ("torchax", "torch")},
    "step": {way: ["step"] for way in BY_PIPELINES},
    "prompt": {way: ["prompt"] for way in BY_PIPELINES},
}
"""What a CPU measures: of each job, by each way, these parts."""
FEW = ["kernels", "prompt"]


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("jobs", [FEW, [job for job in ladder.JOBS if job not in FEW]], ids=["few", "others"])
@pytest.mark.slow_cases("others")
def test_a_run_measures_its_jobs_by_the_port_and_its_peers(jobs, tiny, monkeypatch, tmp_path, capsys):
    """A kernel of the few in a process of its own; all else in this one, which has imported everything."""
    started, alone = [], worker.Worker.ask

    def ask(self, do, request, environment):
        started.append(do)
        if request.get("job") == "kernels group_norm":
            return alone(self, do, request, environment)
        return in_this_process(do, request, environment, monkeypatch)

    monkeypatch.setattr(worker.Worker, "ask", ask)
    monkeypatch.setattr(ladder, "KERNELS", ("group_norm", "attention"))
    monkeypatch.setattr(cli.common, "DEMO_MODEL", tiny)
    arguments = ["bench", "device", "--jobs", *jobs, "-o", str(tmp_path), "--quiet", "--json"]
    assert cli.main(arguments) == 0, capsys.readouterr()
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "device.json").read_text())
    wanted = {job: ways for job, ways in PARTS.items() if job.split()[0] in jobs}
    measured = {}
    for result in found["results"]:
        parts = [part["part"] for part in result["parts"]]
        measured.setdefault(result["job"], {})[result["way"]] = parts
        assert result["check"]["passed"]
        assert all(part["runs"] >= 2 and part["median_s"] > 0 for part in result["parts"])
    assert measured == wanted
    assert "plan knows TPU v5 lite" in found["not_planned"]
    text = (tmp_path / "device.md").read_text()
    rows = sum(len(parts) for ways in wanted.values() for parts in ways.values())
    assert text.count("\n| ") == 2 + rows
    assert str(tmp_path) not in (tmp_path / "device.json").read_text() + text
    count = len(started)
    assert cli.main(arguments) == 0  # all of it is there: the devices alone are looked at
    assert len(started) == count + 1


def broken(name, how):
    """Return an op whose kernel does something else than XLA."""
    whole = getattr(jax_kernels, name)

    def op(*operands, **options):
        from jax_kernels.common.tiles import pallas_mode

        found = whole(*operands, **options)
        return found if pallas_mode(name) == "off" else how(found)

    op.__module__ = whole.__module__
    return op


def refused(found):
    raise RuntimeError("Mosaic failed to compile TPU kernel: /home/somebody/kernels/tpu.py: not implemented")


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        (refused, "failed", "Mosaic failed to compile TPU kernel: tpu.py: not implemented"),
        (lambda found: found * float("nan"), "wrong", "'relative_error': 'nan'"),
    ],
    ids=["raises", "gives NaN"],
)
def test_a_broken_kernel_is_named_and_off_for_what_comes_after_it(tiny, monkeypatch, how, status, words):
    monkeypatch.setattr(jax_kernels, "group_norm", broken("group_norm", how))
    monkeypatch.setattr(ladder, "KERNELS", ("group_norm", "attention"))

    def answer(do, request, environment):
        return in_this_process(do, request, environment, monkeypatch)

    found, started = run(monkeypatch, answer, small=tiny)
    assert kernels(found) == {"group_norm": status, "attention": "ok"}
    reason = found["switched_off"]["group_norm"]
    assert words in reason
    assert switches(started) == [None, "off:group_norm"]
    assert f"Kernel of group_norm switched off: {reason}." in report.markdown(found)


def test_a_kernel_that_breaks_a_whole_job_is_found_there(monkeypatch):
    monkeypatch.setitem(CPU, "platform", "tpu")

    def answer(do, request, environment):
        if environment.get(SWITCH, "") not in ("off", "off:upsample"):
            return {"status": "wrong", "check": {**CHECK, "passed": False}}
        return GOOD

    found, started = run(monkeypatch, answer, jobs=("decode", "encode"))
    assert [result["status"] for result in found["results"]] == ["ok"] * 10
    assert list(found["switched_off"]) == ["upsample"]
    first, second, *others = switches(started)
    assert (first, second, {*others}) == (None, "off:norm_conv3d", {"off", "off:upsample"})


def test_a_job_out_of_memory_falls_to_the_next_smaller(monkeypatch):
    sizes = Size("5b", 49, 480, 720), Size("small", 4, 32, 64)
    monkeypatch.setattr(ladder, "sizes", lambda job, on_cpu: sizes)
    monkeypatch.setattr(ladder, "KERNELS", ("attention",))

    def answer(do, request, environment):
        if request["size"][0] == "5b":
            return worker.failure(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
        return GOOD

    found, _ = run(monkeypatch, answer)
    (result,) = found["results"]
    assert (result["status"], result["size"]["model"], found["switched_off"]) == ("ok", "small", {})


QUICK = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    found = {good}
    if asked["do"] == "probe":
        found = {probe}
    if asked["do"] == "reference":
        found = {{"status": "ok", "rms": 0.0}}
    elif asked["request"].get("job", "").endswith("attention"):
        time.sleep(60)
    print(json.dumps(found), flush=True)
"""


def test_a_job_that_hangs_ends_at_the_limit_and_the_rest_goes_on(monkeypatch):
    script = QUICK.format(probe={"status": "ok", **CPU}, good=GOOD)
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, "-S", "-c", script))
    monkeypatch.setattr(ladder, "KERNELS", ("group_norm", "attention", "qk_norm_rope"))
    found = device.run(options(limit=2.0), lambda line: None)
    assert kernels(found) == {"group_norm": "ok", "attention": "failed", "qk_norm_rope": "ok"}
    assert found["switched_off"] == {"attention": "not done after 2 s"}


@pytest.mark.usefixtures("torchax_off")
def test_an_interrupted_run_goes_on_where_it_was(monkeypatch, tmp_path, capsys, refused):
    file, interrupted = tmp_path / "device.json", []
    answers = {"probe": {"status": "ok", **CPU}, "reference": {"status": "ok", "rms": 0.0}}

    def ask(self, do, request, environment):
        if request.get("job") == "kernels attention" and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return json.loads(json.dumps(answers.get(do, GOOD)))

    monkeypatch.setattr(worker.Worker, "ask", ask)
    monkeypatch.setattr(ladder, "KERNELS", ("group_norm", "attention", "qk_norm_rope"))
    command = ["bench", "device", "--jobs", "kernels", "--quiet", "--json", "-o", str(tmp_path)]
    assert cli.main(command) == cli.INTERRUPTED
    kept = json.loads(file.read_text())
    assert kernels(kept) == {"group_norm": "ok"}
    kept["results"][0]["check"]["relative_error"] = 0.125  # by which it is known
    file.write_text(json.dumps(kept))
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert kernels(found) == dict.fromkeys(ladder.KERNELS, "ok")
    assert found["results"][0]["check"]["relative_error"] == 0.125
    file.write_text(json.dumps(found | {"commit": "another"}))
    assert "holds results of another commit" in refused(*command)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "abacus"], "got device 'abacus': one of tpu, cuda, cpu"),
        (["--jobs", "sing"], "got job 'sing': one of kernels, decode"),
        (["--tp", "99"], "got a mesh of dp=1 x tp=99, 99 devices, where there are 8"),
    ],
    ids=["device", "job", "mesh"],
)
def test_what_there_is_not_is_one_line(monkeypatch, arguments, words, refused):
    monkeypatch.setattr(worker.Worker, "ask", lambda self, do, request, _: worker.answer(do, request))
    assert words in refused("bench", "device", "--quiet", *arguments)


def test_without_libtpu_one_line_stands_for_all_estimates(monkeypatch):
    monkeypatch.setitem(CPU, "kind", "TPU v6 lite")
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ladder, "KERNELS", ("group_norm", "attention"))
    found, _ = run(monkeypatch, lambda *_: GOOD)
    lines = [line for line in report.markdown(found).splitlines() if "planned" in line]
    assert lines == [f"Not planned: {found['not_planned']}."]
    assert "planning for a TPU needs its compiler" in lines[0]
    assert f"commit {'a' * 12}+, " in report.markdown(found | {"commit": "a" * 40 + "+"})


def test_plan_estimates_the_parts_of_a_job_without_a_device():
    small = ladder.row("kernels").small
    task = tasks.Task("kernels group_norm", size=small, dtype="bfloat16", topology="v6e:1x1")
    assert measure.estimate(task)["seconds"].keys() == {"group_norm"}
    chunks = tasks.Task("decode", size=Size("5b", 17, 96, 128), dtype="bfloat16", topology="v6e:1x1")
    works = measure._works(chunks, chunks.size, chunks.mesh(chips.topology_devices(chunks.topology)))
    assert [work.name for work in works] == ["first", "later"]
    with pytest.raises(chips.PlanError, match="published shapes alone"):
        measure.estimate(replace(task, job="step"))


def test_estimates_stand_beside_what_they_estimate(monkeypatch, tmp_path):
    monkeypatch.setitem(CPU, "kind", "TPU v6 lite")
    monkeypatch.setattr(ladder, "KERNELS", ("group_norm",))

    def answer(do, request, environment):
        if do != "estimate":
            return GOOD
        assert (request["topology"], environment["JAX_PLATFORMS"]) == ("v6e:1x1", "cpu")
        return {"status": "ok", "seconds": {"group_norm": 0.01}}

    found, _ = run(monkeypatch, answer)
    (row,) = [line for line in report.markdown(found).splitlines() if "group_norm" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == [
        *("small, 4 x 32 x 64", "1.0e-06", "group_norm", "0.5", "20", "10 to 30", "20", "", "10", "0.50"),
    ]
    (plot,) = report.draw_device(found, tmp_path / "device.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "benchmarks.md"
    marks = [f"<!-- {name}: begin -->\nstale\n<!-- {name}: end -->\n" for name in ("devices", "measured")]
    page.write_text("".join(marks))
    size = Size("small", 17, 32, 48)._asdict()
    for way, seconds in (("torch", 0.02), ("torchax", 0.01)):
        part = PART | {"part": "first", "median_s": seconds}
        result = {**GOOD, "parts": [part], "whole": {"median_s": seconds}}
        found["results"].append({"job": "decode", "way": way, "size": size, **result})
    (tmp_path / "devices").mkdir()

    def redrawn():
        (tmp_path / "devices" / "tpu.json").write_text(json.dumps(found))
        drawn.redraw_devices(tmp_path, page)
        return page.read_text()

    text = redrawn()
    assert (tmp_path / "devices" / "tpu.md").read_text() == report.markdown(found)
    assert re.search(r"\[tpu\]\((?s:.*)\| decode \| first \| 17 x 32 x 48 \| 20 \| 10 \|", text)
    assert "stale" not in text
    found["device"] |= {"platform": "gpu"}
    assert "tpu.md): decode of small, 17 x 32 x 48, 0.01 s (PyTorch, eager: 0.02 s)\n" in redrawn()
    found["results"][-1]["size"] = size | {"frames": 9}  # the port's video is another now
    assert "tpu.md)\n" in redrawn()


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


def measured(job, way, checked, tmp_path, *, size=None, status="ok", **options):
    """Return the result of a job by itself, of two runs, in this process; its status must be `status`."""
    request = {"job": job, "checked": checked, "size": size or checked, **options}
    request |= {"data": str(tmp_path / "wanted.npy")}
    answer = worker.answer("reference", request)
    assert answer["status"] == "ok", answer
    few = {"warmups": 1, "runs": 2, "fewest": 2}
    found = worker.answer("measure", request | few | {"way": way, "rms": answer["rms"]})
    assert found["status"] == status, found
    return found


@pytest.mark.usefixtures("torchax_off")
def test_a_stock_chunk_takes_the_cache_that_the_one_before_returned(tiny, tmp_path):
    """A later chunk's cache has other shapes than the first one's."""
    found = measured("encode", "torchax-stock", Size(tiny, 25, 8, 8), tmp_path)
    assert [part["part"] for part in found["parts"]] == ["first", "later"]
    moments, frames = 32, 7
    assert np.load(tmp_path / "wanted.npy").size == moments * frames * 2 * 2  # of all three chunks


@pytest.mark.usefixtures("torchax_off")
def test_both_channels_of_a_rotated_pair_have_one_angle(tmp_path):
    measured("kernels qk_norm_rope", "torchax", Size("small", 5, 16, 16), tmp_path)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("way", ["torchax", "flax"])
def test_bfloat16_is_held_to_the_error_of_pytorch(way, tiny, tmp_path):
    found = measured("still", way, Size(tiny, 1, 8, 8), tmp_path, dtype="bfloat16")
    assert 0 < found["check"]["relative_error"] < 0.1


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("way", ["torchax", "torchax-stock"])
def test_a_published_network_is_compared_small_and_measured_large(way, monkeypatch, tmp_path):
    """A large model has no weights on the host: what is measured are other arrays than those compared."""
    monkeypatch.setitem(networks.TRANSFORMERS, "large", ops.SMALL_TRANSFORMER | {"num_layers": 1})
    small, large = Size("small", 5, 16, 16), Size("large", 5, 16, 32)
    assert len(measured("step", way, small, tmp_path, size=large)["parts"][0]["all_s"]) == 2


@pytest.mark.parametrize("job", ["step", "prompt"])
def test_a_gpu_has_the_weights_of_the_host_that_it_is_compared_with(job, monkeypatch):
    """A GPU draws other random numbers from the same seed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    task = tasks.Task(job=job, way="torch")
    assert (task.torch_device, task.device_name) == ("cuda", "NVIDIA H200")
    model, _inputs = tasks._network_and_inputs(task, Size("small", 5, 16, 16))
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("peer", "error", "status"), [(True, 0.5, "ok"), (True, "nan", "wrong"), (False, 0.5, "wrong")]
)
def test_a_peer_beyond_the_contract_is_timed_too(peer, error, status, monkeypatch, tmp_path):
    verdict = {"passed": False, "relative_error": error, "rms_error": error}
    monkeypatch.setattr(measure, "check", lambda *_: verdict)
    size = Size("small", 5, 16, 16)
    found = measured("kernels linear_gelu", "torchax", size, tmp_path, peer=peer, status=status)
    assert (found["check"], "parts" in found) == (verdict, status == "ok")
    result = {"job": "step", "way": "torch", "size": size._asdict(), **found}
    shown = report.markdown(MADE | {"results": [result]})
    assert ("5.0e-01, beyond the contract" in shown) == (status == "ok")


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("job", ["still", "train", "step"])
@pytest.mark.slow_cases("train", "step")
@pytest.mark.product_cases("train")
def test_a_job_runs_over_a_mesh(job, tiny, tmp_path):
    size = Size("small", 5, 16, 16) if job == "step" else Size(tiny, 1, 8, 8)
    measured(job, "torchax", size, tmp_path, dp=1, tp=2)


@pytest.mark.parametrize("name", ladder.KERNELS)
def test_a_kernel_is_compared_at_a_size_at_which_a_tpu_runs_it(name, monkeypatch):
    op, structs = ops.bound(name, ladder.checked("kernels", on_cpu=False), "bfloat16")

    def text(op=op, structs=structs):
        traced = jax.jit(lambda *operands: op(*operands)).trace(*structs)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    for switch, runs in (("on", True), (f"off:silu,{name}", False), ("off:silu", True)):
        monkeypatch.setenv(SWITCH, switch)
        assert ("kernel_name" in text()) == runs


@pytest.mark.parametrize("name", ladder.KERNELS)
def test_a_kernel_has_results_of_its_references_shapes(name, monkeypatch):
    size = ladder.checked("kernels", on_cpu=False)
    monkeypatch.setattr(torch, "randn", lambda shape, generator: torch.zeros(1).expand(shape))
    fast, plain = (ops.load(name, size, jnp.bfloat16, reference) for reference in (None, {}))

    def shapes(run):
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(run))]

    assert shapes(fast) == shapes(plain)


@pytest.mark.parametrize("way", [name for name in ladder.WAYS if name != "flax"])
def test_ways_follow_the_device(way):
    gpu = CPU | {"platform": "gpu", "kind": "NVIDIA H100", "torch": "cuda"}
    tpu = CPU | {"platform": "tpu", "kind": "TPU v6 lite", "torch": None}
    assert way in ladder.ways("step", gpu, False)
    assert (way in ladder.ways("step", tpu, False)) == (not way.startswith("torch-") and way != "torch")
    assert (way in ladder.ways("step", CPU, False)) == (way not in (ladder.KERNELS_OFF, "torch-compile"))
    assert (way in ladder.ways("step", tpu, True)) == (way in ("torchax", ladder.KERNELS_OFF))


@pytest.mark.parametrize(
    ("job", "platforms"),
    [
        ("kernels attention", ("tpu", "gpu")),
        ("kernels upsample", ("tpu",)),
        ("step", ("tpu", "gpu")),
        ("decode", ("tpu",)),
        ("prompt", ()),
    ],
)
def test_a_job_is_run_without_kernels_where_it_has_some(job, platforms):
    for platform in ("tpu", "gpu", "cpu"):
        ways = ladder.ways(job, CPU | {"platform": platform}, False)
        assert (ladder.KERNELS_OFF in ways) == (platform in platforms)


def test_doctor_names_the_command_where_there_is_a_device(monkeypatch, capsys):
    for devices, named in (("tpu:0 (TPU v6 lite)", True), ("gpu:0 (NVIDIA H100)", True), ("cpu:0", False)):
        monkeypatch.setattr(doctor, "_devices", lambda devices=devices: devices)
        assert cli.main(["doctor"]) == 0
        assert ("cogvideox-torchax bench device -o out/device" in capsys.readouterr().out) == named


def test_cudnn_is_left_out_where_kernels_are_off(monkeypatch):
    from jax_kernels.attention import op, xla
    from jax_kernels.common.dispatch import Target

    monkeypatch.setattr(xla, "cudnn_supports", lambda q: True)
    q = jax.numpy.zeros(1)
    assert op._fastest(Target("cuda", pallas=True), q, q) == "cudnn"
    assert op._fastest(Target("cuda", pallas=False), q, q) == "plain"
