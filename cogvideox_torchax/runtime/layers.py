"""Hooks on a torch network's layers, which see or change values, and profiles that name these layers."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cogvideox_torchax import upstream

_profiling = False  # whether a profile is being recorded

Visit = Callable[[str, Any], Any]
"""Function of a layer's name and its values (its result, or its args and kwargs) that returns new values."""


@contextlib.contextmanager
def watched(
    network: nn.Module,
    is_layer: Callable[[str, nn.Module], Any],
    *,
    on_result: Visit,
    on_arguments: Visit | None = None,
) -> Iterator[None]:
    """Call functions on the arguments and the result of every layer that runs in a `with` block.

    Args:
        network: gets hooks; pass a copy where the user's modules must stay as they are.
        is_layer: `is_layer(name, module)` returns whether a module of the network is a layer.
        on_result: `on_result(name, result)` returns what replaces a layer's result.
        on_arguments: `on_arguments(name, (args, kwargs))` returns what replaces a layer's arguments.
    """

    def before_layer(name: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return on_arguments(name, (args, kwargs)) if on_arguments is not None else None

    def after_layer(name: str, _module: nn.Module, _args: Any, result: Any) -> Any:
        return on_result(name, result)

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if is_layer(name, module):
                hooks.enter_context(
                    module.register_forward_pre_hook(functools.partial(before_layer, name), with_kwargs=True)
                )
                hooks.enter_context(module.register_forward_hook(functools.partial(after_layer, name)))
        yield


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


@contextlib.contextmanager
def named_layers(network: nn.Module) -> Iterator[None]:
    """While a profile is recorded, name what is traced in a `with` block after the network's layers."""
    if not _profiling:
        yield
        return
    names = {module: name for name, module in network.named_modules() if name}
    scopes: list[Any] = []  # name scopes that are open, from the outermost layer's to the innermost layer's

    # A scope opens in one hook and closes in another, so `with` cannot be used. The hooks are torch's for all
    # modules: a hook of a module's own would keep the kernel around it from running.
    def open_scope(module: nn.Module, _args: Any) -> None:
        if module in names:
            scopes.append(jax.named_scope(names[module]))
            scopes[-1].__enter__()

    def close_scope(module: nn.Module, _args: Any, _result: Any) -> None:
        if module in names:
            scopes.pop().__exit__(None, None, None)

    with (
        register_module_forward_pre_hook(open_scope),
        register_module_forward_hook(close_scope, always_call=True),
    ):
        yield


def check_no_global_hooks() -> None:
    """Raise `ValueError` if somebody has registered hooks for all modules of the process.

    They would also see the modules that this package puts around a network.
    """
    if any(upstream.module_of(hook) != __name__ for hook in upstream.global_hooks()):
        raise ValueError(
            "got hooks for all modules (register_module_forward_hook): on JAX register them on the model's "
            "modules, by module.register_forward_hook"
        )


def is_profiling() -> bool:
    """Return whether a profile is being recorded."""
    return _profiling
