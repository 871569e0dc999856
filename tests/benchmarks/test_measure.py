"""Measurements of one case, the comparison with its reference, and the process that answers."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import jobs, loading, measure, ops, worker
from benchmarks.estimate import chips
from benchmarks.jobs import Budget, Size
from benchmarks.loading import Case
from cogvideox_torchax.plan import networks
from cogvideox_torchax.plan.chips import PlanError
from jax_kernels.common.tiles import SWITCH
from tests import reference

torchax_off = pytest.mark.usefixtures("torchax_off")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the directory of a small VAE."""
    directory = tmp_path_factory.mktemp("vae")
    reference.small_vae(**reference.SHALLOW).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def measured(tmp_path):
    """Return a function that measures a job, of two runs, in this process; its status must be `status`."""

    def measured(job, way, checked, *, size=None, status="ok", lenient=False, **options):
        data = str(tmp_path / "wanted.npy")
        case = vars(Case(job, "", checked, **options))
        answer = worker.answer("reference", {"case": case, "data": data})
        assert answer["status"] == "ok", answer
        request = {"checked": checked, "data": data, "rms": answer["rms"], "lenient": lenient}
        request |= {"case": case | {"way": way, "size": size or checked}, "budget": Budget(1, 2, 2)}
        found = worker.answer("measure", request)
        assert found["status"] == status, found
        return found

    return measured


@torchax_off
def test_a_stock_chunk_takes_the_cache_that_the_one_before_returned(tiny, measured, tmp_path):
    """A later chunk's cache has other shapes than the first one's."""
    found = measured("encode", "torchax-stock", Size(tiny, 25, 8, 8))
    assert [part["part"] for part in found["parts"]] == ["first", "later"]
    moments, frames = 32, 7
    assert np.load(tmp_path / "wanted.npy").size == moments * frames * 2 * 2  # of all three chunks


@torchax_off
def test_both_channels_of_a_rotated_pair_have_one_angle(measured):
    measured("kernels qk_norm_rope", "torchax", Size("small", 5, 16, 16))


@torchax_off
@pytest.mark.parametrize("way", ["torchax", "flax"])
def test_bfloat16_is_held_to_the_error_of_pytorch(way, tiny, measured):
    found = measured("still", way, Size(tiny, 1, 8, 8), dtype="bfloat16")
    assert 0 < found["check"]["relative_error"] < 0.1


@torchax_off
@pytest.mark.parametrize("way", ["torchax", "torchax-stock"])
def test_a_published_network_is_compared_small_and_measured_large(way, monkeypatch, measured):
    """A large model has no weights on the host: what is measured are other arrays than those compared."""
    monkeypatch.setitem(networks.TRANSFORMERS, "large", ops.SMALL_TRANSFORMER | {"num_layers": 1})
    small, large = Size("small", 5, 16, 16), Size("large", 5, 16, 32)
    assert len(measured("step", way, small, size=large)["parts"][0]["all_s"]) == 2


