"""diffusers' CogVideoX pipelines on JAX: their networks, their schedulers, caches and loading.

`sequence` explains how text and patches become one sequence, and `caches` and `cached_layers` explain the
terms of diffusers' caches.
"""
