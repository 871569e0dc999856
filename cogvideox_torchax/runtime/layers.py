"""Hooks on a torch network's layers, which see or change values, and profiles that name these layers."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from torch import nn

from cogvideox_torchax.runtime.bridge import on_accelerator
from cogvideox_torchax.upstream import is_patched

_profiling = False  # whether a profile is being recorded

Visit = Callable[[str, Any], Any]
"""Function of a layer's name and its values (its result, or its args and kwargs) that returns new values."""


@contextlib.contextmanager
def watched(
    network: nn.Module,
    is_layer: Callable[[str, nn.Module], Any],
    *,
    on_result: Visit,
    on_arguments: Visit = lambda _name, arguments: arguments,
    names_only: bool = False,
) -> Iterator[None]:
    """Call functions on the arguments and the result of every layer that runs in a `with` block.

    A program that is traced in the block names its instructions after the layers.

    Args:
        network: gets hooks; pass a copy where the user's modules must stay as they are.
        is_layer: `is_layer(name, module)` returns whether a module of the network is a layer.
        on_result: `on_result(name, result)` returns what replaces a layer's result.
        on_arguments: `on_arguments(name, (args, kwargs))` returns what replaces a layer's arguments.
        names_only: whether `on_arguments` and `on_result` return what they get, so that the hooks only name
            instructions. A fused kernel may then run in place of a layer.
    """
    scopes: list[Any] = []  # name scopes that are open, from the outermost layer's to the innermost layer's

    # A scope opens in one hook and closes in another, so `with` cannot be used.
    def before_layer(name: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        scopes.append(jax.named_scope(name))
        scopes[-1].__enter__()
        return on_arguments(name, (args, kwargs))

    def after_layer(name: str, _module: nn.Module, _args: Any, result: Any) -> Any:
        result = on_result(name, result)
        scopes.pop().__exit__(None, None, None)
        return result

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if is_layer(name, module):
                pre_hook = functools.partial(before_layer, name)
                hook = functools.partial(after_layer, name)
                # `is_watched` reads this attribute of a hook. It is set by `vars`, as the type of a `partial`
                # declares no attributes for a type checker.
                vars(pre_hook)["names_only"] = vars(hook)["names_only"] = names_only
                hooks.callback(module.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(hook).remove)
        yield


def by_kernel(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a ported layer runs its kernel on `x`, and not the method that it inherits."""
    # The inherited method also runs if somebody has replaced a method of diffusers' class.
    return on_accelerator(x) and not is_patched(type(module))


def is_watched(module: nn.Module) -> bool:
    """Return whether a module itself must be called, so that no fused kernel may run in its place."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # Hooks count if they may read or change values. Those of `watched` may have this attribute.
    has_hooks = any(not getattr(hook, "names_only", False) for hook in hooks)
    # Somebody may have replaced the module's `forward`, on the module itself or on its class.
    return "forward" in vars(module) or has_hooks or is_patched(type(module))


def as_layer(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run` in place of a module, within the module's name scope.

    `run` takes the module's inputs. The module's hooks, which must be those of `watched` with `names_only`,
    open and close the scope.
    """

    def call(*inputs: Any) -> Any:
        # A hook takes the arguments with which torch calls it: before a call kwargs too, which are {} here.
        for hook in module._forward_pre_hooks.values():
            hook(module, inputs, {})  # pyright: ignore[reportCallIssue]
        result = run(*inputs)
        for hook in module._forward_hooks.values():
            hook(module, inputs, result)  # pyright: ignore[reportCallIssue]
        return result

    return call


@contextlib.contextmanager
def profiling(directory: str | Path) -> Iterator[None]:
    """Record what JAX runs in a `with` block, into files for TensorBoard and Perfetto.

    Programs that are traced in the block name their instructions after layers. The compile cache's key then
    includes these names, so that no program that was compiled without names is taken from the cache.

    Args:
        directory: directory of the profile, created if missing; the trace is in its `plugins/profile/`.

    Raises:
        ValueError: a directory that cannot be written into.
    """
    global _profiling
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write a profile into {directory}: {error.strerror}") from error
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would be most of the trace
    previous_setting = jax.config.jax_compilation_cache_include_metadata_in_key  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    _profiling = True  # read when a program is traced
    try:
        with jax.profiler.trace(str(directory), create_perfetto_trace=True, profiler_options=options):
            yield
    finally:
        _profiling = False
        jax.config.update("jax_compilation_cache_include_metadata_in_key", previous_setting)


def named_layers(network: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a network is traced, for `network`, a copy that may get hooks.

    While a profile is recorded, the hooks name the traced program's instructions after the layers. Otherwise
    the context does nothing.
    """
    if not _profiling:
        return contextlib.nullcontext()
    # A layer is every module but the root, whose name is "" and so counts as false.
    return watched(
        network,
        lambda name, _module: name,
        on_result=lambda _name, result: result,  # unchanged
        names_only=True,
    )


def is_profiling() -> bool:
    """Return whether a profile is being recorded."""
    return _profiling
