"""Measurements: of one case and its reference, in processes, and in runs in which something goes wrong."""

import json
import re
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

from benchmarks import __main__ as command, calibration, jobs, loading, measure, ops, report, runs, worker
from benchmarks.plan import chips, networks
from jax_kernels.common.tiles import SWITCH
from tests.benchmarks.test_draw import GOOD, UNFIT, WRONG

torchax_off = pytest.mark.usefixtures("torchax_off")


@pytest.fixture
def measured(tmp_path):
    """Return a function that measures a job, of two runs, in this process; its status must be `status`."""

    def measured(job, way, checked, *, size=None, status="ok", lenient=False, **options):
        case, data = vars(loading.Case(job, "", checked, **options)), str(tmp_path / "wanted.npy")
        answer = worker.answer("reference", {"case": case, "data": data})
        assert answer["status"] == "ok", answer
        about = {"checked": checked, "data": data, "rms": answer["rms"], "lenient": lenient}
        case |= {"way": way, "size": size or checked}
        found = worker.answer("measure", about | {"case": case, "budget": jobs.Budget(1, 2, 2)})
        assert found["status"] == status, found
        return found

    return measured


@torchax_off
def test_both_channels_of_a_rotated_pair_have_one_angle(measured):
    measured("kernels qk_norm_rope", "torchax", jobs.Size("small", 5, 16, 16))


@torchax_off
@pytest.mark.slow
def test_bfloat16_is_held_to_the_error_of_pytorch(shallow_directory, measured):
    found = measured("still", "torchax", jobs.Size(shallow_directory, 1, 8, 8), dtype="bfloat16")
    assert 0 < found["check"]["relative_error"] < 0.1


@torchax_off
@pytest.mark.slow
def test_a_published_network_is_compared_small_and_measured_large(monkeypatch, measured):
    """A large model has no weights on the host: what is measured are other arrays than those compared."""
    monkeypatch.setitem(networks.TRANSFORMERS, "large", ops.SMALL_TRANSFORMER | {"num_layers": 1})
    small, large = jobs.Size("small", 5, 16, 16), jobs.Size("large", 5, 16, 32)
    assert len(measured("step", "torchax", small, size=large)["parts"][0]["all_s"]) == 2


