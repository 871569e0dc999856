"""A profile by JAX, whose instructions are named after the layers of torch networks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from cogvideox_torchax.runtime.layers import watched

_profiling = False


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
    import jax

    global _profiling
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write a profile into {directory}: {error.strerror}") from error
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would be most of the trace
    before = jax.config.jax_compilation_cache_include_metadata_in_key  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    _profiling = True  # read when a program is traced
    try:
        with jax.profiler.trace(str(directory), create_perfetto_trace=True, profiler_options=options):
            yield
    finally:
        _profiling = False
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


def named_layers(network: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tracing a network names instructions after its layers, if profiling.

    Args:
        network: a skeleton (a copy of a user's modules, made to be traced); it gets hooks.
    """
    if not _profiling:
        return contextlib.nullcontext()
    # A layer is every module but the root, whose name is "". Its hooks only name the instructions: `given`,
    # which is called with a layer's results, returns them unchanged.
    return watched(network, lambda name, _: name, given=lambda _, values: values, names_only=True)


def is_profiling() -> bool:
    """Return whether a profile is being recorded."""
    return _profiling
