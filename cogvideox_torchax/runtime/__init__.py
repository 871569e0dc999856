"""torch on JAX: tensors and arrays, compiled programs, weights, and the compile cache.

A name's module is imported at the name's first use, since some modules import torch and others, such as
`arrays`, do without it. The list of names is `__init__.pyi`.
"""

from cogvideox_torchax.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
