"""A fix for the site's reference of jax_kernels: folders come before functions of the same name."""

from typing import Any

import griffe


class FoldersBeforeNames(griffe.Extension):
    """`jax_kernels.attention` is a folder and the function that comes out of it: griffe takes one of them."""

    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        if alias.parent is not None and alias.parent.path == "jax_kernels":
            alias.parent.del_member(alias.name)
