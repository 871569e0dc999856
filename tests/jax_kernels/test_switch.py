"""A model whose program was compiled with Pallas kernels does not run it once they are switched off."""

import pytest

import jax_kernels
from jax_kernels.common.tiles import SWITCH
from tests import reference


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
