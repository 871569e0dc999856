"""The contract of every op, in one table: each way to run it equals its reference.

The ways are each dtype, sharded, and differentiated; an op with a Pallas kernel runs it on a TPU, until it is
switched off. Contracts of one op alone are tested in that op's folder.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jax_kernels
from cogvideox_torchax.vae.tolerances import BFLOAT16_RMS_RATIO
from jax_kernels.common import tiles
from tests import reference
from tests.jax_kernels.devices import check_rounding, on_mesh
from tests.processes import ROOT

HOW = {"implementation", "split", "in_place", "tile"}
"""Arguments that say how an op runs or rounds, not what it computes: op and reference share all others."""


@dataclass(frozen=True, eq=False)
class Case:
    """An op at one set of sizes.

    Attributes:
        op: the function.
        shapes: of what it takes by position: None, shapes, or tuples of them; integers are drawn for `int`.
        options: by name.
        arrays: shapes of what it takes by name.
        implementations: of its own, besides what it chooses.
        large: shapes of the same, of which a TPU takes the work to its Pallas kernel; None where it has none.
        kernels: the Pallas kernels that a TPU then runs.
        activations: whether columns may be split over devices.
        exact: whether all that it rounds to bfloat16 is its result, but for what the reference rounds too.
        on_a_tpu: options with which the reference rounds bfloat16 as the Pallas kernel does.
    """

    op: Callable[..., Any]
    shapes: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, tuple[int, ...]] = field(default_factory=dict)
    implementations: tuple[str, ...] = ()
    large: tuple[Any, ...] | None = None
    kernels: frozenset[str] = frozenset()
    activations: bool = True
    exact: bool = True
    on_a_tpu: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> Callable[..., Any]:
        """The op's reference."""
        if isinstance(self.op, functools.partial):
            return functools.partial(self.op.func, op=reference_of(self.op.keywords["op"]))
        return reference_of(self.op)


def reference_of(op):
    """Return the definition of an op: what has its name in the file `reference` of its folder."""
    return getattr(importlib.import_module(f"{op.__module__.rpartition('.')[0]}.reference"), op.__name__)


X, IMAGE, Z, V, CONVOLVED = (1, 4, 4, 8, 16), (1, 1, 4, 8, 16), (1, 2, 2, 4, 4), (16,), (1, 4, 4, 8, 16)
FIVE = 1, 5, 4, 8, 16
KERNEL, KERNEL_2D, MATRIX = (3, 3, 3, 16, 16), (3, 3, 16, 16), (4, 16)
SPATIAL = V, V, MATRIX, V, MATRIX, V
LARGE, LARGE_Z, WIDE = (1, 2, 128, 256, 128), (1, 1, 16, 32, 16), (128,)
LARGE_SPATIAL = WIDE, WIDE, (16, 128), WIDE, (16, 128), WIDE
GROUPS, LAST = {"num_groups": 4}, {"num_groups": 4, "channel_axis": -1}
HEADS, TOKENS, ROWS, KINDS = (1, 40, 2, 16), (7, 16), (2, 40, 16), (2, 2, 16)
LARGE_ROWS, LARGE_KINDS = (2, 40, 128), (2, 2, 128)
TABLES = (40, 16), (40, 16), (30, 16), (40, 64)


def norm(x, zq, *vectors_and_rest, op, **options):
    """Call `norm_conv3d` with its norm's parts by position: six for a spatial norm, two for a plain one."""
    count = 2 if zq is None else 6
    parts, rest = vectors_and_rest[:count], vectors_and_rest[count:]
    of_norm = jax_kernels.NormParams(*parts[:2], *(() if zq is None else (zq, *parts[2:])))
    return op(x, of_norm, *rest, **options)[:2]


NORMED = functools.partial(norm, op=jax_kernels.norm_conv3d)
FORMS = ("direct", "summed", "filtered", "folded", "patches")

