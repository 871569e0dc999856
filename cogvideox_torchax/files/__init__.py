"""What is read and written: clips, latents, reports, each whole or not at all."""
