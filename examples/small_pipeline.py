"""Make a small pipeline with random weights, to try commands and scripts without a download.

    python examples/small_pipeline.py small              # text to video
    python examples/small_pipeline.py small-i2v --image  # image to video
    cogvideox-torchax generate --model small --prompt 'A cat walks.' --num-inference-steps 5 -o noise.mp4

Its videos are noise, of 9 x 64 x 96 by default. The VAE is the bundled model. For prompts that become videos,
take the bundled pipeline: `generate` without --model.
"""

import argparse
import functools
import io
from importlib.resources import files
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel, T5Tokenizer

SENTENCES = (
    "a panda plays a guitar in a bamboo forest",
    "a garden comes to life as butterflies flutter",
    "an astronaut hatches from an egg on the moon",
    "the sea is calm and the sky is full of stars",
)
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 64, "num_layers": 2, "num_heads": 8}
TRANSFORMER = {
    **{"num_attention_heads": 8, "attention_head_dim": 16, "num_layers": 2},
    **{"time_embed_dim": 16, "text_embed_dim": T5["d_model"], "use_rotary_positional_embeddings": True},
    **{"sample_frames": 9, "sample_height": 8, "sample_width": 12},  # height and width of latents
}


@functools.cache
def tokenizer() -> T5Tokenizer:
    """Train a T5 tokenizer on four sentences."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def pipeline(kind: Any = CogVideoXPipeline, **transformer: int) -> Any:
    """Build a pipeline of a class; `transformer` are settings of its transformer, such as `num_layers`."""
    torch.manual_seed(0)
    return kind(
        tokenizer=tokenizer(),
        text_encoder=T5EncoderModel(T5Config(**T5, feed_forward_proj="gated-gelu")).eval(),
        vae=AutoencoderKLCogVideoX.from_pretrained(
            str(files("cogvideox_torchax") / "assets" / "tiny-pipeline" / "vae")
        ),
        transformer=CogVideoXTransformer3DModel(**{**TRANSFORMER, **transformer}).eval(),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A small pipeline with random weights.")
    parser.add_argument("output", help="the directory to write")
    parser.add_argument("--image", action="store_true", help="image to video, in place of text to video")
    args = parser.parse_args()
    # A transformer for images takes the image's latents beside those of the video: 32 channels.
    made = pipeline(CogVideoXImageToVideoPipeline, in_channels=32) if args.image else pipeline()
    made.save_pretrained(args.output)


if __name__ == "__main__":
    main()
