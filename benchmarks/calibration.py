"""`python -m benchmarks calibrate`: estimates of programs whose times on TPUs others have published.

The programs are JAX's own kernels and XLA's programs, with the published shapes and blocks. The result,
calibration.json, has the measured time of each beside its estimate, and what it is bound by; from these come
the intervals of all other estimates. On a real TPU `python -m benchmarks device` measures the same programs.
"""

import functools
import timeit
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention, matmul, splash_attention

from benchmarks.jobs import spread
from benchmarks.pages import keep, kept
from benchmarks.plan import chips, programs
from benchmarks.plan.links import Links
from benchmarks.plan.programs import MOVES, PRODUCTS, SCHEDULED, STREAMED

EXCHANGES, SHORT, ASSUMED = "exchanges", "kernels of short steps", "kernels, blocks assumed"
WHOLE = "a whole VAE, dtype assumed"
"""What else a published time is bound by; all but exchanges give no interval.

Steps of some hundred cycles are short; no kernel here has them. Blocks and a dtype are assumed where none are
published.
"""
BYTES = (0.87, 1.15)
"""Bounds of measured over estimated for what counts by its bytes.

At the published peak of the bandwidth it takes 0.87 of its estimate. The moves of two published steps on a
v6e, a fifth of each step, leave as much open: 0.1 s of 0.66.
"""


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Compute JAX's own splash attention of (heads, tokens, channels), without a mask."""
    return splash_attention.make_splash_mha(
        mask=splash_attention.MultiHeadMask(
            [splash_attention.FullMask((q.shape[1], k.shape[1]))] * q.shape[0]
        ),
        block_sizes=splash_attention.BlockSizes(block_q=3024, block_kv=2048, block_kv_compute=1024),
        head_shards=1,
        q_seq_shards=1,
    )(q, k, v)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Compute splash attention of (key heads, query heads of each, tokens, channels), without a mask.

    A causal mask leaves each of N tokens, in blocks of 2048 queries, (N + 2048) / 2 keys on average.
    """
    attend = splash_attention.make_splash_mqa(
        mask=splash_attention.MultiHeadMask(
            [splash_attention.FullMask((q.shape[2], k.shape[1]))] * q.shape[1]
        ),
        block_sizes=splash_attention.BlockSizes(block_q=2048, block_kv=1024, block_kv_compute=1024),
        head_shards=1,
        q_seq_shards=1,
    )
    return jax.vmap(attend)(q, k, v)


def _grid(columns: int, rows: int, cores: int = 1) -> list[tuple[int, ...]]:
    """Return the places of a flat grid's devices, in the order of libtpu."""
    return [(x, y, 0, core) for y in range(rows) for x in range(columns) for core in range(cores)]


