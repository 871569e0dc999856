"""torch on JAX: JAX as a device of PyTorch's, tensors and arrays, compiled programs, weights.

A name's module is imported at the name's first use. The list of names is `__init__.pyi`.
"""

from cogvideox_torchax.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
