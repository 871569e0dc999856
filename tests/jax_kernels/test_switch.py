"""JAX_KERNELS_PALLAS=off leaves the work of every Pallas kernel to XLA, from the next call on."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_kernels
from jax_kernels.common.tiles import SWITCH
from tests import reference


def structs(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def norm_conv3d(x, zq, vector, kernel):
    norm = jax_kernels.Norm(vector, vector, zq, kernel[0, 0, 0, :16], vector, kernel[0, 0, 1, :16], vector)
    return jax_kernels.norm_conv3d(x, norm, kernel, vector, num_groups=32)


def spatial_norm(x, zq, vector, kernel):
    return jax_kernels.spatial_norm(x, zq, vector, vector, *[kernel, vector] * 2, num_groups=32)


LARGE = 1, 2, 128, 256, 128
HEADS = 1, 2, 64, 300
GROUPED = {"num_groups": 32, "channel_axis": -1, "activation": "silu"}
KERNELS = {
    "attention": (jax_kernels.attention, structs(*[(1, 300, 2, 64)] * 3)),
    "attention_transposed": (jax_kernels.attention_transposed, structs(*[HEADS] * 3)),
    "group_norm": (functools.partial(jax_kernels.group_norm, **GROUPED), structs(LARGE, (128,), (128,))),
    "norm_conv3d": (norm_conv3d, structs(LARGE, (1, 1, 16, 32, 16), (128,), (3, 3, 3, 128, 128))),
    "prepare": (functools.partial(jax_kernels.prepare, heads=2), structs((1, 300, 128))),
    "spatial_norm": (spatial_norm, structs(LARGE, (1, 1, 16, 32, 16), (128,), (16, 128))),
    "upsample": (
        functools.partial(jax_kernels.upsample, expand_time=True),
        structs(LARGE, (3, 3, 128, 128), (128,)),
    ),
}
"""Each function with a Pallas kernel, and what it takes."""


@pytest.mark.parametrize(("function", "operands"), KERNELS.values(), ids=KERNELS)
def test_it_holds_for_shapes_that_have_been_traced(function, operands, monkeypatch):
    def pallas_calls():
        fresh = jax.jit(lambda *operands: function(*operands))
        text = fresh.trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
        return text.count("@tpu_custom_call")

    assert pallas_calls() > 0
    monkeypatch.setenv(SWITCH, "off")
    assert pallas_calls() == 0
    monkeypatch.setenv(SWITCH, "on")
    assert pallas_calls() > 0


@pytest.mark.parametrize("build", ["jax_vae", "flax_vae"])
def test_a_model_runs_no_program_that_was_compiled_before(build, request, monkeypatch):
    vae, z = request.getfixturevalue(build), reference.latents(1)
    kernel, traced = jax_kernels.upsample, []

    def counted(*operands, **options):
        traced.append(operands[0].shape)
        return kernel(*operands, **options)

    def new_traces():
        traced.clear()
        list(vae.decode_stream(z))
        return len(traced)

    monkeypatch.setattr(jax_kernels, "upsample", counted)
    new_traces()
    assert new_traces() == 0
    monkeypatch.setenv(SWITCH, "off")
    assert new_traces() > 0
    monkeypatch.setenv(SWITCH, "on")
    assert new_traces() == 0