CASES = {
    "attention": Case(
        jax_kernels.attention,
        (HEADS, HEADS, HEADS),
        {"num_keys": 37},
        large=(HEADS, HEADS, HEADS),
        kernels=frozenset({"attention"}),
        activations=False,
        exact=False,
    ),
    "attention_transposed": Case(
        jax_kernels.attention_transposed,
        ((1, 2, 16, 40),) * 3,
        {"scale": 0.3},
        large=((1, 2, 16, 40),) * 3,
        kernels=frozenset({"attention"}),
        activations=False,
        exact=False,
    ),
    "qk_norm_rope": Case(
        jax_kernels.qk_norm_rope,
        ((1, 40, 48), V, V, *TABLES[:2]),
        {"heads": 3, "scale": 0.3},
        large=((1, 40, 48), V, V, *TABLES[:2]),
        kernels=frozenset({"prepare"}),
        activations=False,
    ),
    "qk_norm_rope, values": Case(jax_kernels.qk_norm_rope, ((1, 40, 48),), {"heads": 3}, activations=False),
    "qk_norm_rope, no bias": Case(
        jax_kernels.qk_norm_rope, ((1, 40, 48), V), {"heads": 3}, activations=False
    ),
    "qk_norm_rope, no positions": Case(
        jax_kernels.qk_norm_rope,
        ((1, 40, 48), V, V),
        {"heads": 3},
        large=((1, 40, 48), V, V),
        kernels=frozenset({"prepare"}),
        activations=False,
    ),
    "apply_rotary": Case(jax_kernels.apply_rotary, (HEADS, TABLES[2], TABLES[2]), activations=False),
    "conv3d": Case(jax_kernels.conv3d, (X, KERNEL, V)),
    "conv3d, a cache and a residual": Case(
        jax_kernels.conv3d,
        (X, KERNEL, V, (1, 2, 4, 8, 16)),
        arrays={"residual": CONVOLVED},
        implementations=FORMS,
    ),
    "conv3d, an image": Case(jax_kernels.conv3d, (IMAGE, KERNEL, V), arrays={"residual": IMAGE}),
    "conv3d, five frames": Case(jax_kernels.conv3d, (FIVE, KERNEL, V), arrays={"residual": FIVE}),
    "conv3d, five columns": Case(jax_kernels.conv3d, (X, (3, 3, 5, 16, 16), V), implementations=FORMS),
    "conv3d, one pixel": Case(jax_kernels.conv3d, (X, (1, 1, 1, 16, 16), V)),
    "group_norm": Case(
        jax_kernels.group_norm,
        (X, V, V),
        LAST | {"activation": "silu"},
        large=(LARGE, WIDE, WIDE),
        kernels=frozenset({"column_moments"}),
    ),
    "group_norm, five frames": Case(jax_kernels.group_norm, (FIVE, V, V), LAST),
    "group_norm, no affine": Case(jax_kernels.group_norm, (X, None, None), LAST),
    "group_norm, audio": Case(jax_kernels.group_norm, ((2, 16, 7), V, V), GROUPS, activations=False),
    "group_norm, an image": Case(jax_kernels.group_norm, ((2, 5, 6, 16), V, V), LAST, activations=False),
    "group_norm, channels first": Case(
        jax_kernels.group_norm, ((2, 16, 3, 5, 6), V, V), GROUPS, activations=False
    ),
    "group_norm, one pixel": Case(
        jax_kernels.group_norm, ((1, 16, 1, 1, 1), V, V), GROUPS, activations=False
    ),
    "spatial_norm": Case(
        jax_kernels.spatial_norm,
        (X, Z, *SPATIAL),
        GROUPS | {"activation": "silu"},
        large=(LARGE, LARGE_Z, *LARGE_SPATIAL),
        kernels=frozenset({"column_moments"}),
    ),
    "spatial_norm, a lone first frame": Case(
        jax_kernels.spatial_norm,
        (FIVE, (1, 3, 2, 4, 4), *SPATIAL),
        GROUPS | {"first_frame_alone": True},
    ),
    "norm_conv3d": Case(
        NORMED,
        (X, Z, *SPATIAL, KERNEL, V, (1, 2, 4, 8, 16)),
        GROUPS,
        arrays={"residual": CONVOLVED},
        large=(LARGE, LARGE_Z, *LARGE_SPATIAL, (3, 3, 3, 128, 128), WIDE),
        kernels=frozenset({"column_moments", "norm_conv3d"}),
        on_a_tpu={"tile": 2},
    ),
    "norm_conv3d, a plain norm at the start": Case(
        # Two chunks in two turns; of four blocks of rows the first two only fill the memory.
        NORMED,
        ((1, 4, 8, 64, 16), None, V, V, (3, 3, 3, 16, 64), (64,)),
        GROUPS,
        on_a_tpu={"tile": 2},
    ),
    "norm_conv3d, a lone first frame": Case(
        NORMED,
        ((1, 3, 4, 8, 16), (1, 3, 2, 4, 4), *SPATIAL, KERNEL, V),
        GROUPS | {"first_frame_alone": True},
    ),
    "upsample": Case(
        jax_kernels.upsample,
        (X, KERNEL_2D, V),
        {"expand_time": True},
        large=(LARGE, (3, 3, 128, 128), WIDE),
        kernels=frozenset({"upsampled"}),
    ),
    "upsample, a lone first frame": Case(
        jax_kernels.upsample,
        (FIVE, KERNEL_2D, None),
        {"expand_time": True, "first_frame_alone": True},
    ),
    "downsample": Case(jax_kernels.downsample, (X, KERNEL_2D, V), {"compress_time": True}),
    "downsample, a lone first frame": Case(
        jax_kernels.downsample,
        (FIVE, KERNEL_2D, None),
        {"compress_time": True, "first_frame_alone": True},
    ),
    "silu": Case(jax_kernels.silu, (FIVE,), {"time_axis": 1}, activations=False),
    "gelu": Case(jax_kernels.gelu, (TOKENS,), activations=False),
    "linear": Case(jax_kernels.linear, (TOKENS, (12, 16), (12,)), activations=False),
    "linear, no bias": Case(jax_kernels.linear, (TOKENS, (12, 16), None), activations=False),
    "split_linear": Case(
        jax_kernels.split_linear,
        (TOKENS, (768, 16), (768,)),
        {"parts": 3},
        large=((1024, 128), (768, 128), (768,)),
        kernels=frozenset({"linear"}),
        activations=False,
    ),
    "split_linear, parts of half a unit more": Case(
        jax_kernels.split_linear,
        (TOKENS, (768, 16), (768,)),
        {"parts": 2},
        large=((1024, 128), (768, 128), (768,)),
        kernels=frozenset({"linear"}),
        activations=False,
    ),
    "linear_gelu": Case(
        jax_kernels.linear_gelu,
        (ROWS, (256, 16), (256,)),
        large=(LARGE_ROWS, (256, 128), (256,)),
        kernels=frozenset({"linear_gelu"}),
        activations=False,
        exact=False,
    ),
    "gated_linear": Case(
        jax_kernels.gated_linear,
        (ROWS, (320, 16), (320,), (2, 40, 320), (2, 2, 320), int),  # one unit and a quarter
        large=(LARGE_ROWS, (640, 128), (640,), (2, 40, 640), (2, 2, 640), int),
        kernels=frozenset({"gated_linear"}),
        activations=False,
        exact=False,
    ),
    "gated_linear, transposed": Case(
        jax_kernels.gated_linear,
        ((2, 16, 40), (256, 16), (256,), (2, 40, 256), (2, 2, 256), int),
        {"transposed": True},
        large=((2, 128, 40), (256, 128), (256,), (2, 40, 256), (2, 2, 256), int),
        kernels=frozenset({"gated_linear"}),
        activations=False,
        exact=False,
    ),
    "layer_norm": Case(jax_kernels.layer_norm, (TOKENS, V, V), activations=False),
    "layer_norm, no affine": Case(jax_kernels.layer_norm, (TOKENS, None, None), activations=False),
    "adaptive_layer_norm": Case(
        jax_kernels.adaptive_layer_norm,
        (ROWS, V, V, KINDS, KINDS, int),
        large=(LARGE_ROWS, WIDE, WIDE, LARGE_KINDS, LARGE_KINDS, int),
        kernels=frozenset({"modulated_norm"}),
        activations=False,
    ),
    "gated_residual": Case(jax_kernels.gated_residual, (ROWS, ROWS, KINDS, int), activations=False),
}


