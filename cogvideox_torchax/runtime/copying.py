"""Copies and pickles of what lies on JAX, which torchax's tensors do not take by themselves."""

import copyreg
from typing import Any

import torch
from torch import nn


def teach_copying(kind: Any, tensor_of: Any, without_torchax: Any) -> None:
    """Has torchax's tensor class copied and pickled, alone or inside of any module or state dict.

    A copy shares its array, which nothing writes into. A pickle holds a plain torch tensor: what is loaded is
    in PyTorch, with torchax there or not.

    Args:
        kind: the class.
        tensor_of, without_torchax: of `bridge`.
    """

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        copied = tensor_of(tensor.jax())
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
        return copied

    def reduce(tensor: Any) -> Any:
        from cogvideox_torchax.runtime.arrays import to_torch

        def plain() -> Any:
            host: torch.Tensor = to_torch(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            return (nn.Parameter(host, tensor.requires_grad) if is_parameter else host).__reduce_ex__(2)

        return without_torchax(plain)

    kind.__deepcopy__ = deepcopy
    copyreg.pickle(kind, reduce)
