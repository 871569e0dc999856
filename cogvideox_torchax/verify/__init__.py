"""Backends compared with the reference, layer by layer."""
