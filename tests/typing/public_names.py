"""A strictly typed program's view of the public names: checked by pyright in `make lint`, never run.

`tests/test_public_api.py` checks that none is left out but kernels, of which a few stand for all.
"""
# pyright: strict

from collections.abc import Iterator
from typing import Any, assert_type

import jax
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline
from jax.sharding import Mesh

import jax_kernels
from cogvideox_torchax import (
    AutoencoderKLCogVideoX,
    Bucket,
    Clip,
    ClipConfig,
    DecodeClip,
    EncodeClip,
    Latents,
    check_size,
    describe,
    load_latents,
    load_pipeline,
    make_mesh,
    port,
    preview_writer,
    save_latents,
    save_video,
)
from cogvideox_torchax.flax import (
    FlaxAutoencoderKLCogVideoX,
    FlaxAutoencoderKLCogVideoXConfig,
    FlaxVAEForPipelines,
    Posterior,
    TileSettings,
)


def port_and_run(pipe: CogVideoXPipeline, video: torch.Tensor) -> None:
    mesh = assert_type(make_mesh(dp=1, tp=8), Mesh)
    assert_type(port(pipe, mesh=mesh), CogVideoXPipeline)
    assert_type(load_pipeline("a-directory", mesh=mesh), Any)
    assert_type(load_pipeline("a-directory", pipeline_class=CogVideoXPipeline), CogVideoXPipeline)
    assert_type(save_video(video, "video.mp4", fps=8), None)
    model = describe("a-directory", image=False, clip=False)
    assert_type(check_size(model, *model.size), None)
    vae = assert_type(
        AutoencoderKLCogVideoX.from_pretrained("a-directory", dtype=torch.bfloat16), AutoencoderKLCogVideoX
    )
    vae.place_on(mesh)
    assert_type(vae.encode_stream(video), Iterator[DiagonalGaussianDistribution])
    assert_type(vae.decode_stream(video, output_dtype=torch.uint8), Iterator[torch.Tensor])


def data_set(vae: AutoencoderKLCogVideoX, data: bytes) -> None:
    config = ClipConfig("a-directory", buckets=(Bucket(49, 480, 720), Bucket.parse("49x480x720")))
    latents = assert_type(EncodeClip(config)(Clip("a.mp4", "clips/a.mp4", caption="A cat walks.")), Latents)
    assert_type(save_latents(latents, "cat.safetensors"), None)
    assert_type(load_latents(data), Latents)
    assert_type(DecodeClip(config)(load_latents("cat.safetensors")), torch.Tensor)
    preview_writer(vae, "preview.png", print)(latents.tensor)


def flax_build(video: jax.Array, directory: str) -> None:
    assert_type(FlaxAutoencoderKLCogVideoXConfig.from_dict({}), FlaxAutoencoderKLCogVideoXConfig)
    flax_vae = assert_type(FlaxAutoencoderKLCogVideoX.from_pretrained(directory), FlaxAutoencoderKLCogVideoX)
    flax_vae.tiles = TileSettings(latent_height=30, latent_width=45)
    posterior = assert_type(flax_vae.encode(video), Posterior)
    assert_type(flax_vae.decode(posterior.mode()), jax.Array)
    assert_type(flax_vae.decode_stream(video, output_dtype=jax.numpy.uint8), Iterator[jax.Array])
    assert_type(FlaxVAEForPipelines(flax_vae).mesh, Mesh | None)


def kernels(x: jax.Array, kernel: jax.Array, vector: jax.Array) -> None:
    """Stand for all kernels, whose annotations are alike: a checker sees plain arrays in jaxtyping's."""
    convolved = jax_kernels.conv3d(x, kernel, vector, None, implementation="summed")
    assert_type(convolved, tuple[jax.Array, jax.Array | None])
    norm, moments = jax_kernels.NormParams(vector, vector), jax_kernels.ColumnMoments(x, x)
    assert_type(
        jax_kernels.norm_conv3d(x, norm, kernel, vector, moments=moments, num_groups=8),
        tuple[jax.Array, jax.Array | None, jax_kernels.ColumnMoments | None],
    )