@pytest.mark.parametrize("job", ["step", "prompt"])
def test_a_gpu_has_the_weights_of_the_host_that_it_is_compared_with(job, monkeypatch):
    """A GPU draws other random numbers from the same seed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, _inputs = loading._network_and_inputs(loading.Case(job, "torch", jobs.Size("small", 5, 16, 16)))
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("lenient", "error", "status"), [(True, 0.5, "ok"), (True, "nan", "wrong"), (False, 0.5, "wrong")]
)
def test_a_peer_beyond_the_contract_is_timed_too(lenient, error, status, monkeypatch, measured):
    verdict = {"passed": False, "relative_error": error, "rms_error": error}
    monkeypatch.setattr(measure, "check", lambda *_: verdict)
    found = measured(
        "kernels linear_gelu", "torchax", jobs.Size("small", 5, 16, 16), lenient=lenient, status=status
    )
    assert (found["check"], "parts" in found) == (verdict, status == "ok")


@torchax_off
@pytest.mark.slow
def test_a_job_runs_over_a_mesh(shallow_directory, measured):
    measured("still", "torchax", jobs.Size(shallow_directory, 1, 8, 8), dp=1, tp=2)


@torchax_off
def test_the_parts_of_a_job_are_estimated_without_a_device():
    chip = chips.CHIPS["v6e"]
    decode = loading.Case("decode", "torchax", jobs.Size("5b", 17, 96, 128), dtype="bfloat16")
    devices = decode.mesh(chips.topology_devices("v6e:1x1", schedules=True))
    assert [work.name for work in measure.works(decode, devices, chip)] == ["first", "later"]
    (step,) = measure.works(
        loading.Case("step", "torchax", jobs.Size(jobs.TWO_LAYERS, 9, 64, 96)), devices, chip
    )
    assert (step.about["network"], jobs.TWO_LAYERS in networks.TRANSFORMERS) == ("step, 2 layers", False)
    with pytest.raises(chips.PlanError, match="published shapes alone"):
        measure.works(loading.Case("step", "torchax", jobs.Size("small", 9, 64, 96)), devices, chip)


@pytest.mark.parametrize("name", jobs.KERNELS)
def test_a_kernel_is_compared_at_a_size_at_which_a_tpu_runs_it(name, monkeypatch):
    op, structs = ops.bound(name, jobs.checked("kernels", on_cpu=False), "bfloat16")
    for switch, on in (("on", True), (f"off:silu,{name}", False), ("off:silu", True)):
        monkeypatch.setenv(SWITCH, switch)
        traced = jax.jit(lambda *operands: op(*operands)).trace(*structs)  # anew: it is another function
        assert ("kernel_name" in traced.lower(lowering_platforms=("tpu",)).as_text()) == on


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: of memory"), "does not fit"),
        (MemoryError("6 GB"), "does not fit"),
        (RuntimeError("no such op"), "failed"),
    ],
)
def test_memory_that_ran_out_is_told_from_other_failures(error, status):
    assert worker.failure(error)["status"] == status


@pytest.mark.parametrize(
    ("does", "found"),
    [
        pytest.param(
            "print(json.dumps(asked | dict(seen=os.environ['SEEN'])))",
            {"status": "ok", "seen": "a"},
            id="an answer",
        ),
        pytest.param(
            "sys.stderr.write('Traceback\\nno such op\\n'); sys.exit(3)",
            {"status": "failed", "reason": "exit code 3: no such op"},
            id="a crash",
        ),
        pytest.param(
            "os.kill(os.getpid(), 9)",
            {"status": "does not fit", "reason": "killed, as the system does when host memory runs out"},
            id="a kill",
        ),
        pytest.param("time.sleep(60)", {"status": "failed", "reason": "not done after 1 s"}, id="a hang"),
    ],
)
def test_whatever_a_process_does_is_an_answer(monkeypatch, does, found):
    code = f"import json, os, sys, time; asked = json.load(sys.stdin)['request']; {does}"
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, "-S", "-c", code))
    assert worker.ask("measure", {"status": "ok"}, {"SEEN": "a"}, 1.0 if "sleep" in does else 60.0) == found


WANTED = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("got", "contract", "passes"),
    [
        (WANTED + 5e-6, ("float32", 0.0), True),
        (WANTED + 5e-6, ("float32", 0.0, 0.0), False),  # nothing is allowed
        (WANTED + 5e-5, ("float32", 0.0), False),
        (WANTED * float("nan"), ("float32", 0.0), False),
        (WANTED[:1], ("float32", 0.0), False),
        (WANTED + 1.05e-2, ("bfloat16", 1e-2), True),
        (WANTED + 1.2e-2, ("bfloat16", 1e-2), False),
    ],
)
def test_an_answer_is_judged_by_the_contract_of_its_dtype(got, contract, passes):
    assert measure.check(got, WANTED, *contract)["passed"] == passes


CPU = {
    "platform": "cpu",
    "kind": "cpu",
    "count": 1,
    "used": 1,
    "coordinates": [[0, 0, 0]],
    "torch": "cpu",
}
TPU = CPU | {"platform": "tpu", "kind": "TPU v6 lite", "torch": None}


@dataclass
class MadeUp:
    """Stands for `worker.ask`: has a device, and answers measurements and estimates by a function.

    Attributes:
        device: the answer to "probe".
        answer: function of a request's name, its case and the environment to its answer.
        measured: (way, switch of Pallas kernels) of each measurement.
    """

    device: dict
    answer: Any
    measured: list = field(default_factory=list)

    def __call__(self, do, request, environment, limit):
        of_reference = {"rms": 0.0, "flops": 10}
        known = {"probe": self.device, "reference": of_reference, "calibration.measured": of_reference}
        if do in known:
            return {"status": "ok", **known[do]}
        if do == "measure":
            self.measured.append((request["case"]["way"], environment.get(SWITCH)))
        return json.loads(json.dumps(self.answer(do, request["case"], environment)))


def ask_here(do, request, environment, limit):
    """Stand for `worker.ask`: measure in this process, which has imported everything, with two runs each."""
    request = json.loads(json.dumps(request))
    if do == "measure":
        request["budget"] = jobs.Budget(warmups=1, runs=2, fewest=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, environment.get(SWITCH, "on"))
        return json.loads(json.dumps(worker.answer(do, request)))


@pytest.fixture
def two_kernels(monkeypatch):
    monkeypatch.setattr(jobs, "KERNELS", ("group_norm", "attention"))


@pytest.fixture
def small_jobs(monkeypatch):
    """Give each job the smallest size."""
    sizes = {"decode": (17, 8, 8), "encode": (17, 8, 8), "still": (1, 8, 8)}
    for name, row in jobs.JOBS.items():
        monkeypatch.setitem(
            jobs.JOBS, name, replace(row, small=jobs.Size("small", *sizes.get(name, (5, 16, 16))))
        )


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs jobs with a function in place of processes, and returns the report."""

    def run(ask, *names, say=lambda line: None, **settings):
        monkeypatch.setattr(worker, "ask", ask)
        return runs.run(runs.Settings(**{"jobs": names, "models": {}, **settings}), say)

    return run


