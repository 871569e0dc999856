"""GroupNorm modulated by latents."""
