"""While a pipeline's first call compiles its prompt and its steps, threads compile the decoder."""

import threading
import time
from unittest.mock import Mock

import jax.monitoring
import pytest
import torch

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.vae.directions import DECODE
from tests import small_pipelines


@pytest.fixture
def compilers():
    """Return a list that gets, for each compilation of a decoder's chunk, the thread that compiled it."""
    threads = []

    def listen(event, duration_secs, **details):
        if event.endswith("backend_compile_duration") and "DecoderChunk" in str(details.get("fun_name")):
            threads.append(threading.current_thread())

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield threads
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("kind", "version", "mesh"), [("text", "5b", None), ("text", "5b", (2, 4)), ("image", "1.5", None)]
)
@pytest.mark.slow_cases(but=["text-5b-None"])
def test_the_decoder_is_compiled_in_threads_and_only_once(compilers, kind, version, mesh):
    pipe = port(small_pipelines.one_layer(kind, version), mesh=make_mesh(*mesh) if mesh else None)
    inputs = small_pipelines.inputs(kind, num_frames=9, num_inference_steps=1)

    assert pipe(**inputs).frames.shape[1] == 9
    assert len(compilers) == 2  # the first chunk, and the later ones
    assert threading.current_thread() not in compilers
    pipe(**inputs)
    assert len(compilers) == 2


def test_a_decode_waits_for_the_thread(monkeypatch, compilers):
    pipe, compile_lowered = port(small_pipelines.one_layer()), jax.stages.Lowered.compile

    def slowly(lowered):
        time.sleep(1)
        return compile_lowered(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slowly)
    z = torch.zeros(1, pipe.vae.config.latent_channels, 5, 2, 4)
    pipe.vae.compile_ahead(DECODE, z.shape)
    assert len(list(pipe.vae.decode_stream(z))) == 2
    assert len(compilers) == 2
    assert threading.current_thread() not in compilers


@pytest.fixture(scope="module")
def pipe():
    return port(small_pipelines.one_layer())


def test_latents_need_no_decoder(pipe, compilers):
    pipe(**small_pipelines.inputs("text", num_inference_steps=1, output_type="latent"))
    assert not compilers


@pytest.mark.parametrize(
    "wrong", [{"height": 9}, {"prompt": None}, {"num_frames": "5"}, {"no_such_option": 1}, {"image": "none"}]
)
def test_a_refused_call_compiles_nothing(pipe, compilers, wrong):
    with pytest.raises((TypeError, ValueError)):
        pipe(**small_pipelines.inputs("text", **wrong))
    assert not compilers


def test_a_thread_that_fails_leaves_the_error_to_the_call(pipe, monkeypatch, compilers):
    monkeypatch.setattr(jax.stages.Lowered, "compile", Mock(side_effect=RuntimeError("no memory")))
    assert torch.isfinite(pipe(**small_pipelines.inputs("text", num_inference_steps=1)).frames).all()
    assert {*compilers} == {threading.current_thread()}
