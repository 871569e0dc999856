"""Results of programs without gradients: a backward pass through one is an error in words."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cogvideox_torchax.runtime.bridge import on_accelerator


class _Refused(torch.autograd.Function):
    """A result whose backward pass is an error.

    `forward(ctx, why, run, *tensors)` reads no tensors. torch calls `backward` for those that require a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, why: str, run: Callable[[], torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.why = why
        return run()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ValueError(ctx.why)


def without_gradient(network: nn.Module, x: torch.Tensor, result: torch.Tensor, why: str) -> torch.Tensor:
    """Return `result`, which `network` has computed from `x`, in a form that no backward pass goes through.

    A backward pass raises `ValueError` with the message `why`. If none can come, as neither `x` nor the
    network requires a gradient, `result` is returned unchanged.
    """
    if not wants_gradient(network, x):
        return result
    # `result` is passed inside a function. If it were an argument, torch would return a view of it, and
    # forbid writes into this view.
    return _Refused.apply(why, lambda: result, x, *network.parameters())  # pyright: ignore[reportReturnType]


def wants_gradient(network: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a call of the network on `x` needs gradients.

    It does if torch records operations, `x` is on an accelerator, and `x` or a weight requires a gradient.
    """
    return (
        torch.is_grad_enabled()
        and on_accelerator(x)
        and (x.requires_grad or any(weight.requires_grad for weight in network.parameters()))
    )
