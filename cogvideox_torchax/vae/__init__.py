"""Code that both builds of the VAE share: chunks, tiles, checkpoints, checks, tolerances."""