_GUIDE, _IRONWOOD, _WAN, _MARIN = (
    "jax-ml/jax, docs/pallas/tpu/matmul.ipynb; host, less 0.10 ms of dispatch",
    "AI-Hypercomputer/accelerator-microbenchmarks v1.0, Ironwood; profiler",
    "yangwhale/gpu-tpu-pedia, tpu/Wan2.2/docs/wan_tpu_optimization_guide.md; profiler",
    "marin-community/marin, issue 6736; slope over repetitions",
)
_LARGE = functools.partial(matmul.matmul, block_shape=(512, 1024), block_k=1024)
CASES: dict[str, tuple[Any, list[tuple[int, ...]], float, str, str]] = {
    "v5e: 4096 cubed, large blocks": (_LARGE, [(4096, 4096)] * 2, 0.789e-3, SCHEDULED, _GUIDE),
    "v5e: 8192 cubed, large blocks": (_LARGE, [(8192, 8192)] * 2, 5.999e-3, SCHEDULED, _GUIDE),
    "v5e: 4096 cubed, blocks of 128": (
        functools.partial(matmul.matmul, block_shape=(128, 128), block_k=128),
        [(4096, 4096)] * 2,
        11.67e-3,
        SHORT,
        _GUIDE,
    ),
    "v5e: attention, 2048 tokens, blocks of 128": (
        flash_attention.flash_attention,
        [(32, 8, 2048, 64)] * 3,
        37.6e-3,
        SCHEDULED,
        "jax-ml/jax, issue 24633; host",
    ),
    "v6e: attention, 75,600 tokens of 5 heads": (
        splash,
        [(5, 75_600, 128), *[(5, 75_776, 128)] * 2],
        43.93e-3,
        SCHEDULED,
        _WAN,
    ),
    **{
        f"tpu7x: causal attention, {tokens:,} tokens of {4 * heads} heads, {heads} of keys": (
            grouped,
            [(heads, 4, tokens, 128), *[(heads, (tokens + 2048) // 2, 128)] * 2],
            seconds * heads / 8,  # published for 8, whose schedule is too long to be followed
            ASSUMED,
            "openxla/tokamax, microbenchmarks.pdf of its splash attention; not said",
        )
        for tokens, heads, seconds in (
            (4096, 8, 0.58e-3),
            (8192, 8, 1.93e-3),
            (32_768, 8, 24.75e-3),
            (131_072, 1, 357.2e-3),
        )
    },
    "v6e: decoder of Wan's VAE, 81 frames of 720 x 1280, 8 chips": (
        None,
        [],
        0.8,
        WHOLE,
        "AI-Hypercomputer/maxdiffusion, pull 464, a838e53b; host",
    ),
    "v5e: 4096 cubed, XLA": (jnp.matmul, [(4096, 4096)] * 2, 0.727e-3, PRODUCTS, _GUIDE),
    "v5e: 8192 cubed, XLA": (jnp.matmul, [(8192, 8192)] * 2, 5.947e-3, PRODUCTS, _GUIDE),
    "v5e: 32768 cubed, XLA": (
        jnp.matmul,
        [(32_768, 32_768)] * 2,
        438.2e-3,
        PRODUCTS,
        "AI-Hypercomputer/jetstream-pytorch, pull 168; host",
    ),
    **{
        f"tpu7x: {size} cubed, XLA": (jnp.matmul, [(size, size)] * 2, seconds, PRODUCTS, _IRONWOOD)
        for size, seconds in ((1024, 6.14e-6), (2048, 25.3e-6), (4096, 0.154e-3), (16_384, 9.26e-3))
    },
    "tpu7x: copy of 1 GiB": (jnp.copy, [(2**29,)], 0.671e-3, MOVES, _IRONWOOD),
    **{
        f"v6e: permute of {size >> 10} KiB, 8 chips": (
            ("collective-permute", size, [(i, (i + 1) % 8) for i in range(8)]),
            _grid(2, 4),
            seconds,
            EXCHANGES,
            _MARIN,
        )
        for size, seconds in ((2**26, 776e-6), (2**20, 17.5e-6), (2**14, 5.7e-6))
    },
    "v6e: four all-to-alls of 97 MB, 8 chips": (
        ("all-to-all", 4 * 2 * 75_600 * 5120 / 8, [range(8)]),
        _grid(2, 4),
        4.4e-3,
        EXCHANGES,
        _WAN,
    ),
    **{
        f"tpu7x: all-gather of {size / 1e6:.0f} MB, 4 chips": (
            ("all-gather", size, [(0, 2, 4, 6), (1, 3, 5, 7)]),
            _grid(2, 2, cores=2),
            seconds,
            EXCHANGES,
            _IRONWOOD,
        )
        for size, seconds in ((268.4e6, 2252e-6), (16.8e6, 155e-6), (1.05e6, 21.9e-6))
    },
}
"""By chip and program: what others have published.

These are the function, of bfloat16 arrays, and the arrays' shapes; the measured seconds; what they are bound
by; and where they were published, and the clock. Of an exchange, the first are the arguments of
`Links.collective_seconds`, and the places of the devices; of a whole VAE `wan_vae` has them.
"""


def estimated(name: str, checkout: Path | None = None) -> float | None:
    """Return the estimated seconds of a case of `CASES`; None if the schedule of its kernel is not known.

    `checkout` has maxdiffusion; without one, its program keeps the estimate that it had.
    """
    program, shapes, _seconds, bound, _source = CASES[name]
    generation = name.partition(":")[0]
    if bound == WHOLE:
        if checkout is None:
            return kept("calibration")["rows"].get(name, {}).get("estimate")
        from benchmarks import wan_vae  # it imports Flax

        return wan_vae.estimate(checkout).as_json()["seconds_with_collectives"]
    if bound == EXCHANGES:
        return Links(tuple(shapes), chips.CHIPS[generation]).collective_seconds(*program)
    structs = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    topology = f"{generation}:1x1" + ("x1" if generation == "tpu7x" else "")
    plan = programs.estimate_function(jax.jit(program), topology, structs, name, 1)
    return plan.as_json()["seconds"]


def measured(name: str) -> dict[str, Any]:
    """Run a case of `CASES` on this device, with ones as operands; return the `spread` of its seconds."""
    program, shapes, *_published = CASES[name]
    run, operands = jax.jit(program), [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    _compiling, *times = timeit.repeat(lambda: jax.block_until_ready(run(*operands)), number=1, repeat=12)
    return spread(times)


def cases_of(kind: str) -> list[str]:
    """Return the cases that one device of a kind, by JAX's name, can run."""
    generation = chips.DEVICE_KINDS.get(kind)
    alone = [name for name, case in CASES.items() if case[3] not in (EXCHANGES, WHOLE)]
    return [name for name in alone if name.startswith(f"{generation}:")]


def run(options: Any) -> None:
    """Estimate all cases, and keep them beside their published times.

    Raises:
        ValueError: the checkout has no maxdiffusion.
    """
    checkout = options.maxdiffusion
    if checkout is not None and not (checkout / "src/maxdiffusion").is_dir():
        raise ValueError(f"{checkout} has no src/maxdiffusion: give a checkout of maxdiffusion")
    rows: dict[str, Any] = {}
    for name, (_program, _shapes, seconds, bound, source) in CASES.items():
        estimate = estimated(name, checkout)
        rows[name] = {"seconds": seconds, "estimate": estimate, "bound": bound, "source": source}
        print(name, rows[name], flush=True)
    keep("calibration", {"rows": rows}, "jax", "libtpu")


# The intervals of estimates


def intervals() -> dict[str, tuple[float, float]]:
    """Return, by what a time is bound by, the least and the largest measured over estimated; around 1."""
    rows = kept("calibration")["rows"].values()
    ratios = {
        kind: [1.0, *(row["seconds"] / row["estimate"] for row in rows if row["bound"] == kind)]
        for kind in (PRODUCTS, SCHEDULED, EXCHANGES)
    }
    bounds = {kind: (min(found), max(found)) for kind, found in ratios.items()}
    return bounds | dict.fromkeys((MOVES, STREAMED), BYTES)


def interval(program: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the most seconds of a program's estimate, by `intervals`."""
    parts = program["shares"] | {EXCHANGES: sum(program["collective_seconds"].values())}
    low, high = (sum(seconds * intervals()[kind][end] for kind, seconds in parts.items()) for end in (0, 1))
    return low, high
