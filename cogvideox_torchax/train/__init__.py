"""Training: clips in, a VAE's weights out; one PyTorch loop for every backend."""