def drawn(case: Case, dtype: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return a case's positional and named arguments. Tables of angles are float32 always."""
    rng = np.random.default_rng(0)

    def draw(shape):
        if shape is None or shape is int:
            return None if shape is None else jnp.asarray(11)
        array = rng.normal(0.3, 1, shape)
        if shape in TABLES:  # each angle for either channel of its pair
            return jnp.asarray(np.repeat(array[:, ::2], 2, axis=1), jnp.float32)
        return jnp.asarray(array, dtype)

    return [draw(shape) for shape in case.shapes], {name: draw(shape) for name, shape in case.arrays.items()}


WAYS = [(name, way) for name, case in CASES.items() for way in ("chosen", "on a TPU", *case.implementations)]


@contextlib.contextmanager
def run_by(way: str):
    """Options that have an op run this way, its Pallas kernels interpreted."""
    by_choice = {"chosen": contextlib.nullcontext, "on a TPU": reference.interpreted_kernels}
    with by_choice.get(way, reference.tpu_interpreter)():
        yield {} if way in by_choice else {"implementation": way}


every_way = pytest.mark.parametrize(("name", "way"), WAYS, ids=[f"{name}-{way}" for name, way in WAYS])


def results(case, dtype, way, rounding=contextlib.nullcontext()):  # noqa: B008
    """Return an op's result by one way, in a context that rounds otherwise, and its reference."""
    operands, arrays = drawn(case, dtype)
    with run_by(way) as how, rounding:
        found = case.op(*operands, **arrays, **case.options, **how)
    want = wanted(case, dtype, bool(case.on_a_tpu) and way == "on a TPU" and dtype == jnp.bfloat16)
    return zip(*map(jax.tree.leaves, (found, want)), strict=True)


@functools.cache
def wanted(case, dtype, as_on_a_tpu=False):
    """Return the reference's result, which every way of a case is compared with."""
    operands, arrays = drawn(case, dtype)
    plain = functools.partial(case.plain, **case.options, **(case.on_a_tpu if as_on_a_tpu else {}))
    # In one program, to compile little; XLA would leave out roundings in between.
    return jax.jit(plain, compiler_options={"xla_allow_excess_precision": False})(*operands, **arrays)


@every_way
def test_float32_is_the_reference(name, way):
    for got, want in results(CASES[name], jnp.float32, way):
        assert got.dtype == jnp.float32
        assert reference.largest_error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [
        *(
            (name, ((2, frames, 4, width, 16), KERNEL_2D, V), {option: in_time, "first_frame_alone": alone})
            for name, option in {"upsample": "expand_time", "downsample": "compress_time"}.items()
            for frames, width in ((1, 6), (2, 7), (3, 7), (4, 6))
            for in_time, alone in itertools.product((False, True), repeat=2)
            if name == "upsample" or not in_time or (frames - alone) % 2 == 0  # pairs alone become one
        ),
        # Latent frames to frames, as they meet in the decoder: a first batch of 1 to 3 latents, after 0 to 2
        # doublings.
        *(
            (
                "spatial_norm",
                ((2, frames, 3 * scale, 5 * scale, 16), (2, latent_frames, 3, 5, 4), *SPATIAL),
                GROUPS | {"activation": activation, "first_frame_alone": frames % 2 == 1},
            )
            for scale, activation, lengths in (
                (1, None, [(1, 1), (3, 9)]),
                (8, "silu", [(1, 1), (2, 2), (2, 4), (2, 8), (3, 3), (3, 5), (3, 9)]),
            )
            for latent_frames, frames in lengths
        ),
    ],
)
@pytest.mark.parametrize("way", ["chosen", "on a TPU"])
def test_frames_of_every_length_and_width_are_the_reference(name, shapes, options, way):
    for got, want in results(replace(CASES[name], shapes=shapes, options=options), jnp.float32, way):
        assert reference.largest_error(got, want) < 1e-6


