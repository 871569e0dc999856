"""Final schedules of single kernels, compiled for TPUs that need not exist: tables of docs/.

    python -m benchmarks.schedules        # some minutes; then python -m benchmarks draw

The floor is the FLOPs, of a convolution by its direct form, over the chip's peak. The column of bytes is
operands and results over the bandwidth. Cycles of attention are for 1024 x 1024 scores of a head, without the
second pass.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_kernels
from benchmarks.pages import keep
from benchmarks.plan.chips import CHIPS
from benchmarks.plan.programs import estimate_function

LARGE, MEDIUM, SMALL, SMALLEST = (480, 720), (240, 360), (120, 180), (60, 90)
CONVOLUTIONS = {
    # (frames, (rows, columns), channels in and out, whether latents modulate the norm)
    "decoder, 128 to 128": (8, LARGE, 128, True),
    "decoder, 256 to 256": (8, MEDIUM, 256, True),
    "decoder, 256 to 256, four frames": (4, SMALL, 256, True),
    "decoder, 512 to 512, two frames": (2, SMALLEST, 512, True),
    "decoder, 128 to 128, an image": (1, LARGE, 128, True),
    "decoder, 256 to 256, an image": (1, MEDIUM, 256, True),
    "encoder, 128 to 128": (8, LARGE, 128, False),
    "encoder, 256 to 256, four frames": (4, MEDIUM, 256, False),
    "encoder, 256 to 256, two frames": (2, SMALL, 256, False),
}
UPSAMPLERS = {
    # (frames, (rows, columns), channels, whether the number of frames is doubled too); sizes before it
    "upsampler, 256 to 256": (8, MEDIUM, 256, False),
    "upsampler, 256 to 256, four frames to eight": (4, SMALL, 256, True),
    "upsampler, 512 to 512, two frames to four": (2, SMALLEST, 512, True),
}
ATTENTION = {
    # (topology, whether the queries are already scaled)
    "v6e": ("v6e:1x1", True),
    "v6e, any scale": ("v6e:1x1", False),
    "v5e": ("v5e:1x1", True),
    "v5p": ("v5p:1x1x1", True),
    "tpu7x": ("tpu7x:1x1x1", True),
}
HEADS, CHANNELS, TOKENS, PADDED = 12, 64, 45_104, 46_080
LINEAR = {
    # (topology, weights, as `port` takes them)
    f"{chip}, {weights or 'bfloat16'}": (f"{chip}:1x1", weights)
    for chip in ("v6e", "v5e")
    for weights in (None, "int8", "int8-dynamic")
}
WIDTH, LENGTH = 3072, 17_792  # of 5b's tokens, with padding


def schedule(topology: str, function: Callable[..., Any], *shapes: Sequence[int]) -> dict[str, float]:
    """Return "schedule_ms" and "bytes_ms" of the one Pallas kernel in a function of bfloat16 arrays.

    It is compiled for one device of the topology. `function` takes arrays of the `shapes` as one list.
    """
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    plan = estimate_function(jax.jit(function), topology, (structs,), "kernel", 1)
    # An upsampler's program has small kernels besides, which are not counted.
    (name,) = plan.kernel_times.keys() & {"attention", "norm_conv3d", "upsampled"}
    kernel = plan.kernel_times[name]
    return {
        "schedule_ms": 1e3 * (kernel["schedule_seconds"] or math.nan),
        "bytes_ms": 1e3 * kernel["bytes_seconds"],
    }


def convolution(frames: int, size: tuple[int, int], channels: int, modulated: bool) -> dict[str, float]:
    """Return the times on v6e of a norm, SiLU, a convolution and a residual, for a case of `CONVOLUTIONS`.

    One frame is an image, and more are a chunk that takes the cache of the chunk before.
    """
    x, kernel = (1, frames, *size, channels), (3, 3, 3, channels, channels)
    latents = [(1, -(-frames // 4), 60, 90, 16), *[(16, channels), (channels,)] * 2] if modulated else []
    cache = [] if frames == 1 else [(1, 2, *size, channels)]

    def run(arrays: list[jax.Array]) -> Any:
        """Run the kernel on arrays in the order of the shapes below; one bias serves norm and convolution."""
        x, residual, kernel, weight, bias, *rest = arrays
        norm = jax_kernels.NormParams(weight, bias, *rest[: len(latents)])
        cache = rest[-1] if frames > 1 else None
        return jax_kernels.norm_conv3d(
            x, norm, kernel, bias, cache, num_groups=32, residual=residual, first_frame_alone=frames == 1
        )

    found = schedule("v6e:1x1", run, x, x, kernel, (channels,), (channels,), *latents, *cache)
    return found | {"floor_ms": _floor(math.prod(kernel) * math.prod(x[:4]))}


def upsampler(frames: int, size: tuple[int, int], channels: int, expand_time: bool) -> dict[str, float]:
    """Return the times on v6e of an upsampler, for a case of `UPSAMPLERS`."""
    x, kernel = (1, frames, *size, channels), (3, 3, channels, channels)
    run = functools.partial(jax_kernels.upsample, expand_time=expand_time)
    found = schedule("v6e:1x1", lambda arrays: run(*arrays), x, kernel, (channels,))
    return found | {"floor_ms": _floor(math.prod(kernel) * math.prod(x[:4]) * (1 + expand_time))}


def attention(topology: str, scaled: bool) -> dict[str, float]:
    """Return the times of attention, and its cycles for 1024 x 1024 scores of a head.

    `scaled` queries hold the scale for base-2 exponentials, so a scale of log(2) is left, which the kernel
    need not apply.
    """
    run = functools.partial(
        jax_kernels.attention_transposed, scale=math.log(2) if scaled else None, num_keys=TOKENS
    )
    found = schedule(topology, lambda arrays: run(*arrays), *[(1, HEADS, CHANNELS, PADDED)] * 3)
    cycles = found["schedule_ms"] / 1e3 * CHIPS[topology.partition(":")[0]].clock
    return found | {"cycles_of_1024_x_1024": cycles / HEADS / (PADDED / 1024) ** 2}


def linear(topology: str, weights: str | None) -> dict[str, float]:
    """Return the milliseconds of the products of a layer of 5b, both passes of guidance, by part.

    With "int8-dynamic" they include the rounding of tokens.
    """

    def milliseconds(
        op: Callable[..., Any], inputs: int, outputs: int, *others: jax.ShapeDtypeStruct, count: int = 1
    ) -> float:
        """Return the time of `count` products with the same tokens; `others` are the op's other arguments."""

        def run(x: Any, matrices: Any, bias: Any, scale: Any, *others: Any) -> Any:
            options = {"scale": scale, "dynamic": weights == "int8-dynamic"} if weights else {}
            return [op(x, matrix, bias, *others, **options) for matrix in matrices]

        tokens = (2 * LENGTH, inputs) if count > 1 else (2, LENGTH, inputs)
        matrix = jax.ShapeDtypeStruct((outputs, inputs), jnp.int8 if weights else jnp.bfloat16)
        vector = jax.ShapeDtypeStruct((outputs,), jnp.float32)
        structs = jax.ShapeDtypeStruct(tokens, jnp.bfloat16), [matrix] * count, vector, vector, *others
        return 1e3 * estimate_function(jax.jit(run), topology, structs, "products", 1).seconds

    residual, gate = (jax.ShapeDtypeStruct((2, size, WIDTH), jnp.bfloat16) for size in (LENGTH, 2))
    first_patch = jax.ShapeDtypeStruct((), jnp.int32)
    project = functools.partial(jax_kernels.split_linear, parts=1)
    return {
        "queries, keys and values": milliseconds(project, WIDTH, WIDTH, count=3),
        "ff1 with GELU": milliseconds(jax_kernels.linear_gelu, WIDTH, 4 * WIDTH),
        "ff2 with gate and residual": milliseconds(
            jax_kernels.gated_linear, 4 * WIDTH, WIDTH, residual, gate, first_patch
        ),
    }


def _floor(products: float) -> float:
    """Return the milliseconds of so many multiply-adds at the peak of a v6e."""
    return 1e3 * 2 * products / CHIPS["v6e"].flops


if __name__ == "__main__":
    keep(
        "schedules",
        {
            "convolutions": {
                **{name: convolution(*case) for name, case in CONVOLUTIONS.items()},
                **{name: upsampler(*case) for name, case in UPSAMPLERS.items()},
            },
            "attention": {name: attention(*case) for name, case in ATTENTION.items()},
            "linear": {name: linear(*case) for name, case in LINEAR.items()},
        },
        *("jax", "libtpu"),
    )
