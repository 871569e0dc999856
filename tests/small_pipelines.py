"""Builds small diffusers pipelines, saved and loaded back, with a tokenizer that was really trained."""

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
)
from PIL import Image

from examples.small_pipeline import T5, tokenizer
from tests import reference

HEIGHT, WIDTH, FRAMES = 8, 16, 5
CLASSES = {
    "text": CogVideoXPipeline,
    "image": CogVideoXImageToVideoPipeline,
    "video": CogVideoXVideoToVideoPipeline,
    "control": CogVideoXFunControlPipeline,
}
TRANSFORMER = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 16,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": WIDTH // 2,
    "sample_height": HEIGHT // 2,
    "sample_frames": FRAMES,
    "temporal_compression_ratio": 2,
    "max_text_seq_length": 16,
}
VERSIONS = {
    "2b": {"use_rotary_positional_embeddings": False},
    "5b": {"use_rotary_positional_embeddings": True},
    "5b-I2V": {"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True},
    "1.5": {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False},
}
"""Differences between the published versions' transformers."""


def text_encoder(seed: int = 0, num_layers: int = 2):
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    return T5EncoderModel(T5Config(**{**T5, "num_layers": num_layers}, feed_forward_proj="gated-gelu")).eval()


def transformer(version: str, seed: int = 0, **overrides):
    torch.manual_seed(seed)
    return reference.randomized(
        CogVideoXTransformer3DModel(**{**TRANSFORMER, **VERSIONS[version], **overrides})
    )


def vae(version: str = "5b"):
    return configured(reference.small_vae(**reference.TWO_SHALLOW_LEVELS), version)


def configured(model, version: str):
    """Set a version's config of the latents on the VAE; none of it is a weight."""
    model.register_to_config(
        scaling_factor=1.15258426 if version == "2b" else 0.7, invert_scale_latents=version == "1.5"
    )
    return model


def scheduler(kind=CogVideoXDDIMScheduler, version: str = "5b"):
    return kind(
        snr_shift_scale=3.0 if version == "2b" else 1.0,
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )


def conditioning(kind: str, version: str) -> dict[str, int]:
    """Return the settings that a pipeline's class requires of its transformer."""
    channels = {"in_channels": 32} if kind in ("image", "control") else {}
    return {**channels, "ofs_embed_dim": 16} if (kind, version) == ("image", "1.5") else channels


def build(kind: str = "text", version: str = "5b", **components):
    """Build a pipeline of stock diffusers, with random weights."""
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": lambda: vae(version),
        "transformer": lambda: transformer(version, **conditioning(kind, version)),
        "scheduler": lambda: scheduler(version=version),
    }
    pipe = CLASSES[kind](
        **{name: components[name] if name in components else parts[name]() for name in parts}
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def one_layer(kind: str = "text", version: str = "5b", **components):
    """Build a pipeline whose transformer and text encoder have one layer each."""
    parts = {
        "transformer": transformer(version, num_layers=1, **conditioning(kind, version)),
        "text_encoder": text_encoder(num_layers=1),
    }
    return build(kind, version, **parts | components)


def picture(seed: int = 3) -> Image.Image:
    pixels = torch.rand(HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(seed)) * 255
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def inputs(kind: str, **overrides) -> dict:
    """Return a call's arguments, small: four steps, and a generator of its own."""
    clip = [picture(i) for i in range(FRAMES)]
    given = {
        "text": {"num_frames": FRAMES},
        "image": {"num_frames": FRAMES, "image": picture()},
        "video": {"video": clip},
        "control": {"control_video": clip},
    }
    return {
        "prompt": "a panda plays a guitar",
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": 4,
        "generator": torch.Generator().manual_seed(0),
        "max_sequence_length": 16,
        "output_type": "pt",
        **given[kind],
        **overrides,
    }


def save_lora(pipe, path):
    """Add a LoRA to a pipeline's transformer, and save one like it, all its matrices drawn at random."""
    from peft import LoraConfig, get_peft_model_state_dict

    model, generator = pipe.transformer, torch.Generator().manual_seed(7)
    layers = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=layers, rank_pattern={"to_k": 3}))
    matrices = {
        name: torch.randn(value.shape, generator=generator) * 0.3
        for name, value in get_peft_model_state_dict(model).items()
    }
    pipe.save_lora_weights(path, transformer_lora_layers=matrices)
