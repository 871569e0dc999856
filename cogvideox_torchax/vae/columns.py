"""The sharding of the width, which the modules of both builds pass to their kernels."""

from jax_kernels.common.columns import WHOLE, Split


class OnColumns:
    """A mixin of modules that pass the sharding of the width, `split`, to their kernels.

    Its value `WHOLE` stands for one device. A program for a mesh traces a copy of the modules, and sets the
    `split` of the copy.
    """

    split: Split = WHOLE
