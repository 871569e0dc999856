"""Gradients of compiled programs for a torch training loop: `loss.backward()` over `jax.vjp`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from cogvideox_torchax.runtime.bridge import array_of, import_torchax, on_jax, tensor_of

Function = Callable[..., Any]
"""Function of JAX arrays to a JAX array."""


class _Differentiated(torch.autograd.Function):
    """A JAX function's result, with the gradients of `jax.vjp`."""

    @staticmethod
    def forward(
        ctx: Any, function: Function, run: Callable[[], torch.Tensor] | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Compute `function(*tensors)` on JAX, and save what `backward` needs.

        If `run` is None, the residuals of `jax.vjp` are saved. Otherwise `run`, which returns the same result
        more cheaply, is called, and the inputs alone are saved: `backward` then computes the function again.
        In `ctx`, `rebuild` returns the saved object, and `pull` the gradients from it and the result's
        gradient.
        """
        import jax

        arrays = tuple(map(array_of, tensors))
        if run is None:
            array, pull_back = jax.vjp(function, *arrays)
            ctx.rebuild = _keep(ctx, pull_back)
            ctx.pull = lambda pull_back, gradient: pull_back(gradient)
            return tensor_of(array)
        result = run()
        ctx.rebuild = _keep(ctx, arrays)
        # `jax.vjp` returns the result and the function of the result's gradient.
        ctx.pull = lambda arrays, gradient: jax.vjp(function, *arrays)[1](gradient)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return no gradients for `function` and `run`, and one for each tensor."""
        (gradient,) = map(array_of, gradients)
        saved = ctx.rebuild(ctx.saved_tensors)
        return None, None, *map(tensor_of, ctx.pull(saved, gradient))


def _keep(ctx: Any, tree: Any) -> Callable[[tuple[torch.Tensor, ...]], Any]:
    """Save a tree's arrays in `ctx`; return a function of `ctx.saved_tensors` that rebuilds the tree.

    Saved so, torch frees the arrays after the backward pass.
    """
    import jax

    leaves, structure = jax.tree.flatten(tree)
    # None marks a saved array: no leaf of a tree is None.
    others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    ctx.save_for_backward(*(tensor_of(leaf) for leaf in leaves if isinstance(leaf, jax.Array)))

    def restored(saved: tuple[torch.Tensor, ...]) -> Any:
        """Return the tree with the saved arrays."""
        arrays = map(array_of, saved)
        return jax.tree.unflatten(structure, [next(arrays) if leaf is None else leaf for leaf in others])

    return restored


def differentiated(function: Function, *tensors: torch.Tensor) -> torch.Tensor:
    """Call a JAX function on torchax tensors; the result has gradients for those with `requires_grad`."""
    return _Differentiated.apply(function, None, *tensors)  # pyright: ignore[reportReturnType]


def differentiable(
    function: Callable[[dict[str, Any], Any], Any],
    network: nn.Module,
    weights: dict[str, Any],
    x: torch.Tensor,
    *,
    run: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call a JAX function of weights and an input, with torch's gradients for those that require one.

    Args:
        function: returns an array from the arrays of the weights, by name, and of the input.
        network: the network that has these weights as parameters; those with `requires_grad` get a gradient.
        weights: the arrays of the parameters, by name, as the function takes them.
        x: the input, a torchax tensor; it gets a gradient if it has `requires_grad`.
        run: returns the same result without keeping anything for `backward`, which then runs `function`
            first. None keeps what `backward` needs.
    """
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    leaves = ([x] if x.requires_grad else []) + list(trained.values())
    x_array = array_of(x)

    def on_leaves(*values: Any) -> Any:
        """Call `function` with `values`, arrays of `leaves`, as the input and the trained weights."""
        inputs = values[: len(leaves) - len(trained)]  # of `x`, or none if `x` requires no gradient
        trained_arrays = dict(zip(trained, values[len(inputs) :], strict=True))
        return function(weights | trained_arrays, *(inputs or (x_array,)))

    return _Differentiated.apply(on_leaves, run, *leaves)  # pyright: ignore[reportReturnType]


def without_gradient(
    network: nn.Module, x: torch.Tensor, run: Callable[[], torch.Tensor], why: str
) -> torch.Tensor:
    """Return the result of `run`; a backward pass through it raises `ValueError` with the message `why`."""
    if not wants_gradient(network, x):
        return run()

    def refuse(*_: Any) -> Any:
        """Raise the error: called by the backward pass alone."""
        raise ValueError(why)

    return differentiable(refuse, network, {}, x, run=run)


def wants_gradient(network: nn.Module, x: torch.Tensor) -> bool:
    """Return whether torch, in this thread, records operations on this JAX input or on the weights."""
    if not torch.is_grad_enabled() or not on_jax(x):
        return False
    return x.requires_grad or any(weight.requires_grad for weight in network.parameters())


def rematerialized(module: nn.Module, *inputs: Any) -> Any:
    """Call a module with gradient checkpointing: the backward pass recomputes its activations.

    diffusers' `enable_gradient_checkpointing` takes this function. It serves JAX and PyTorch.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if not any(map(on_jax, tensors)):
        return checkpoint(module, *inputs, use_reentrant=False)
    import jax

    interop = import_torchax().interop
    call = jax.checkpoint(interop.jax_view(module.__call__))
    return interop.torch_view(call(*interop.jax_view(inputs)))
