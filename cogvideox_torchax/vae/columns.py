"""The sharding of the width, as the modules of both builds pass it to their kernels."""

from collections.abc import Iterable
from typing import Any

from jax_kernels.common.columns import WHOLE, Split


class OnColumns:
    """Mixin of modules whose kernels take the sharding of the width.

    Attributes:
        split: the sharding: a single device's, but in a copy that is traced over a mesh (`set_split`).
    """

    split: Split = WHOLE


def set_split(modules: Iterable[Any], split: Split) -> None:
    """Set the sharding of the width in modules of a copy that is traced, never in the user's."""
    for module in modules:
        if isinstance(module, OnColumns):
            module.split = split
