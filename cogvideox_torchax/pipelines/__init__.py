"""diffusers' CogVideoX pipelines on JAX: their networks, their schedulers, and a video from a prompt."""
