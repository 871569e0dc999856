"""The sharding of the width, as the modules of both builds pass it to their kernels."""

from collections.abc import Iterable
from typing import Any

from jax_kernels.common.columns import WHOLE, Split


class OnColumns:
    """Mixin of modules whose kernels take the sharding of the width.

    Attributes:
        split: the sharding. It is a single device's (`WHOLE`) until `set_split` sets it, in a copy that is
            traced over a mesh.
    """

    split: Split = WHOLE


def set_split(modules: Iterable[Any], split: Split) -> None:
    """Set the sharding of the width in `modules`, those of a copy to be traced, never the user's own."""
    for module in modules:
        if isinstance(module, OnColumns):
            module.split = split
