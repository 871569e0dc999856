"""What every ported model shares: its mesh, its copies and its pickles."""

import copy
from typing import Any

from torch import nn


def save_as_stock(model: nn.Module) -> None:
    """Has a pipeline that holds the model name its original class in model_index.json.

    diffusers asks the object for its `__module__` (`_fetch_class_library_tuple`); the class keeps its own.
    """
    ours = __name__.partition(".")[0]
    kinds = (kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] != ours)
    vars(model)["__module__"] = next(kinds).__module__


class PortedModel(nn.Module):
    """Mixed into a model's class by `port`: copied with its mesh, pickled without; programs go with neither.

    What is unpickled is in PyTorch.
    """

    _mesh: Any = None

    @property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh` that this model runs on, as given to `port`; None for a single device."""
        return self._mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "PortedModel":
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        if self._mesh is not None:
            memo[id(self._mesh)] = self._mesh  # devices have no copies
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mesh"}
