"""The sharding of the width, which the modules of both builds pass to their kernels."""

from jax_kernels.common.columns import WHOLE, Split


class OnColumns:
    """A mixin of modules whose kernels take the sharding of the width, `split`.

    It is that of one device. While a copy of the modules is traced for a mesh, the tracing sets it.
    """

    split: Split = WHOLE
