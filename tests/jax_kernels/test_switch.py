"""A model whose program was compiled with Pallas kernels does not run it once they are switched off."""

import pytest

import jax_kernels
from jax_kernels.common.tiles import SWITCH
from tests import reference


@pytest.mark.parametrize(("build", "mode"), [("torchax", "off"), ("flax", "off"), ("torchax", "direct")])
def test_a_model_runs_no_program_that_was_compiled_before(build, mode, monkeypatch):
    vae = reference.built(build, reference.small_vae(**reference.TWO_LEVELS))
    z = reference.latents(1, height=2, width=2)
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