@every_way
@pytest.mark.slow_cases("norm_conv3d*-on a TPU")
def test_bfloat16_sums_in_float32_and_is_rounded_once(name, way):
    for got, want in results(CASES[name], jnp.bfloat16, way):
        # Sums in another order round few of them otherwise; arithmetic in 16 bits, half of them.
        check_rounding(got, want, share=0.05 if CASES[name].exact else 0.5)


def layers_of(width):
    """Return the operands' shapes of the ops of a transformer's layer, of so many channels."""
    rows, kinds, vector, head = (2, 40, width), (2, 2, width), (width,), (64,)
    return {
        "adaptive_layer_norm": (rows, vector, vector, kinds, kinds, int),
        "linear_gelu": (rows, (4 * width, width), (4 * width,)),
        "gated_linear": (rows, (width, width), vector, rows, kinds, int),
        "split_linear": (rows[1:], (3 * width, width), (3 * width,)),
        "qk_norm_rope": (rows, head, head, (40, 64), (40, 64)),
    }


LAYERS = [
    *(
        (name, shapes, {"heads": width // 64} if name == "qk_norm_rope" else {})
        for width in (1920, 3072)
        for name, shapes in layers_of(width).items()
    ),
    ("attention_transposed", ((1, 1, 64, 2300),) * 3, {}),
    *(
        ("group_norm", ((1, frames, 4, 24, c), (c,), (c,)), {})
        for frames, c in ((1, 128), (1, 256), (1, 512), (2, 512), (4, 512), (4, 256), (8, 256), (8, 128))
    ),
    *(
        (
            "upsample",
            ((1, frames, 2, 12, c), (3, 3, c, c), (c,)),
            {"expand_time": expand, "first_frame_alone": frames == 1},
        )
        for frames, c, expand in (
            *((2, 512, True), (4, 256, True), (8, 256, False)),
            *((1, 512, True), (1, 256, False)),
        )
    ),
]
"""The published layers that have a Pallas kernel, but for `norm_conv3d`; of frames a band."""


@pytest.mark.parametrize(
    ("name", "shapes", "options"), LAYERS, ids=[f"{name} of {shapes[0]}" for name, shapes, _ in LAYERS]
)
@pytest.mark.slow
def test_a_published_layer_in_128_lanes_is_the_reference(name, shapes, options):
    case = replace(CASES[name], shapes=shapes, options=CASES[name].options | options)
    for got, want in results(case, jnp.bfloat16, "on a TPU", mock.patch.object(tiles, "LANES", 128)):
        check_rounding(got, want, share=0.05 if case.exact else 0.5)


ERRORS = {
    number: {jnp.bfloat16: float(on_v5e), jnp.float32: float(on_v6e)}
    for number, on_v5e, on_v6e in re.findall(
        r"^\| `(\w+)` \|[^|]*\| ([\d.]+) \|[^|]*\| ([\d.]+) \|",
        (ROOT / "docs/kernels.md").read_text(),
        re.MULTILINE,
    )
}
"""The largest errors of a TPU's numbers, in units of the last place: of v5e for bfloat16, else of v6e."""
RELIES_ON = {
    "norm_conv3d": {"tanh", "rsqrt", "pack_elementwise"},
    "linear_gelu": {"tanh"},
    "attention": {"exp2", "div", "dot_general"},
    "qk_norm_rope": {"rsqrt"},
    "adaptive_layer_norm": {"rsqrt"},
    "group_norm": {"rsqrt", "div"},
}
"""By a case with a Pallas kernel: the numbers in its result that a TPU rounds otherwise."""


def rounded_otherwise(number, dtype):
    """Return a context in which a number has the largest error of a TPU's."""
    if number == "pack_elementwise":  # to the nearest; of two equally near, here to the one away from zero
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
        return mock.patch.object(reference, "rounded_bits", lambda x: (bits(x) + 0x8000) >> 16 << 16)
    primitive, error = getattr(jax.lax, f"{number}_p"), ERRORS[number][dtype] * 2.0**-23
    return reference.inexact(primitive, error, of_operands=number == "dot_general")


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    [
        pytest.param(name, number, dtype, id=f"{name}-{number}-{dtype.__name__}")
        for name, numbers in RELIES_ON.items()
        for number, dtype in itertools.product(sorted(numbers), (jnp.bfloat16, jnp.float32))
        if (dtype == jnp.bfloat16 and number != "dot_general")
        or (dtype == jnp.float32 and name not in ("norm_conv3d", "linear_gelu"))
    ],
)
@pytest.mark.slow_cases(
    *("norm_conv3d-*", "attention-*", "qk_norm_rope-*", "adaptive_layer_norm-rsqrt-float32"),
)
def test_the_contract_holds_with_what_a_tpu_rounds_otherwise(name, number, dtype):
    case = CASES[name]
    operands, arrays = jax.tree.map(lambda x: x.astype(jnp.float32), drawn(case, dtype))
    exact = jax.tree.leaves(case.plain(*operands, **arrays, **case.options))
    as_usual, rounded = (
        [got for got, _ in results(case, dtype, "on a TPU", rounding)]
        for rounding in (contextlib.nullcontext(), rounded_otherwise(number, dtype))
    )
    for usual, got, want in zip(as_usual, rounded, exact, strict=True):
        if dtype == jnp.float32:
            assert reference.largest_error(got, usual) > 0
            assert reference.largest_error(got, want) < 1e-5
        else:
            errors = (np.sqrt(np.mean(np.square(np.asarray(y, np.float64) - want))) for y in (got, usual))
            assert next(errors) <= BFLOAT16_RMS_RATIO * next(errors)


def slopes(case, function, **how):
    """Return the derivatives of a weighted sum of results."""
    operands, arrays = drawn(case, jnp.float32)
    # Not of angles, of which a pair has one, nor of where a kind of tokens begins.
    floats = [place for place, shape in enumerate(case.shapes) if shape not in (None, int, *TABLES)]

    def loss(*operands):
        found = function(*operands, **arrays, **case.options, **how)
        return sum(jnp.vdot(part, jnp.cos(jnp.arange(part.size))) for part in jax.tree.leaves(found))

    return jax.jit(jax.grad(loss, floats))(*operands)


wanted_slopes = functools.cache(lambda case: slopes(case, case.plain))


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, way in WAYS if way == "chosen" or CASES[name].kernels]
)
@pytest.mark.slow_cases("norm_conv3d, *-chosen")
def test_its_derivatives_are_the_references(name, way):
    case = CASES[name]
    with run_by(way) as how:
        found = slopes(case, case.op, **how)
    for got, want in zip(found, wanted_slopes(case), strict=True):
        assert reference.largest_error(got, want) < 2e-5


