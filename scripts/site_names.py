"""A fix for the site's reference of jax_kernels: folders come before functions of the same name."""

from typing import Any

import griffe


class FoldersBeforeNames(griffe.Extension):
    """Keep the folders of jax_kernels in griffe's tree.

    `jax_kernels.attention` is both a folder and a function imported from it; griffe keeps one object for each
    name.
    """

    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        """Remove an imported function of jax_kernels, an alias to griffe, from the tree."""
        if alias.parent is not None and alias.parent.path == "jax_kernels":
            alias.parent.del_member(alias.name)
