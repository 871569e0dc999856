"""The public names, each with its module; `__init__.py` reads them here."""

from cogvideox_torchax.cli.preview import preview_writer as preview_writer
from cogvideox_torchax.dataset.clip import (
    Bucket as Bucket,
    Clip as Clip,
    ClipConfig as ClipConfig,
    DecodeClip as DecodeClip,
    EncodeClip as EncodeClip,
)
from cogvideox_torchax.files.latents import Latents as Latents, load as load_latents, save as save_latents
from cogvideox_torchax.files.video import save_video as save_video
from cogvideox_torchax.pipelines.description import check_size as check_size, describe as describe
from cogvideox_torchax.pipelines.loading import load_pipeline as load_pipeline
from cogvideox_torchax.porting import port as port
from cogvideox_torchax.sharding import make_mesh as make_mesh
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX as AutoencoderKLCogVideoX

__version__: str
__all__ = [
    "AutoencoderKLCogVideoX",
    "Bucket",
    "Clip",
    "ClipConfig",
    "DecodeClip",
    "EncodeClip",
    "Latents",
    "check_size",
    "describe",
    "load_latents",
    "load_pipeline",
    "make_mesh",
    "port",
    "preview_writer",
    "save_latents",
    "save_video",
]