def statuses(found):
    return {result["job"].removeprefix("kernels "): result["status"] for result in found["results"]}


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
FEW = ("kernels", "prompt")


@pytest.mark.usefixtures("torchax_off", "two_kernels", "small_jobs")
@pytest.mark.parametrize(
    "names", [FEW, tuple(job for job in jobs.JOBS if job not in FEW)], ids=["few", "others"]
)
@pytest.mark.slow_cases("others")
def test_a_device_is_measured_by_the_port_and_its_peers(names, shallow_directory, run):
    found = run(ask_here, *names, models={"small": shallow_directory})
    assert {
        (each["job"], each["way"], each["check"]["passed"]): [part["part"] for part in each["parts"]]
        for each in found["results"]
    } == {
        (job, way, True): parts
        for job, ways in PARTS.items()
        if job.split()[0] in names
        for way, parts in ways.items()
    }
    parts = [part for each in found["results"] for part in each["parts"]]
    assert all(part["runs"] >= 2 and part["median_s"] > 0 for part in parts)
    assert "there are estimates for TPU v5 lite" in found["not_estimated"]
    assert shallow_directory not in json.dumps(found)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.slow
def test_backends_are_compared_in_processes_of_their_own(model_directory, tmp_path, capsys):
    video = "--frames 1 --height 16 --width 16 --repetitions 1 --warmups 0 --quiet --json"
    about = f"ab --model {model_directory} -o {tmp_path} --backends torchax torch"
    assert command.main([*about.split(), *video.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(result["job"], result["way"], result["status"]) for result in found["results"]] == [
        (job, way, "ok") for job in ("decode", "encode") for way in ("torchax", "torch")
    ]
    assert min(found["results"][0]["whole"]["warm_starts_s"]) > 0
    assert "| decode | torchax " in (tmp_path / "ab.md").read_text()


def test_backends_take_turns_a_failed_one_is_left_out_and_the_rounds_of_the_others_are_merged(run):
    again = GOOD | {"whole": jobs.spread([5.0, 4.0]) | {"start_s": 0.7}, "host_peak_bytes": None}
    answers = iter([GOOD, GOOD, UNFIT, again, UNFIT, again])
    working = MadeUp(CPU, lambda *_: next(answers))
    size, ways, said = jobs.Size("tiny", 9, 16, 24), ("torchax", "flax", "torch"), []
    found = run(working, "decode", size=size, ways=ways, rounds=3, say=said.append)["results"]
    assert [way for way, _ in working.measured] == ["torchax", "flax", "torch", "torchax", "flax", "torchax"]
    assert [result["status"] for result in found] == ["ok", "does not fit", "does not fit"]
    merged = jobs.spread([1.0, 3.0, 2.0, 5.0, 4.0, 5.0, 4.0]) | {"start_s": 3.0, "warm_starts_s": [0.7, 0.7]}
    assert found[0] == found[0] | {
        "whole": found[0]["whole"] | merged,
        "host_peak_bytes": 5_000_000,
        "flops": 10,  # the reference's, as results are compared at the size that is timed
    }
    assert found[0]["parts"][0]["runs"] == 3
    begun = [f"{turn} of 9: decode of tiny, 9 x 16 x 24, by {way}" for turn, way in enumerate(ways * 3, 1)]
    unfit = [f"decode, {way}: does not fit: RESOURCE_EXHAUSTED" for way in ("torch", "flax")]
    assert "each measurement is a process of its own" in said[0]
    assert all(re.search(r"; \d+ s so far$", line) for line in said[1:] if " of 9: " in line)
    expected = [*begun[:3], unfit[0], *begun[3:5], unfit[1], begun[6]]
    assert [line.partition(";")[0] for line in said[1:]] == expected


HUNG = {"status": "failed", "reason": "not done after 2 s: /home/somebody/kernels/tpu.py"}


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize(
    ("names", "ways", "answer", "status", "off", "switches"),
    [
        pytest.param(
            ("decode", "encode"),
            ("torchax", jobs.KERNELS_OFF),
            lambda case, switch: GOOD if switch in ("off", "off:upsample") else WRONG,
            {"decode": "ok", "encode": "ok"},
            ["upsample"],
            [None, "off:norm_conv3d", "off:upsample", "off", "off:upsample", "off"],
            id="a kernel that breaks a whole job is found there",
        ),
        pytest.param(
            ("kernels", "decode"),
            ("torchax",),
            lambda case, switch: HUNG if case["job"] in ("kernels group_norm", "decode") else GOOD,
            {"group_norm": "failed", "attention": "ok", "decode": "failed"},
            ["group_norm"],
            [None, "off:group_norm", "off:group_norm"],
            id="a kernel that hangs is off, and a job that hangs is not tried again",
        ),
        pytest.param(
            ("still",),
            ("torchax",),
            lambda case, switch: UNFIT if case["size"][0] == "5b" else GOOD,
            {"still": "ok"},
            [],
            [None, None],
            id="a job out of memory falls to the next smaller size",
        ),
    ],
)
def test_a_fault_costs_what_it_must(names, ways, answer, status, off, switches, run):
    working = MadeUp(
        TPU | {"kind": "unknown"}, lambda do, case, environment: answer(case, environment.get(SWITCH))
    )
    found = run(working, *names, ways=ways)
    assert (statuses(found), list(found["switched_off"])) == (status, off)
    assert [switch for _way, switch in working.measured] == switches
    assert "somebody" not in json.dumps(found), "a result is read on other machines"


@pytest.mark.usefixtures("torchax_off", "two_kernels")
def test_an_interrupted_run_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    def interrupted(do, case, environment):
        if case["job"] == "kernels attention":
            raise KeyboardInterrupt
        return GOOD | {"host_peak_bytes": 125}  # by which it is known

    arguments = ["device", "--jobs", "kernels", "--quiet", "--json", "-o", str(tmp_path)]
    monkeypatch.setattr(worker, "ask", MadeUp(CPU, interrupted))
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert statuses(json.loads((tmp_path / "device.json").read_text())) == {"group_norm": "ok"}
    monkeypatch.setattr(worker, "ask", MadeUp(CPU, lambda *_: GOOD))
    assert command.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["host_peak_bytes"] for result in found["results"]] == [125, GOOD["host_peak_bytes"]]
    (tmp_path / "device.json").write_text(json.dumps(found | {"commit": "another"}))
    assert command.main(arguments) == 2
    assert "holds results of another commit" in capsys.readouterr().err


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["device", "--tp", "99"], "got a mesh of dp=1 x tp=99, 99 devices, where there are 8"),
        (["device", "--frames", "9"], "got --frames 9, which device does not take"),
        (["ab", "--model", "./none"], "there is no model directory none"),
        (["ab", "--height", "60"], "multiples of 8"),
    ],
)
def test_what_there_is_not_is_one_line(arguments, words, monkeypatch, refused):
    monkeypatch.setattr(worker, "ask", ask_here)
    assert words in refused(*arguments, *["--quiet"] * (arguments[0] == "ab"), main=command.main)


