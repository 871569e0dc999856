"""GroupNorm by one pass over the activations."""