@pytest.mark.parametrize(
    ("name", "way", "padded"),
    [
        pytest.param(name, way, padded, id=f"{name}-{way}-{filling}")
        for name, way in WAYS
        if CASES[name].activations and (way != "on a TPU" or name == "spatial_norm")
        for filling, padded in {"filled": 1, "padded": 2}.items()
        if way == "chosen" or padded == 2
    ],
)
@pytest.mark.slow_cases("norm_conv3d, *-filled", "spatial_norm, *-filled")
def test_shards_are_the_whole_and_their_padding_is_clear(name, way, padded):
    case = CASES[name]
    how = {"implementation": way} if way in case.implementations else {}
    operands, arrays = drawn(case, jnp.float32)
    with reference.as_on_a_tpu() if way == "on a TPU" else contextlib.nullcontext():
        found = on_mesh(functools.partial(case.op, **case.options, **how), 1, padded, 1, 4)(
            *operands, **arrays
        )
    for got, want in zip(*map(jax.tree.leaves, (found, wanted(case, jnp.float32))), strict=True):
        real = want.shape[3]
        assert got.shape[3] == padded * real
        assert reference.largest_error(got[:, :, :, :real], want) < 1e-5
        assert not jnp.any(got[:, :, :, real:])


def test_widths_that_pad_to_the_same_number_are_told_apart():
    case = CASES["conv3d"]
    for real in (5, 8):
        x, kernel, bias = drawn(replace(case, shapes=((1, 4, 4, 4 * real, 16), KERNEL, V)), jnp.float32)[0]
        found, _ = on_mesh(case.op, real, 8, 1, 4)(x, kernel, bias)
        assert reference.largest_error(found[:, :, :, : 4 * real], case.plain(x, kernel, bias)[0]) < 1e-5
        assert not jnp.any(found[:, :, :, 4 * real :])