@pytest.mark.parametrize("job", ["step", "prompt"])
def test_a_gpu_has_the_weights_of_the_host_that_it_is_compared_with(job, monkeypatch):
    """A GPU draws other random numbers from the same seed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    case = Case(job, "torch", Size("small", 5, 16, 16))
    assert (case.torch_device, case.device_name) == ("cuda", "NVIDIA H200")
    model, _inputs = loading._network_and_inputs(case)
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@torchax_off
def test_pytorch_compiles_the_networks_of_torch_compile_alone(tiny, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    for way in ("torch", "torch-compile"):
        loading.load(Case("decode", way, Size(tiny, 1, 8, 8)))
        loading.load(Case("prompt", way, Size("small", 5, 16, 16)))
    assert compiled == ["CogVideoXEncoder3D", "CogVideoXDecoder3D", "T5EncoderModel"]


@pytest.mark.parametrize(
    ("lenient", "error", "status"), [(True, 0.5, "ok"), (True, "nan", "wrong"), (False, 0.5, "wrong")]
)
def test_a_peer_beyond_the_contract_is_timed_too(lenient, error, status, monkeypatch, measured):
    verdict = {"passed": False, "relative_error": error, "rms_error": error}
    monkeypatch.setattr(measure, "check", lambda *_: verdict)
    size = Size("small", 5, 16, 16)
    found = measured("kernels linear_gelu", "torchax", size, lenient=lenient, status=status)
    assert (found["check"], "parts" in found) == (verdict, status == "ok")


@torchax_off
@pytest.mark.parametrize("job", ["still", "train", "step"])
@pytest.mark.slow_cases("train", "step")
@pytest.mark.product_cases("train")
def test_a_job_runs_over_a_mesh(job, tiny, measured):
    size = Size("small", 5, 16, 16) if job == "step" else Size(tiny, 1, 8, 8)
    measured(job, "torchax", size, dp=1, tp=2)


@torchax_off
def test_the_parts_of_a_job_are_estimated_without_a_device():
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    chip = chips.CHIPS["v6e"]
    kernel = Case("kernels group_norm", "torchax", jobs.row("kernels").small, dtype="bfloat16")
    assert measure.estimate(kernel, "v6e:1x1")["seconds"].keys() == {"group_norm"}
    decode = Case("decode", "torchax", Size("5b", 17, 96, 128), dtype="bfloat16")
    devices = decode.mesh(chips.topology_devices("v6e:1x1"))
    assert [work.name for work in measure.works(decode, devices, chip)] == ["first", "later"]
    with pytest.raises(PlanError, match="published shapes alone"):
        measure.works(Case("step", "torchax", Size("small", 9, 64, 96)), devices, chip)


@pytest.mark.parametrize("name", jobs.KERNELS)
def test_a_kernel_is_compared_at_a_size_at_which_a_tpu_runs_it(name, monkeypatch):
    op, structs = ops.bound(name, jobs.checked("kernels", on_cpu=False), "bfloat16")

    def text(op=op, structs=structs):
        traced = jax.jit(lambda *operands: op(*operands)).trace(*structs)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    for switch, runs in (("on", True), (f"off:silu,{name}", False), ("off:silu", True)):
        monkeypatch.setenv(SWITCH, switch)
        assert ("kernel_name" in text()) == runs


@pytest.mark.parametrize("name", jobs.KERNELS)
def test_a_kernel_has_results_of_its_references_shapes(name, monkeypatch):
    size = jobs.checked("kernels", on_cpu=False)
    monkeypatch.setattr(torch, "randn", lambda shape, generator: torch.zeros(1).expand(shape))
    fast, plain = (ops.load(name, size, jnp.bfloat16, reference) for reference in (None, {}))

    def shapes(run):
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(run))]

    assert shapes(fast) == shapes(plain)


def test_memory_that_ran_out_is_told_from_other_failures():
    errors = RuntimeError("RESOURCE_EXHAUSTED: of memory"), MemoryError("6 GB"), RuntimeError("no such op")
    assert [worker.failure(error)["status"] for error in errors] == ["does not fit"] * 2 + ["failed"]


DOES = "import json, os, sys, time; asked = json.load(sys.stdin)['request']; {does}"
ENDS = {
    "an answer": ("print(json.dumps(asked | dict(seen=os.environ['SEEN'])))", {"status": "ok", "seen": "a"}),
    "a crash": (
        "sys.stderr.write('Traceback\\nno such op\\n'); sys.exit(3)",
        {"status": "failed", "reason": "exit code 3: no such op"},
    ),
    "a kill": (
        "os.kill(os.getpid(), 9)",
        {"status": "does not fit", "reason": "killed, as the system does when host memory runs out"},
    ),
    "a hang": ("time.sleep(60)", {"status": "failed", "reason": "not done after 1 s"}),
}


@pytest.mark.parametrize(("does", "found"), ENDS.values(), ids=ENDS)
def test_whatever_a_process_does_is_an_answer(monkeypatch, does, found):
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, "-S", "-c", DOES.format(does=does)))
    limit = 1.0 if "sleep" in does else 60.0
    assert worker.ask("measure", {"status": "ok"}, {"SEEN": "a"}, limit) == found


def test_an_answer_is_judged_by_the_contract_of_its_dtype():
    want = torch.ones(2, 3)
    for got, dtype, passes in (
        (want + 5e-6, "float32", True),
        (want + 5e-5, "float32", False),
        (want * float("nan"), "float32", False),
        (want[:1], "float32", False),
        (want + 1.05e-2, "bfloat16", True),
        (want + 1.2e-2, "bfloat16", False),
    ):
        assert measure.check(got, want, dtype, 1e-2 if dtype == "bfloat16" else 0.0)["passed"] == passes
    assert not measure.check(want + 5e-6, want, "float32", 0.0, allowed=0.0)["passed"]
