"""Input and output files: clips, latents, reports; each is written whole or not at all."""