@pytest.mark.parametrize(
    ("name", "kernel", "shards", "words"),
    [
        ("conv3d", (3, 3, 7, 16, 16), 4, "reaches 3 columns to either side got shards of 2"),
        ("downsample", KERNEL_2D, 8, "downsample got shards of 1 columns"),
    ],
)
def test_a_shard_too_narrow_for_a_kernel_is_refused(name, kernel, shards, words):
    op = functools.partial(CASES[name].op, **CASES[name].options)
    with pytest.raises(ValueError, match=words):
        on_mesh(op, 1, 1, 1, shards)(jnp.ones(X), jnp.ones(kernel), None)


def lowered(case, shapes, dtype, platform):
    """Return the text of a case for a platform, from an earlier tracing if possible."""

    def struct(shape):
        if shape is None or shape is int:
            return None if shape is None else jax.ShapeDtypeStruct((), jnp.int32)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if shape in TABLES else dtype)

    run = jax.jit(lambda operands, arrays: case.op(*operands, **arrays, **case.options))
    arrays = {
        name: struct(shape if shapes is case.shapes else shapes[0]) for name, shape in case.arrays.items()
    }
    return (
        run.trace([struct(shape) for shape in shapes], arrays).lower(lowering_platforms=(platform,)).as_text()
    )


def kernels_on_a_tpu(case, shapes, dtype):
    """Return the names of the Pallas kernels that a case runs on a TPU."""
    return set(re.findall(r'kernel_name = "(\w+)"', lowered(case, shapes, dtype, "tpu")))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.large])
def test_a_tpu_runs_its_pallas_kernels_until_they_are_switched_off(name, monkeypatch):
    case = CASES[name]
    for switch, wanted in (("on", case.kernels), ("off", set()), ("on", case.kernels)):
        monkeypatch.setenv(tiles.SWITCH, switch)
        assert kernels_on_a_tpu(case, case.large, jnp.bfloat16) == wanted


