"""How long does half of a residual block take as one kernel, and an upsampler, by the final schedule?

python benchmarks/conv_schedule.py run     # compiles each shape: a minute each; needs no TPU
python benchmarks/conv_schedule.py         # draws what is kept into docs/performance.md

The large levels of a steady chunk of 480 x 720 pixels in bfloat16. The schedule counts bundles that run;
nothing waits in it. Its bytes are those that the kernel moves, over the memory's bandwidth.
"""

import importlib.metadata
import sys
from typing import Any

import jax
import jax.numpy as jnp
from attention_schedule import PAGE, measure

from cogvideox_torchax.files.reports import fill, load, table, write_json
from cogvideox_torchax.plan.chips import CHIPS
from jax_kernels.common.tiles import LANES
from jax_kernels.norm_conv3d import tpu
from jax_kernels.resample.upsampled import upsampled

RESULT = PAGE.parent.parent / "benchmarks" / "results" / "conv-schedule.json"
FORMAT = "cogvideox-torchax conv schedule 1"
DECODER, ENCODER = 60 * 90, 1
"""How many coefficients each frame has."""

CASES = {
    "decoder, 128 to 128": (8, 480, 720, 128, 128, True, DECODER),
    "decoder, 128 to 128, no residual": (8, 480, 720, 128, 128, False, DECODER),
    "decoder, 256 to 128, no residual": (8, 480, 720, 256, 128, False, DECODER),
    "decoder, 128 to 3, no residual": (8, 480, 720, 128, 3, False, DECODER),
    "decoder, 256 to 256": (8, 240, 360, 256, 256, True, DECODER),
    "decoder, 256 to 256, four frames": (4, 120, 180, 256, 256, True, DECODER),
    "decoder, 512 to 256, four frames, no residual": (4, 120, 180, 512, 256, False, DECODER),
    "decoder, 512 to 512, two frames": (2, 60, 90, 512, 512, True, DECODER),
    "decoder, 128 to 128, an image": (1, 480, 720, 128, 128, True, DECODER),
    "decoder, 256 to 128, an image, no residual": (1, 480, 720, 256, 128, False, DECODER),
    "decoder, 256 to 256, an image": (1, 240, 360, 256, 256, True, DECODER),
    "encoder, 128 to 128": (8, 480, 720, 128, 128, True, ENCODER),
    "encoder, 256 to 256, four frames": (4, 240, 360, 256, 256, True, ENCODER),
    "encoder, 256 to 256, two frames": (2, 120, 180, 256, 256, True, ENCODER),
}
"""Frames, rows, columns, channels in and out, whether a residual is added, coefficients of a frame."""

UPSAMPLERS = {
    "upsampler, 256 to 256": (8, 240, 360, 256, False),
    "upsampler, 256 to 256, four frames to eight": (4, 120, 180, 256, True),
    "upsampler, 512 to 512, two frames to four": (2, 60, 90, 512, True),
}
"""Frames, rows and columns before, channels, whether frames are doubled."""


def measure_case(name: str, topology: str = "v6e:1x1") -> dict[str, Any]:
    """One shape; activations and caches come and go in the order that a program keeps them in."""
    frames, height, width, channels, outputs, added, cells = CASES[name]
    cell = width // 90
    registers = 90 if cell * frames % 8 == 0 else -(-width * frames // 8)
    grid = (1, 1) if cells == 1 else (60, registers)

    still = frames == 1  # the start of a video, before which there is no cache

    def run(x: Any, cache: Any, multiplier: Any, offset: Any, kernel: Any, bias: Any, *residual: Any) -> Any:
        x, cache, *others = (part.transpose(2, 3, 0, 1, 4) for part in (x, cache, *residual))
        added = others[0] if others else None
        past = None if still else cache
        y, latest, moments = tpu.convolved(x, multiplier, offset, past, added, kernel, bias)
        return y.transpose(2, 3, 0, 1, 4), latest.transpose(2, 3, 0, 1, 4), moments

    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    coefficients = (1, *grid, 8, channels), float32
    operands = [
        ((height, width, 1, frames, channels), bfloat16),
        ((height, width, 1, 2, channels), bfloat16),
        coefficients,
        coefficients,
        ((3, 3, 3, channels, outputs), bfloat16),
        ((outputs,), bfloat16),
        *[((height, width, 1, frames, outputs), bfloat16)] * added,
    ]
    chip = CHIPS[topology.partition(":")[0]]
    pixels = height * width
    given = outputs + -outputs % LANES
    moved = 2 * pixels * (frames * (channels + given * (1 + added)) + (2 if still else 4) * channels)
    return {
        "shape": name,
        "topology": topology,
        "flops_ms": 1e3 * 2 * 27 * channels * outputs * frames * pixels / chip.flops,
        "bytes_ms": 1e3 * moved / chip.bandwidth,
        **measure(topology, run, *operands),
    }


def measure_upsampler(name: str, topology: str = "v6e:1x1") -> dict[str, Any]:
    """One shape, as `measure_case`; FLOPs are those of the kernel, a quarter of a doubled frame's."""
    frames, height, width, channels, expand_time = UPSAMPLERS[name]

    def run(x: Any, kernel: Any, bias: Any) -> Any:
        x = x.transpose(2, 3, 0, 1, 4)
        return upsampled(x, kernel, bias, None, None, expand_time).transpose(2, 3, 0, 1, 4)

    bfloat16 = jnp.dtype(jnp.bfloat16)
    operands = [
        ((height, width, 1, frames, channels), bfloat16),
        ((3, 3, channels, channels), bfloat16),
        ((channels,), bfloat16),
    ]
    chip = CHIPS[topology.partition(":")[0]]
    given = frames * (1 + expand_time)
    return {
        "shape": name,
        "topology": topology,
        "flops_ms": 1e3 * 2 * 9 * channels**2 * given * height * width / chip.flops,
        "bytes_ms": 1e3 * 2 * channels * height * width * (frames + 4 * given) / chip.bandwidth,
        **measure(topology, run, *operands),
    }


def run() -> None:
    """Compiles all, and keeps what has been compiled so far."""
    report: dict[str, Any] = {
        "format": FORMAT,
        "question": "milliseconds of the final schedule for a norm's modulation, SiLU and convolution",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        "kernels": [],
    }
    for name in (*CASES, *UPSAMPLERS):
        report["kernels"].append((measure_case if name in CASES else measure_upsampler)(name))
        print(report["kernels"][-1], flush=True)
        write_json(RESULT, report)


def draw() -> None:
    rows = [
        (row["shape"], *(f"{row[key]:.2f}" for key in ("estimate_ms", "flops_ms", "bytes_ms")))
        for row in load(RESULT, FORMAT)["kernels"]
    ]
    fill(PAGE, "convolution", table(("v6e, ms", "schedule", "FLOPs over the peak", "bytes"), rows))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1:] == ["run"]:
        run()
    draw()
