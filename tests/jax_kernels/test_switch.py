"""A model whose program was compiled with Pallas kernels does not run it once they are switched off."""

import pytest

import jax_kernels
from jax_kernels.common.tiles import SWITCH
from tests import reference


@pytest.mark.parametrize(("build", "mode"), [("jax_vae", "off"), ("flax_vae", "off"), ("jax_vae", "direct")])
def test_a_model_runs_no_program_that_was_compiled_before(build, mode, request, monkeypatch):
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
    monkeypatch.setenv(SWITCH, mode)
    assert new_traces() > 0
    monkeypatch.setenv(SWITCH, "on")
    assert new_traces() == 0
