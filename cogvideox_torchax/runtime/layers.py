"""Hooks on a torch network's layers, which see or change inputs and outputs, and name scopes in a program."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Visit = Callable[[str, Any], Any]
"""Function of a layer's name and its arguments (args, kwargs) or result, to their replacement."""


@contextlib.contextmanager
def watched(
    network: nn.Module,
    is_layer: Callable[[str, nn.Module], Any],
    *,
    given: Visit,
    taken: Visit = lambda _, values: values,
    names_only: bool = False,
) -> Iterator[None]:
    """Call `taken` with the arguments and `given` with the result of every layer that runs in a `with` block.

    A program that is traced in the block names its instructions after the layers.

    Args:
        network: gets hooks; pass a copy where the user's modules must stay as they are.
        is_layer: returns whether a module, given its name and itself, is a layer.
        given, taken: called with a layer's name and its result, or its arguments (args, kwargs); return their
            replacement.
        names_only: whether both return values unchanged; a fused kernel may then replace layers, as
            `is_watched` is false for them.
    """
    import jax

    scopes: list[Any] = []

    def before(name: str):
        """Return a pre-hook that opens the layer's name scope and calls `taken`."""

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            scopes.append(jax.named_scope(name))
            scopes[-1].__enter__()
            return taken(name, (args, kwargs))

        return hook

    def after(name: str):
        """Return a hook that calls `given` and closes the layer's name scope."""

        def hook(_module: nn.Module, _args: Any, result: Any) -> Any:
            result = given(name, result)
            scopes.pop().__exit__(None, None, None)
            return result

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if is_layer(name, module):
                pair = before(name), after(name)
                for hook in pair:
                    vars(hook)["names_only"] = names_only
                hooks.callback(module.register_forward_pre_hook(pair[0], with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(pair[1]).remove)
        yield


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks, but for `names_only` ones, or an instance's own forward.

    Such a module must really be called: no fused kernel may replace it.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(not getattr(hook, "names_only", False) for hook in hooks)


def as_layer(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, which replaces a module that is not `is_watched`, with the module's name scope."""

    def call(*inputs: Any) -> Any:
        """Run, with the module's hooks called for the names that they give; they change nothing."""
        for hook in module._forward_pre_hooks.values():
            hook(module, inputs, {})  # pyright: ignore[reportCallIssue]
        result = run(*inputs)
        for hook in module._forward_hooks.values():
            hook(module, inputs, result)  # pyright: ignore[reportCallIssue]
        return result

    return call
