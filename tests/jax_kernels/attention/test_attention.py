"""Every form of attention is the definition, at any length; what only fills up a block has no say."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels.attention import op, reference, tpu, xla
from jax_kernels.common.dispatch import Target
from tests.jax_kernels import devices
from tests.reference import largest_error, tpu_interpreter, traced_anew


def inputs(length, *, keys=None, batch=1, heads=2, channels=16, dtype=jnp.float32):
    return devices.drawn(
        *((batch, n, heads, channels) for n in (length, keys or length, keys or length)), dtype=dtype
    )


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks that short sequences fill more than one of."""
    with traced_anew() as patch:
        for name, size in {"QUERIES": (256,), "KEYS": (256,), "CHUNK": 128, "STRIP": 128}.items():
            patch.setattr(tpu, name, size)
        patch.setattr(xla, "QUERY_BLOCK", 64)
        yield


def interpreted(q, k, v, **options):
    """Run `attention` with its kernels for TPUs interpreted."""
    with tpu_interpreter():
        return op.attention(q, k, v, **options)


TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2**-7}

in_every_form = pytest.mark.parametrize("form", ["plain", "transposed"])
"""Every form that can be run on a CPU."""


@in_every_form
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "channels", "dtype"),
    [
        # Queries, keys, heads, channels of a head, dtype.
        pytest.param(1, 1, 1, 32, jnp.float32, id="one token"),
        pytest.param(256, 256, 2, 64, jnp.float32, id="whole blocks"),
        pytest.param(300, 300, 2, 64, jnp.float32, id="a block not filled"),
        pytest.param(40, 300, 3, 16, jnp.float32, id="more keys"),
        pytest.param(300, 40, 1, 128, jnp.float32, id="fewer keys"),
        pytest.param(40, 130, 2, 36, jnp.float32, id="channels that fill no tile"),
        pytest.param(300, 300, 2, 64, jnp.bfloat16, id="sixteen bits"),
        pytest.param(40, 130, 2, 40, jnp.bfloat16, id="sixteen bits, channels that fill no tile"),
    ],
)
@pytest.mark.slow_cases(
    *("whole blocks-*", "a block not filled-*", "more keys-*", "sixteen bits-*"),
    "channels that fill no tile-*",
)
def test_every_form_is_the_definition(queries, keys, heads, channels, dtype, form):
    q, k, v = inputs(queries, keys=keys, batch=2, heads=heads, channels=channels, dtype=dtype)
    got = interpreted(q, k, v, implementation=form)
    assert got.dtype == dtype
    assert largest_error(got, reference.attention(q, k, v)) < TOLERANCES[dtype]


@in_every_form
@pytest.mark.parametrize(("num_keys", "scale"), [(1, None), (256, -0.5), (290, 0.0), (290, 1e-30)])
def test_keys_that_only_pad_have_no_say_whatever_they_hold_at_any_scale(num_keys, scale, form):
    q, k, v = inputs(300)
    want = reference.attention(q, k[:, :num_keys], v[:, :num_keys], scale=scale)
    index = jnp.arange(300)[:, None, None]
    k, v = (jnp.where(index < num_keys, x, jnp.where(index % 2, jnp.nan, 1e38)) for x in (k, v))
    assert (
        largest_error(interpreted(q, k, v, num_keys=num_keys, scale=scale, implementation=form), want) < 1e-5
    )


def drawn(queries=300, keys=600, channels=64):
    """q, k, v as NumPy arrays (1, S, 1, D)."""
    rng = np.random.default_rng(0)
    return [rng.normal(0, 1, (1, n, 1, channels)) for n in (queries, keys, keys)]


def scaled(which, factor, place: slice | int = slice(None)):
    """Return inputs of which one is larger at some positions."""
    arrays = drawn()
    arrays[which][:, place] *= factor
    return arrays


def repelled():
    """Scores of minus infinity but for one key, whichever comes first."""
    q, k, v = drawn()
    q[..., 0], k[..., 0] = 1e20, -1e20
    k[:, 450] = 0
    return q, k, v


def rare(value):
    """Values of one size and either sign, few of them."""
    q, k, v = drawn()
    return q, k, np.sign(v) * (np.random.default_rng(1).random(v.shape) < 0.01) * value


HOSTILE = {
    "nothing out of the ordinary": (drawn, False),
    "a late key a thousand times larger": (lambda: scaled(1, 1000, 500), True),
    "an early key a thousand times larger": (lambda: scaled(1, 1000, 5), False),
    "late keys forty times larger": (lambda: scaled(1, 40, slice(256, None)), True),
    "all equal": (lambda: [np.ones_like(x) for x in drawn()], False),
    "all minus infinity but one": (repelled, True),
    "scores of ten million": (lambda: scaled(0, 1e7), True),
    "queries next to nothing": (lambda: scaled(0, 1e-30), False),
    "values of the largest numbers": (lambda: rare(3.3e38), True),
    "values next to nothing": (lambda: scaled(2, 1e-30), False),
    "late keys much larger, values of the largest numbers": (
        lambda: [*scaled(1, 1000, 500)[:2], rare(3.3e38)[2]],
        True,
    ),
}
"""Queries, keys and values, and whether the maximum of the first keys does not do for some of them."""


