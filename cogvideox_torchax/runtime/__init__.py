"""torch on JAX: tensors and arrays, compiled programs, weights, and the compile cache.

A name's module is imported at the name's first use, since some modules import torch and others, such as
`arrays`, do without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cogvideox_torchax.runtime.arrays import concatenate, first_nonfinite_of, largest_of, take
    from cogvideox_torchax.runtime.bridge import (
        array_of,
        as_array,
        is_on_jax,
        on_accelerator,
        tensor_of,
        to_jax,
        to_torch,
    )
    from cogvideox_torchax.runtime.calls import method_program, run_method, warn_once
    from cogvideox_torchax.runtime.compile_cache import COMPILE_CACHE_VARIABLE, configure_compile_cache
    from cogvideox_torchax.runtime.device import CudaIsJAX, on_meta, tracing
    from cogvideox_torchax.runtime.forks import check_not_forked
    from cogvideox_torchax.runtime.gradients import (
        differentiable,
        rematerialized,
        wants_gradient,
        without_gradient,
    )
    from cogvideox_torchax.runtime.host import (
        device_and_dtype,
        host_array,
        is_in_host_memory,
        is_jax_device,
        on_default_device,
        on_jax,
        plain_tensor,
    )
    from cogvideox_torchax.runtime.layers import profiling
    from cogvideox_torchax.runtime.memory import (
        free_memory,
        of_several_processes,
        out_of_memory,
    )
    from cogvideox_torchax.runtime.operations import torch_view
    from cogvideox_torchax.runtime.places import ArrayProgram, Place
    from cogvideox_torchax.runtime.programs import Program, Programs, forget_programs, programs_of
    from cogvideox_torchax.runtime.tensors import (
        all_finite,
        dtype_name,
        fetch_async,
        first_nonfinite,
        jax_dtype,
        largest,
    )
    from cogvideox_torchax.runtime.torchtpu import NO_GRADIENT, TorchTPUProgram, is_on_torchtpu
    from cogvideox_torchax.runtime.trees import host_skeleton
    from cogvideox_torchax.runtime.user_checks import without_jax_checks
    from cogvideox_torchax.runtime.weights import (
        byte_dtype,
        feed_weights,
        is_movable,
        named_tensors,
        put_weights,
        read_only,
        replace_weights,
    )

__all__ = [
    "COMPILE_CACHE_VARIABLE",
    "NO_GRADIENT",
    "ArrayProgram",
    "CudaIsJAX",
    "Place",
    "Program",
    "Programs",
    "TorchTPUProgram",
    "all_finite",
    "array_of",
    "as_array",
    "byte_dtype",
    "check_not_forked",
    "concatenate",
    "configure_compile_cache",
    "device_and_dtype",
    "differentiable",
    "dtype_name",
    "feed_weights",
    "fetch_async",
    "first_nonfinite",
    "first_nonfinite_of",
    "forget_programs",
    "free_memory",
    "host_array",
    "host_skeleton",
    "is_in_host_memory",
    "is_jax_device",
    "is_movable",
    "is_on_jax",
    "is_on_torchtpu",
    "jax_dtype",
    "largest",
    "largest_of",
    "method_program",
    "named_tensors",
    "of_several_processes",
    "on_accelerator",
    "on_default_device",
    "on_jax",
    "on_meta",
    "out_of_memory",
    "plain_tensor",
    "profiling",
    "programs_of",
    "put_weights",
    "read_only",
    "rematerialized",
    "replace_weights",
    "run_method",
    "take",
    "tensor_of",
    "to_jax",
    "to_torch",
    "torch_view",
    "tracing",
    "wants_gradient",
    "warn_once",
    "without_gradient",
    "without_jax_checks",
]

_MODULES = {
    "arrays": (
        "concatenate",
        "first_nonfinite_of",
        "largest_of",
        "take",
    ),
    "bridge": (
        "array_of",
        "as_array",
        "is_on_jax",
        "on_accelerator",
        "tensor_of",
        "to_jax",
        "to_torch",
    ),
    "calls": (
        "method_program",
        "run_method",
        "warn_once",
    ),
    "compile_cache": (
        "COMPILE_CACHE_VARIABLE",
        "configure_compile_cache",
    ),
    "device": (
        "CudaIsJAX",
        "on_meta",
        "tracing",
    ),
    "forks": ("check_not_forked",),
    "gradients": (
        "differentiable",
        "rematerialized",
        "wants_gradient",
        "without_gradient",
    ),
    "host": (
        "device_and_dtype",
        "host_array",
        "is_in_host_memory",
        "is_jax_device",
        "on_default_device",
        "on_jax",
        "plain_tensor",
    ),
    "layers": ("profiling",),
    "memory": (
        "free_memory",
        "of_several_processes",
        "out_of_memory",
    ),
    "operations": ("torch_view",),
    "places": (
        "ArrayProgram",
        "Place",
    ),
    "programs": (
        "Program",
        "Programs",
        "forget_programs",
        "programs_of",
    ),
    "tensors": (
        "all_finite",
        "dtype_name",
        "fetch_async",
        "first_nonfinite",
        "jax_dtype",
        "largest",
    ),
    "torchtpu": (
        "NO_GRADIENT",
        "TorchTPUProgram",
        "is_on_torchtpu",
    ),
    "trees": ("host_skeleton",),
    "user_checks": ("without_jax_checks",),
    "weights": (
        "byte_dtype",
        "feed_weights",
        "is_movable",
        "named_tensors",
        "put_weights",
        "read_only",
        "replace_weights",
    ),
}
# By a name, the full name of its module.
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
