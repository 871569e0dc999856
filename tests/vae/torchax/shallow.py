"""The shallow VAE of the tests of a ported object: made, called, and compared with stock diffusers."""

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference


def shallow_stock(seed=0):
    return reference.small_vae(seed, **reference.TWO_SHALLOW_LEVELS)


def shallow_latents(frames=1, batch=1, height=2, width=4):
    return reference.latents(frames, batch=batch, height=height, width=width)


Z = shallow_latents()


def decoded(vae, z=Z):
    return runtime.to_torch(vae.decode(runtime.to_jax(z)).sample)


def decodes_as(vae, stock, z=Z):
    """Return whether it decodes as a stock model does."""
    return relative_error(decoded(vae, z), stock.decode(z).sample) < FLOAT32_RELATIVE
