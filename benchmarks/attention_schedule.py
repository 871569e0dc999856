"""How many cycles do attention's kernels take for 1024 x 1024 scores, by the compiler's final schedule?

python benchmarks/attention_schedule.py run     # compiles each kernel for each chip: minutes; needs no TPU
python benchmarks/attention_schedule.py         # draws what is kept into docs/performance.md

Heads of 64 channels, 46,080 tokens of which 45,104 are real, as CogVideoX1.5 has them at 81 x 768 x 1360.
The schedule counts bundles that run; nothing waits in it. A time is cycles over the clock: an estimate.
"""

import functools
import importlib.metadata
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cogvideox_torchax.files.reports import fill, load, table, write_json
from cogvideox_torchax.plan.chips import CHIPS, topology_devices
from cogvideox_torchax.plan.schedule import compile_with_schedules
from jax_kernels import attention_transposed, prepare

RESULT = Path(__file__).parent / "results" / "attention-schedule.json"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
FORMAT = "cogvideox-torchax attention schedule 1"
CHANNELS, TOKENS, VALID, PREPARED_HEADS = 64, 46080, 45104, 12
HELD = {"scale": math.log(2)}
FORMS: dict[str, dict[str, Any]] = {
    "running maximum": {"implementation": "transposed"},
    "running maximum, queries hold their scale": {"implementation": "transposed", **HELD},
    "bounded": {"implementation": "transposed", "bound": 1.0},
    "bounded, queries hold their scale": {"implementation": "transposed", "bound": 1.0, **HELD},
}
CASES = [
    *[("v6e:1x1", dtype, form) for dtype in (jnp.bfloat16, jnp.float32) for form in FORMS],
    *[
        (topology, jnp.bfloat16, form)
        for topology in ("v5e:1x1", "v5p:2x2x1", "tpu7x:2x2x1")
        for form in ("running maximum, queries hold their scale", "bounded, queries hold their scale")
    ],
]


def measure(
    topology: str, function: Callable[..., Any], *operands: tuple[tuple[int, ...], Any]
) -> dict[str, Any]:
    """What the schedule of a function with one kernel comes to."""
    (device, *_), chip = topology_devices(topology), CHIPS[topology.partition(":")[0]]
    place = jax.sharding.SingleDeviceSharding(device)
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in operands]
    start = time.perf_counter()
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("device",))):
        lowered = jax.jit(function).lower(*structs)
    compiled, schedules = compile_with_schedules(lowered, chip)
    taken = time.perf_counter() - start
    (schedule,) = schedules.values()
    return {
        "cycles": schedule.cycles,
        "estimate_ms": 1e3 * schedule.cycles / chip.clock,
        "temporaries_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compiled_in_s": round(taken, 1),
    }


def measure_attention(topology: str, dtype: Any, form: str) -> dict[str, Any]:
    """One form, for one head."""
    attend = functools.partial(attention_transposed, valid=VALID, **FORMS[form])
    found = measure(topology, attend, *[((1, 1, CHANNELS, TOKENS), dtype)] * 3)
    kept = {"topology": topology, "dtype": jnp.dtype(dtype).name, "form": form}
    return kept | {"cycles_of_1024_x_1024": round(found["cycles"] / (TOKENS / 1024) ** 2)} | found


def measure_preparing(form: str) -> dict[str, Any]:
    """Queries or keys of twelve heads, or values, which have neither norm nor positions."""
    vector, table = ((CHANNELS,), jnp.bfloat16), ((TOKENS, CHANNELS), jnp.float32)
    operands = [] if form == "values" else [vector, vector, table, table]
    run = functools.partial(prepare, heads=PREPARED_HEADS)
    x = (1, TOKENS, PREPARED_HEADS * CHANNELS), jnp.bfloat16
    return {"topology": "v6e:1x1", "form": form} | measure("v6e:1x1", run, x, *operands)


def run() -> None:
    """Compiles all, and keeps what has been compiled so far."""
    report: dict[str, Any] = {
        "format": FORMAT,
        "question": "cycles of the final schedule for 1024 x 1024 scores of a head",
        "job": {"channels": CHANNELS, "tokens": TOKENS, "valid": VALID, "prepared_heads": PREPARED_HEADS},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        "prepare": [measure_preparing(form) for form in ("neighbours", "values")],
        "attention": [],
    }
    for case in CASES:
        report["attention"].append(measure_attention(*case))
        print(report["attention"][-1], flush=True)
        write_json(RESULT, report)


def draw() -> None:
    """A row a chip and dtype, a column a form."""
    cycles = {
        (row["topology"], row["dtype"], row["form"]): row["cycles_of_1024_x_1024"]
        for row in load(RESULT, FORMAT)["attention"]
    }
    rows = [
        (topology, dtype, *(str(cycles.get((topology, dtype, form), "")) for form in FORMS))
        for topology, dtype in dict.fromkeys(key[:2] for key in cycles)
    ]
    fill(PAGE, "attention", table(("topology", "dtype", *FORMS), rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run()
    draw()
