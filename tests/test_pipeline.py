"""A ported pipeline is the pipeline: the same frames as stock diffusers, from diffusers' own call."""

import copy
import functools

import pytest
import torch

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.tolerances import relative_error
from tests import pipelines

TOLERANCE = 1e-4
"""Of the frames after four steps, in float32."""

CASES = {
    "text to video, 5b": ("text", "5b"),
    "text to video, 2b": ("text", "2b"),
    "text to video, 1.5": ("text", "1.5"),
    "image to video, 5b": ("image", "5b"),
    "image to video, 1.5": ("image", "1.5"),
    "video to video": ("video", "5b"),
    "control": ("control", "5b"),
}
MESHES = {"one device": None, "1x8": (1, 8), "2x4": (2, 4)}


@functools.cache
def shared(placement):
    """What every case has alike, so that it is compiled once: VAE and text encoder; None for the stock
    ones."""
    vae, text_encoder = pipelines.vae(), pipelines.text_encoder()
    if placement is None:
        return vae, text_encoder
    pipe = pipelines.build(vae=vae, text_encoder=text_encoder)
    port(pipe, mesh=make_mesh(*MESHES[placement]) if MESHES[placement] else None)
    return pipe.vae, pipe.text_encoder


def pipeline(kind, version, placement=None, **components):
    """A pipeline of stock diffusers, or, for a placement, a ported one of the same weights."""
    vae, text_encoder = shared(placement)
    pipelines.configured(vae, version)
    pipe = pipelines.build(kind, version, vae=vae, text_encoder=text_encoder, **components)
    if placement is not None:
        port(pipe, mesh=make_mesh(*MESHES[placement]) if MESHES[placement] else None)
    return pipe


def frames(pipe, kind, **overrides):
    return pipe(**pipelines.inputs(kind, **overrides)).frames


def placements():
    """Each case on one device with and without guidance; over the meshes so that each meets both."""
    for name, (kind, version) in CASES.items():
        yield pytest.param(kind, version, "one device", (6.0, 1.0), id=name)
        if name == "text to video, 2b":
            continue
        both = name == "text to video, 5b"
        yield pytest.param(kind, version, "2x4", (6.0, 1.0) if both else (6.0,), id=f"{name}, 2x4")
        if name != "image to video, 1.5":
            yield pytest.param(kind, version, "1x8", (1.0, 6.0) if both else (1.0,), id=f"{name}, 1x8")


@pytest.mark.parametrize(("kind", "version", "placement", "guidance_scales"), list(placements()))
def test_the_frames_are_those_of_stock_diffusers(kind, version, placement, guidance_scales):
    stock, ported = pipeline(kind, version), pipeline(kind, version, placement)
    for guidance_scale in guidance_scales:
        want = frames(stock, kind, guidance_scale=guidance_scale)
        got = frames(ported, kind, guidance_scale=guidance_scale)
        assert got.shape == want.shape
        assert want.std() > 0.01
        assert relative_error(got, want) < TOLERANCE