@in_every_form
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("make", [make for make, _ in HOSTILE.values()], ids=HOSTILE)
@pytest.mark.slow_cases("*-float32-*")
def test_no_input_makes_it_wrong(make, dtype, form):
    q, k, v = (jnp.asarray(x, dtype) for x in make())
    got, want = interpreted(q, k, v, implementation=form), reference.attention(q, k, v)
    assert largest_error(got, want) < max(TOLERANCES[dtype], 1e-4)


def test_only_what_needs_it_is_computed_again():
    def marked(q_ref, all_k, all_v, y_ref, *_):
        y_ref[...] = jnp.full_like(y_ref, jnp.nan)

    def is_computed_again(make):
        arrays = (jnp.asarray(x, jnp.bfloat16) for x in make())
        return bool(jnp.isnan(interpreted(*arrays, implementation="transposed")).any())

    with traced_anew() as patch:
        patch.setattr(tpu, "_attend_again", marked)
        found = {name: is_computed_again(make) for name, (make, _) in HOSTILE.items()}
    assert found == {name: again for name, (_, again) in HOSTILE.items()}


@pytest.mark.parametrize(
    ("channels", "dtype", "keys", "taken"),
    [
        (256, jnp.float32, 8192, True),
        (257, jnp.float32, 1, False),
        (64, jnp.float16, 1, False),
        (64, jnp.bfloat16, 125_000, True),
        (64, jnp.bfloat16, 135_000, False),
    ],
)
def test_what_the_kernel_takes(channels, dtype, keys, taken):
    q, k = (jax.ShapeDtypeStruct((1, n, 1, channels), dtype) for n in (1, keys))
    assert tpu.is_supported(q, k) == taken


@pytest.mark.parametrize(
    ("channels", "dtype", "capability", "taken"),
    [
        (64, jnp.bfloat16, "9.0", True),
        (128, jnp.float16, "12.0", True),
        (60, jnp.bfloat16, "9.0", False),
        (256, jnp.bfloat16, "9.0", True),
        (264, jnp.bfloat16, "9.0", False),
        (136, jnp.bfloat16, "8.9", False),
        (64, jnp.float32, "9.0", False),
        (64, jnp.bfloat16, "7.5", False),
        (64, jnp.bfloat16, "gfx942", False),  # an AMD GPU
        (64, jnp.bfloat16, None, False),  # no GPU
    ],
)
def test_what_cudnn_takes(channels, dtype, capability, taken, monkeypatch):
    q = jnp.zeros((1, 8, 1, channels), dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if capability else "cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert xla.cudnn_supports(q) == taken


@pytest.mark.parametrize(("queries", "keys", "num_keys"), [(7, 9, 9), (6, 8, 7)])
def test_cudnn_gets_even_lengths_alone(queries, keys, num_keys, monkeypatch):
    in_xla = jax.nn.dot_product_attention

    def in_place_of_cudnn(q, k, v, *, implementation, **options):
        assert (implementation, q.shape[1] % 2, k.shape[1] % 2) == ("cudnn", 0, 0)
        return in_xla(q, k, v, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_place_of_cudnn)
    operands = inputs(queries, keys=keys)
    (y, pull), (want, pull_plain) = (
        jax.vjp(jax.jit(functools.partial(form, scale=0.3, num_keys=num_keys)), *operands)
        for form in (xla.cudnn, reference.attention)
    )
    assert (
        np.max(
            [largest_error(*pair) for pair in zip((y, *pull(want)), (want, *pull_plain(want)), strict=True)]
        )
        < 1e-5
    )


@pytest.mark.parametrize(
    ("batch", "heads", "length", "part"),
    [
        pytest.param(2, 8, 33, (1, 33, 2, 16), id="batch and heads"),
        pytest.param(2, 6, 33, (1, 9, 6, 16), id="heads that tp does not divide"),
        pytest.param(1, 8, 33, (1, 17, 2, 16), id="one video"),
        pytest.param(1, 6, 35, (1, 5, 6, 16), id="neither"),
    ],
)
def test_over_a_mesh_each_device_has_its_own_part_and_no_number_changes(batch, heads, length, part):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    arrays, shapes = inputs(length, batch=batch, heads=heads), []

    def spy(q, k, v, *, scale):
        shapes.append(q.shape)
        return xla.plain(q, k, v, scale=scale)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def run(*arrays):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return op._over_mesh(functools.partial(spy, scale=0.25), mesh.abstract_mesh, *arrays)

    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in arrays]
    assert largest_error(run(*placed), reference.attention(*arrays)) < 1e-6
    assert shapes == [part]


def test_cudnn_is_left_out_where_kernels_are_off(monkeypatch):
    monkeypatch.setattr(xla, "cudnn_supports", lambda q: True)
    q = jnp.zeros(1)
    found = {pallas: op._fastest(Target("cuda", pallas=pallas), q, q) for pallas in (True, False)}
    assert found == {True: "cudnn", False: "plain"}
