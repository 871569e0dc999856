"""How many cycles does each attention kernel take for 1024 x 1024 scores, by the compiler's final schedule?

python benchmarks/attention_schedule.py       # compiles each kernel for each chip: minutes; no TPU is needed

Heads of 64 channels, 46,080 tokens of which 45,104 are real, as CogVideoX1.5 has them at 81 x 768 x 1360.
The schedule counts bundles that run; nothing waits in it. A time is cycles over the clock: an estimate.
"""

import importlib.metadata
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cogvideox_torchax.files.reports import write_json
from cogvideox_torchax.plan.chips import CHIPS, topology_devices
from cogvideox_torchax.plan.schedule import compile_with_schedules
from jax_kernels import attention_transposed

RESULT = Path(__file__).parent / "results" / "attention-schedule.json"
FORMAT = "cogvideox-torchax attention schedule 1"
TOPOLOGIES = "v6e:1x1", "v5e:1x1", "v5p:2x2x1", "tpu7x:2x2x1"
HEADS, CHANNELS, TOKENS, VALID = 1, 64, 46080, 45104
HELD = {"scale": math.log(2)}
FORMS: dict[str, dict[str, Any]] = {
    "flash, JAX's own": {"implementation": "flash"},
    "running maximum": {"implementation": "transposed"},
    "running maximum, queries hold their scale": {"implementation": "transposed", **HELD},
    "bounded": {"implementation": "transposed", "bound": 1.0},
    "bounded, queries hold their scale": {"implementation": "transposed", "bound": 1.0, **HELD},
}


def measure(topology: str, dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Cycles of one form on one chip."""
    (device, *_), chip = topology_devices(topology), CHIPS[topology.partition(":")[0]]
    x = jax.ShapeDtypeStruct(
        (1, HEADS, CHANNELS, TOKENS), dtype, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    start = time.perf_counter()
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("device",))):
        run = jax.jit(lambda q, k, v: attention_transposed(q, k, v, valid=VALID, **options))
        lowered = run.lower(x, x, x)
    compiled, schedules = compile_with_schedules(lowered, chip)
    taken = time.perf_counter() - start
    (schedule,) = schedules.values()
    cycles = schedule.cycles / HEADS
    return {
        "cycles_a_block": cycles / (TOKENS / 1024) ** 2,
        "estimate_ms_a_head": 1e3 * cycles / chip.clock,
        "temporaries_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compiled_in_s": taken,
    }


def main(topologies: list[str]) -> None:
    rows = []
    for topology in topologies or TOPOLOGIES:
        for dtype in (jnp.bfloat16, jnp.float32):
            for form, options in FORMS.items():
                row = {"topology": topology, "dtype": jnp.dtype(dtype).name, "form": form}
                rows.append(row | measure(topology, dtype, options))
                print(
                    *(f"{value:.1f}" if isinstance(value, float) else value for value in rows[-1].values()),
                    flush=True,
                )
    write_json(
        RESULT,
        {
            "format": FORMAT,
            "question": "cycles of the final schedule for 1024 x 1024 scores of a head",
            "job": {"channels": CHANNELS, "tokens": TOKENS, "valid": VALID},
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
            "kernels": rows,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
