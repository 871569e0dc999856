"""Estimates of a program's cost on a chip that is absent, read off XLA's compiled text."""
