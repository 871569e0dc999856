"""Frames of a ported pipeline are diffusers' own, to the last bit; pictures leave the device as bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

from cogvideox_torchax import port, runtime
from cogvideox_torchax.pipelines.frames import FrameProcessor
from tests import small_pipelines


def bits(results):
    """Return what a processor has returned as an array, and its type."""
    if isinstance(results, list):
        return np.stack([[np.asarray(picture) for picture in video] for video in results]), results[0][0].mode
    return np.asarray(results.float() if isinstance(results, torch.Tensor) else results), results.dtype


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_frames_are_converted_as_by_diffusers(output_type, dtype, device):
    frames = (torch.randn(2, 3, 5, 24, 32, generator=torch.Generator().manual_seed(0)) * 0.7).to(dtype)
    given = frames.clone()
    got, kind = bits(FrameProcessor().postprocess_video(given.to(device), output_type))
    want, wanted_kind = bits(VideoProcessor().postprocess_video(frames, output_type))
    assert np.array_equal(got, want)
    assert kind == wanted_kind
    assert torch.equal(given, frames)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", small_pipelines.CLASSES)
@pytest.mark.slow_cases(but=["text-dtype1", "video-dtype0"])
def test_pictures_leave_the_device_as_bytes_in_chunks_and_are_those_of_the_frames(kind, dtype, monkeypatch):
    pipe = port(small_pipelines.one_layer(kind).to(dtype))
    seen, convert = [], FrameProcessor.postprocess_video
    monkeypatch.setattr(
        FrameProcessor,
        "postprocess_video",
        lambda *args, **rest: seen.append(rest["video"]) or convert(*args, **rest),
    )
    made = [
        pipe(**small_pipelines.inputs(kind, num_inference_steps=2, output_type=output_type)).frames
        for output_type in ("pil", "pt")
    ]
    in_bytes, in_floats = seen
    assert in_bytes.dtype == torch.uint8
    assert in_floats.dtype == dtype
    want = VideoProcessor().postprocess_video(in_floats, "pil")
    assert np.array_equal(bits(made[0])[0], bits(want)[0])
    # Outside of such a call frames are floats, whoever asks for them.
    latents = torch.zeros(1, 2, 16, 4, 8, dtype=dtype).to("jax")
    assert pipe.decode_latents(latents).dtype == dtype
    assert not any(map(runtime.on_jax, seen))


def test_a_call_for_pictures_in_another_thread_makes_no_bytes_of_these_frames():
    pipe = port(small_pipelines.one_layer("text"))
    begun, done, pool, pictures = threading.Event(), threading.Event(), ThreadPoolExecutor(1), []

    def run(output_type, callback):
        given = small_pipelines.inputs("text", num_inference_steps=2, output_type=output_type)
        return pipe(**given, callback_on_step_end=callback).frames

    def wait(_pipe, _step, _timestep, tensors):
        begun.set()
        done.wait(60)
        return tensors

    def call_for_pictures(_pipe, step, _timestep, tensors):
        if step == 1:
            pictures.append(pool.submit(run, "pil", wait))
            assert begun.wait(60)
        return tensors

    with pool:
        try:
            floats = run("pt", call_for_pictures)
        finally:
            done.set()
        assert isinstance(floats, torch.Tensor)
        assert bits(pictures[0].result())[1] == "RGB"