SAME_TIME = {"expand_time": False}
TAKEN = [
    ("group_norm", (1, 8, 128, 256, 128), jnp.bfloat16, {}, "column_moments"),
    ("group_norm", (1, 8, 128, 256, 128), jnp.float32, {}, "column_moments"),
    ("group_norm", (1, 8, 128, 256, 128), jnp.float16, {}, None),  # which Mosaic cannot load
    ("group_norm", (1, 8, 128, 256, 64), jnp.bfloat16, {}, None),  # half a tile of channels
    ("group_norm", (1, 6000, 128, 256, 128), jnp.float32, {}, None),  # more of a pixel than a step can hold
    ("group_norm", (1, 8, 64, 64, 128), jnp.bfloat16, {}, None),  # small: XLA chooses another order
    ("group_norm", (8, 128, 256, 128), jnp.bfloat16, {}, None),  # pictures
    ("group_norm", (1, 1, 16, 24, 128), jnp.bfloat16, {}, "image_moments"),
    ("group_norm", (1, 1, 16, 24, 128), jnp.float32, {}, None),  # of which no frame is computed by itself
    ("group_norm", (1, 1, 16, 24, 64), jnp.bfloat16, {}, None),  # half a tile of channels
    ("group_norm", (1, 1, 16, 4096, 128), jnp.bfloat16, {}, None),  # more of a row than a step can hold
    ("group_norm", (1, 2, 16, 24, 128), jnp.bfloat16, {}, None),
    ("upsample", (1, 8, 64, 64, 128), jnp.bfloat16, SAME_TIME, "upsampled"),
    ("upsample", (1, 4, 64, 64, 128, 256), jnp.bfloat16, {}, "upsampled"),
    ("upsample", (1, 2, 32, 32, 128), jnp.bfloat16, {}, "upsampled"),
    ("upsample", (1, 2, 31, 32, 128), jnp.bfloat16, {}, None),  # small
    ("upsample", (1, 8, 64, 64, 128), jnp.float32, SAME_TIME, None),  # whose products are not the unit's own
    ("upsample", (1, 6, 64, 64, 128), jnp.bfloat16, SAME_TIME, "upsampled"),  # two at a time
    ("upsample", (1, 8, 64, 64, 128), jnp.bfloat16, {}, None),  # sixteen frames
    ("upsample", (1, 8, 64, 64, 64, 128), jnp.bfloat16, SAME_TIME, None),  # half a tile of channels
    ("upsample", (1, 8, 64, 64, 128, 64), jnp.bfloat16, SAME_TIME, None),
    ("upsample", (1, 8, 8, 1600, 512), jnp.bfloat16, SAME_TIME, None),  # too wide for VMEM
    ("upsample", (1, 1, 64, 72, 128), jnp.bfloat16, SAME_TIME, "upsampled"),  # in bands
    ("upsample", (1, 1, 66, 72, 128), jnp.bfloat16, {"first_frame_alone": True}, "upsampled"),
    ("upsample", (1, 1, 65, 72, 128), jnp.bfloat16, SAME_TIME, "upsampled"),
    ("upsample", (1, 1, 64, 72, 128), jnp.bfloat16, {}, None),  # doubled in time
]
"""An op, its frames (then other outputs than channels), its options, and a TPU's Pallas kernel, or None."""


@pytest.mark.parametrize(("name", "shape", "dtype", "options", "kernel"), TAKEN)
def test_frames_that_a_pallas_kernel_takes_go_through_it_on_a_tpu(name, shape, dtype, options, kernel):
    case = replace(CASES[name], options=CASES[name].options | options)
    more = (None,) if name == "group_norm" else ((3, 3, shape[4], shape[-1]),)
    assert kernels_on_a_tpu(case, (shape[:5], *more, None), dtype) == {kernel} - {None}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", CASES)
def test_float32_asks_for_full_precision(name, platform):
    assert all(
        "HIGHEST" in line
        for line in reference.products_of(lowered(CASES[name], CASES[name].shapes, jnp.float32, platform))
    )


@pytest.mark.parametrize("name", sorted({*jax_kernels.__all__} - {"ColumnMoments", "NormParams"}))
def test_every_op_has_a_case_and_a_reference_of_its_own_signature(name):
    op = getattr(jax_kernels, name)
    one, other = (
        [argument for argument in inspect.signature(function).parameters if argument not in HOW]
        for function in (op, reference_of(op))
    )
    assert one == other
    assert any(case.split(",")[0] == name for case in CASES)


def cut(*place):
    return lambda x: x[place]


