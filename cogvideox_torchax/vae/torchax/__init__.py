"""The torchax build of the VAE: diffusers' own modules, with a second way to run."""
