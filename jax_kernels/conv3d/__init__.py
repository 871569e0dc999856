"""Convolutions that are causal in time."""