@pytest.mark.usefixtures("two_kernels")
def test_without_libtpu_one_line_stands_for_all_estimates(monkeypatch, run):
    monkeypatch.setattr(chips, "installed", lambda package: None)
    found = run(MadeUp(TPU, lambda *_: GOOD), "kernels", ways=("torchax",))
    assert "planning for a TPU needs its compiler" in found["not_estimated"]
    assert not any("estimate" in result for result in found["results"])
    assert report.markdown(found).count(f"Not estimated: {found['not_estimated']}.") == 1


@pytest.fixture
def a_compiler(monkeypatch):
    """Have libtpu count as installed."""
    monkeypatch.setattr(chips, "check_compiler", lambda topology: None)


@pytest.mark.usefixtures("two_kernels", "a_compiler")
def test_the_port_is_estimated_on_the_host_for_the_topology_of_its_devices(run):
    def answer(do, case, environment):
        if do != "estimate":
            return GOOD
        assert environment["JAX_PLATFORMS"] == "cpu"
        return {"status": "ok", "seconds": {"first": 0.01}}

    found = run(MadeUp(TPU, answer), "kernels")
    assert found["published"].keys() == {*calibration.cases_of(TPU["kind"])} != set()
    assert [(result["way"], result.get("estimate")) for result in found["results"]] == [
        ("torchax", {"first": 0.01}),
        (jobs.KERNELS_OFF, None),
    ] * 2


