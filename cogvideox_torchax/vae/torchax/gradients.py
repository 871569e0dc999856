"""Gradients of compiled programs for a training loop in torch, whose `loss.backward()` calls `jax.vjp`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from cogvideox_torchax.runtime import array_of, on_jax, tensor_of
from cogvideox_torchax.runtime.device import import_torchax

Function = Callable[..., Any]
"""Function of JAX arrays to a JAX array."""


class _Differentiated(torch.autograd.Function):
    """A JAX function's result with the gradients of `jax.vjp`.

    `forward(ctx, function, run, *tensors)` saves what `backward` needs, in one of two ways. If `run` is None,
    `forward` calls `jax.vjp`, and saves the function that `jax.vjp` returns, with all arrays that this
    function keeps. Otherwise `run` computes the result without keeping arrays. Then `forward` saves the
    inputs alone, and `backward` calls `jax.vjp`, which computes the result a second time.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Function, run: Callable[[], torch.Tensor] | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        inputs = tuple(map(array_of, tensors))
        if run is None:
            array, saved = jax.vjp(function, *inputs)
            result = tensor_of(array)
        else:
            result, saved = run(), inputs
        ctx.function_to_run_again = None if run is None else function
        # `jax.vjp` returns a JAX tree of arrays. As tensors, torch frees them after the backward pass.
        leaves, ctx.structure = jax.tree.flatten(saved)
        ctx.save_for_backward(*(tensor_of(jnp.asarray(leaf)) for leaf in leaves))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = jax.tree.unflatten(ctx.structure, map(array_of, ctx.saved_tensors))
        # `pull_back` computes the gradients of the inputs from the gradient of the result. It is what
        # `forward` saved; or `forward` saved the inputs, and then it is made here.
        function = ctx.function_to_run_again
        pull_back = saved if function is None else jax.vjp(function, *saved)[1]
        (gradient,) = gradients  # one for each result of `forward`, so a single one
        # The two None are for `function` and `run`, which have no gradients.
        return None, None, *map(tensor_of, pull_back(array_of(gradient)))


def differentiable(
    function: Callable[[dict[str, Any], Any], Any],
    network: nn.Module,
    weights: dict[str, Any],
    x: torch.Tensor,
    *,
    run: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call a JAX function of weights and an input, with torch's gradient for each tensor that requires one.

    Args:
        function: returns an array from the arrays of the weights, by name, and of the input.
        network: the network of these weights; parameters with `requires_grad` get a gradient.
        weights: the arrays of the parameters, by name, as the function takes them.
        x: the input, a torchax tensor; it gets a gradient if it has `requires_grad`.
        run: returns the same result without keeping arrays; the backward pass then runs `function` to have
            them. If None, `function` runs now, and the arrays that the backward pass needs are kept.
    """
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    inputs_with_gradient = [x] if x.requires_grad else []
    constant_x = array_of(x)

    # `jax.vjp` differentiates a function in all of its arguments. So this one has only those that require a
    # gradient; it takes the other weights, and maybe `x`, from around it.
    def call(*arrays: Any) -> Any:
        """Call `function`; `arrays` are `x`'s, if it requires a gradient, and then the trained weights'."""
        x_arrays, trained_arrays = arrays[: len(inputs_with_gradient)], arrays[len(inputs_with_gradient) :]
        trained_by_name = dict(zip(trained, trained_arrays, strict=True))
        return function(weights | trained_by_name, x_arrays[0] if x_arrays else constant_x)

    return _Differentiated.apply(  # pyright: ignore[reportReturnType]
        call, run, *inputs_with_gradient, *trained.values()
    )


def rematerialized(module: nn.Module, *inputs: Any) -> Any:
    """Call a module with gradient checkpointing: the backward pass recomputes its activations.

    diffusers' `enable_gradient_checkpointing` takes this function. It serves JAX and PyTorch.
    """
    if not any(on_jax(value) for value in inputs if isinstance(value, torch.Tensor)):
        return checkpoint(module, *inputs, use_reentrant=False)
    interop = import_torchax().interop
    # `jax_view` turns the module's call into a function of arrays, and tensors into arrays. `torch_view`
    # turns arrays into tensors.
    call = jax.checkpoint(interop.jax_view(module.__call__))
    return interop.torch_view(call(*interop.jax_view(inputs)))
