"""Input and output files: videos, latents, models and reports; each is written whole or not at all."""