SHORT, HALF = cut(..., slice(1)), cut(slice(None), slice(None), slice(3))
REFUSALS = [
    ("attention", {0: cut(0)}, "it takes (N, S, H, D)"),
    ("attention", {1: cut(..., slice(8)), 2: cut(..., slice(8))}, "it takes (N, S, H, D)"),
    ("attention", {2: cut(slice(None), slice(3))}, "it takes (N, S, H, D)"),
    ("attention", {2: lambda v: v.astype(jnp.bfloat16)}, "all of one dtype"),
    ("attention", {"num_keys": 0}, "40 keys, 0 of them real"),
    ("attention", {"num_keys": 41}, "40 keys, 41 of them real"),
    ("attention", {"implementation": "fast"}, "'fast' is not one of"),
    ("qk_norm_rope", {"heads": 5}, "5 heads"),
    ("qk_norm_rope", {0: cut(0)}, "it takes (N, S, H D)"),
    ("qk_norm_rope", {1: SHORT}, "one number"),
    ("qk_norm_rope", {1: None}, "a bias and no weight"),
    ("qk_norm_rope", {4: None}, "neither is given"),
    ("qk_norm_rope", {3: cut(slice(39))}, "cos and sin"),
    ("apply_rotary", {1: cut(..., slice(8))}, "apply_rotary got"),
    ("conv3d", {0: cut(..., slice(3))}, "3 channels for a kernel that takes 16"),
    ("conv3d", {0: cut(0)}, "N T H W I"),
    ("conv3d", {1: cut(slice(None), slice(2))}, "must be odd"),
    ("conv3d", {2: SHORT}, "conv3d got a bias of shape (1,) for 16 channels"),
    ("conv3d", {"implementation": "fast"}, "'fast' is not one of"),
    ("conv3d, a cache and a residual", {3: cut(slice(None), slice(1))}, "got a cache float32"),
    ("conv3d, a cache and a residual", {3: lambda c: c.astype(jnp.bfloat16)}, "got a cache bfloat16"),
    ("conv3d, a cache and a residual", {"residual": SHORT}, "residual of shape"),
    ("group_norm", {0: cut(0, 0, 0)}, "rank 2"),
    ("group_norm", {"num_groups": 3}, "16 channels in 3 groups"),
    ("group_norm", {1: SHORT}, "group_norm got a weight of shape (1,) for 16 channels"),
    ("group_norm", {2: SHORT}, "group_norm got a bias of shape (1,) for 16 channels"),
    ("group_norm", {"activation": "relu"}, "'relu'"),
    ("spatial_norm", {0: HALF}, "whole multiples"),
    ("spatial_norm", {0: cut(..., slice(7), slice(None))}, "whole multiples"),
    ("spatial_norm", {0: cut(slice(None), slice(3))}, "whole multiples"),
    ("spatial_norm", {1: cut(slice(None), slice(None), slice(0))}, "whole multiples"),
    (
        "spatial_norm, a lone first frame",
        {1: cut(slice(None), slice(1))},
        "whole multiples",
    ),  # none for the rest
    *[
        ("spatial_norm", {place: SHORT}, f"spatial_norm got a {name} of shape")
        for place, name in enumerate(("weight", "bias", "kernel", "bias_y", "kernel", "bias_b"), start=2)
    ],
    ("spatial_norm", {"activation": "relu"}, "'relu'"),
    ("norm_conv3d", {1: cut(..., slice(3), slice(None))}, "whole multiples"),
    ("norm_conv3d", {8: cut(..., slice(3), slice(None))}, "channels for a kernel"),
    ("norm_conv3d, a plain norm at the start", {2: SHORT}, "got a weight of shape (1,) for 16 channels"),
    ("upsample", {1: cut(slice(2), slice(2))}, "upsample got a kernel of 2 x 2 pixels: both must be odd"),
    ("upsample", {1: cut(slice(None), slice(2))}, "upsample got a kernel of 3 x 2 pixels: both must be odd"),
    ("upsample", {2: SHORT}, "a bias of shape (1,) for 16 channels"),
    ("upsample", {0: cut(..., slice(3))}, "got 3 channels for a kernel that takes 16"),
    ("downsample", {1: cut(slice(2), slice(2))}, "downsample got a kernel of 2 x 2 pixels: it must"),
    ("downsample", {2: SHORT}, "a bias of shape (1,) for 16 channels"),
    ("downsample", {0: cut(0)}, "it needs N T H W I and kh kw I O"),
    ("downsample", {"first_frame_alone": True}, "got 4 frames: those after the first must be pairs"),
    ("linear", {0: cut(..., slice(8))}, "8 channels for a weight that takes 16"),
    ("linear", {2: SHORT}, "linear got a bias of shape (1,) for 12 channels"),
    *[
        (name, {"dynamic": True}, f"{name} got dynamic=True for a weight of float32 without a scale: give")
        for name in ("linear", "split_linear", "linear_gelu", "gated_linear")
    ],
    (
        "linear",
        {"dynamic": True, "scale": jnp.ones(12)},
        "linear got dynamic=True for a weight of float32 with a scale: give one of int8 with a scale",
    ),
    ("layer_norm", {1: SHORT}, "layer_norm got a weight of shape (1,) for 16 channels"),
    ("adaptive_layer_norm", {2: SHORT}, "adaptive_layer_norm got a bias of shape (1,) for 16 channels"),
]
"""A case, what is put in the place of an argument, and what the error says."""


@pytest.mark.parametrize(("name", "changes", "words"), REFUSALS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(name, changes, words):
    operands, arrays = drawn(CASES[name], jnp.float32)
    options = {**arrays, **CASES[name].options}
    for place, change in changes.items():
        given: Any = operands if isinstance(place, int) else options
        given[place] = change(given[place]) if callable(change) else change
    with pytest.raises(ValueError, match=re.escape(words)):
        CASES[name].op(*operands, **options)


def test_a_shape_that_is_not_as_annotated_is_found():
    with pytest.raises(jaxtyping.TypeCheckError):
        jax_kernels.group_norm(jnp.zeros((2, 8, 5)), jnp.ones((8, 1)), None, num_groups=4)
