"""Halving and doubling of frames and pixels, each with its convolution."""
