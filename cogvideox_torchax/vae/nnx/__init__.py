"""The Flax NNX build of the VAE; `cogvideox_torchax.flax` is its public face."""
