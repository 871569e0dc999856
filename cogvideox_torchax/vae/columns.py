"""The sharding of the width, as the modules of both builds pass it to their kernels."""

from jax_kernels.common.columns import WHOLE, Split


class OnColumns:
    """Mixin of modules whose kernels take the sharding of the width.

    Attributes:
        split: the sharding. It is a single device's (`WHOLE`), except in a copy of the modules that is traced
            over a mesh: there the tracing sets it.
    """

    split: Split = WHOLE
