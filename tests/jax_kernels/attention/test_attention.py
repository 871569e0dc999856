"""Every form of attention is the definition, at any length; what only fills up a block has no say."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_kernels
from jax_kernels import attention as public_attention
from jax_kernels.attention import reference, tpu, xla
from tests.reference import largest_error

attention = importlib.import_module("jax_kernels.attention.op")  # the package has the function by that name


def inputs(length, *, keys=None, batch=1, heads=2, channels=16, dtype=jnp.float32, seed=0):
    shapes = [(batch, n, heads, channels) for n in (length, keys or length, keys or length)]
    parts = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(parts, shapes, strict=True)]


def scale_of(q):
    return q.shape[-1] ** -0.5


def flash(q, k, v, scale=None):
    """The TPU's kernel, interpreted."""
    with pltpu.force_tpu_interpret_mode():
        return tpu.flash(q, k, v, scale=scale or scale_of(q))


LENGTHS = [1, 128, 300]
"""Less than a block, a block, and what does not fill the last one."""


@pytest.mark.parametrize("length", LENGTHS)
def test_the_tpus_kernel_takes_any_length(length, monkeypatch):
    monkeypatch.setattr(tpu, "QUERY_BLOCK", 128)
    monkeypatch.setattr(tpu, "KEY_BLOCK", 128)
    q, k, v = inputs(length)
    assert largest_error(flash(q, k, v), reference.attention(q, k, v)) < 1e-5


def test_padding_that_is_not_masked_would_fail(monkeypatch):
    q, k, v = inputs(130)
    monkeypatch.setattr(tpu, "_real", lambda length, padded: jnp.ones(padded, jnp.int32))
    assert largest_error(flash(q, k, v), reference.attention(q, k, v)) > 0.1


def test_keys_may_be_more_or_fewer_than_queries():
    q, k, v = inputs(40, keys=200)
    want = reference.attention(q, k, v)
    assert largest_error(flash(q, k, v), want) < 1e-5
    assert largest_error(public_attention(q, k, v), want) < 1e-5


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("length", [130])
def test_it_is_torchs_scaled_dot_product_attention(length, scale):
    q, k, v = inputs(length, batch=2)
    heads_first = [torch.from_numpy(np.array(x)).transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(1, 2)
    assert largest_error(public_attention(q, k, v, scale=scale), want) < 1e-5
    assert largest_error(reference.attention(q, k, v, scale=scale), want) < 1e-5
    if scale:
        assert largest_error(flash(q, k, v, scale=scale), want) < 1e-5


@pytest.mark.parametrize("length", [64, 65, 150])
def test_blocks_of_queries_change_nothing(length, monkeypatch):
    monkeypatch.setattr(xla, "QUERY_BLOCK", 64)
    q, k, v = inputs(length)
    got = xla.plain(q, k, v, scale=scale_of(q))
    assert got.shape == q.shape
    assert largest_error(got, reference.attention(q, k, v)) < 1e-6


@pytest.mark.parametrize("form", [flash, public_attention])
def test_scores_and_softmax_are_float32_in_sixteen_bits(form):
    q, k, v = inputs(130, dtype=jnp.bfloat16)
    q = q * 20  # a sharp softmax, which scores rounded to bfloat16 would get wrong
    got = form(q, k, v)
    assert got.dtype == jnp.bfloat16
    want = reference.attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert largest_error(got, want) < 2**-7
    rounded = jnp.einsum("nshd,nkhd->nhsk", q, k).astype(jnp.bfloat16) * jnp.bfloat16(scale_of(q))
    wrong = jnp.einsum("nhsk,nkhd->nshd", jax.nn.softmax(rounded, -1), v)
    assert largest_error(wrong, want) > 2**-6


def test_large_scores_do_not_overflow():
    q, k, v = inputs(20)
    got = public_attention(q * 1e3, k * 1e3, v)
    assert bool(jnp.isfinite(got).all())


SPLITS = {
    "batch and heads": (2, 8, 33, PartitionSpec("dp", None, "tp", None)),
    "heads that tp does not divide": (2, 6, 33, PartitionSpec("dp", "tp", None, None)),
    "one video": (1, 8, 33, PartitionSpec(None, "dp", "tp", None)),
    "neither": (1, 6, 35, PartitionSpec(None, ("dp", "tp"), None, None)),
}


@pytest.mark.parametrize(("batch", "heads", "length", "spec"), SPLITS.values(), ids=SPLITS)
def test_over_a_mesh_each_device_has_its_own_part_and_no_number_changes(batch, heads, length, spec):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    q, k, v = inputs(length, batch=batch, heads=heads)
    want = reference.attention(q, k, v)
    shapes = []

    def spy(q, k, v, *, scale):
        shapes.append(q.shape)
        return xla.plain(q, k, v, scale=scale)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def run(*arrays):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attention._over_mesh(
                functools.partial(spy, scale=scale_of(q)), mesh.abstract_mesh, *arrays
            )

    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in (q, k, v)]
    assert largest_error(run(*placed), want) < 1e-6
    sizes = [1 if names is None else np.prod([mesh.shape[n] for n in np.atleast_1d(names)]) for names in spec]
    assert shapes == [tuple(int(-(-n // parts)) for n, parts in zip(q.shape, sizes, strict=True))]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotary_positions_are_diffusers_own_and_text_has_none(dtype):
    from diffusers.models.embeddings import apply_rotary_emb

    x, *_ = inputs(12, batch=2, dtype=dtype)
    angles = np.repeat(np.random.default_rng(0).uniform(-9, 9, (7, 8)), 2, axis=1).astype(np.float32)
    tables = [np.cos(angles), np.sin(angles)]
    plain = torch.from_numpy(np.array(x, np.float32)).to(
        torch.float32 if dtype == jnp.float32 else torch.bfloat16
    )
    want = apply_rotary_emb(plain[:, 5:], [torch.from_numpy(t) for t in tables], sequence_dim=1).float()
    got = jax_kernels.rotate(x, *map(jnp.asarray, tables))
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.array(got[:, :5], np.float32), np.array(x[:, :5], np.float32))
    assert largest_error(got[:, 5:], want) < (1e-6 if dtype == jnp.float32 else 2**-8)
    with pytest.raises(ValueError, match="rotate got"):
        jax_kernels.rotate(x, jnp.ones((13, 16)), jnp.ones((13, 16)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), "it takes"),
        (lambda q, k, v: (q, k[..., :8], v[..., :8]), "it takes"),
        (lambda q, k, v: (q, k, v[:, :3]), "it takes"),
        (lambda q, k, v: (q, k, v.astype(jnp.bfloat16)), "all of one dtype"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        public_attention(*change(*inputs(8)))