@pytest.mark.usefixtures("two_kernels", "a_compiler", "in_an_empty_directory")
def test_a_quick_run_has_small_jobs_of_the_port_alone_and_says_where_its_result_goes(
    monkeypatch, tmp_path, capsys
):
    def answer(do, case, environment):
        if do == "estimate":
            return {"status": "ok", "seconds": {"later": 0.25}}
        return WRONG if case["job"] == "kernels attention" else GOOD

    monkeypatch.setattr(worker, "ask", MadeUp(TPU, answer))
    assert command.main(["device", "--quick", "--json"]) == 1, "a kernel is wrong"
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert [
        (each["job"], each["way"], jobs.Size(**each["size"]).name, "estimate" in each)
        for each in found["results"]
    ] == [
        ("kernels group_norm", "torchax", "5b, 17 x 160 x 240", True),
        ("kernels attention", "torchax", "5b, 17 x 160 x 240", False),
        ("decode", "torchax", "5b, 9 x 160 x 240", True),
        ("step", "torchax", "5b of 2 layers, 49 x 480 x 720", True),
    ]
    assert (list(found["switched_off"]), "published" in found) == (["attention"], False)
    assert "attach out/device-quick/device.json to a new issue" in said
    assert json.loads((tmp_path / "out/device-quick/device.json").read_text()) == found


@pytest.mark.usefixtures("two_kernels", "a_compiler")
def test_what_a_run_has_no_time_for_is_said_and_no_kernel_is_blamed(run, monkeypatch):
    clock = iter((0.0, 59.0, 61.0, 151.0))  # of the start, two measurements and an estimate
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=clock.__next__))
    found = run(MadeUp(TPU, lambda *_: GOOD), "kernels", ways=("torchax",), seconds=60)
    assert statuses(found) == {"group_norm": "ok", "attention": "failed"}
    first, second = found["results"]
    assert (first["estimate"]["reason"], second["reason"]) == ("no time was left",) * 2
    assert not found["switched_off"]


GPU = CPU | {"platform": "gpu", "kind": "NVIDIA H100", "torch": "cuda"}
OFF, STOCK, TORCH = jobs.KERNELS_OFF, "torchax-stock", ("torch", "torch-compile")


@pytest.mark.parametrize(
    ("job", "device", "several", "ways"),
    [
        ("step", GPU, False, ("torchax", OFF, STOCK, *TORCH)),
        ("step", TPU, False, ("torchax", OFF, STOCK)),
        ("step", CPU, False, ("torchax", STOCK, "torch")),
        ("step", TPU, True, ("torchax", OFF)),
        ("decode", TPU, False, ("torchax", OFF, "flax", STOCK)),
        ("decode", GPU, False, ("torchax", "flax", STOCK, *TORCH)),
        ("prompt", GPU, False, ("torchax", STOCK, *TORCH)),
        ("kernels upsample", TPU, False, ("torchax", OFF)),
        ("kernels upsample", GPU, False, ("torchax",)),
    ],
)
def test_ways_follow_the_device(job, device, several, ways):
    assert jobs.ways(job, device, several) == ways
