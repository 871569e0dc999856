"""The sharding of the width, as the modules of both builds pass it to their kernels."""

from collections.abc import Iterable
from typing import Any

from jax_kernels.common.columns import WHOLE, Split


class OnColumns:
    """Mixed into a module whose kernels are given how columns lie on devices.

    Attributes:
        split: all columns on one device; over several in a copy traced over a mesh (`set_split`).
    """

    split: Split = WHOLE


def set_split(modules: Iterable[Any], split: Split) -> None:
    """Set how columns lie on devices in modules of a copy that is traced, never in the user's."""
    for module in modules:
        if isinstance(module, OnColumns):
            module.split = split
