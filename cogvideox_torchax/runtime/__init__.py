"""torchax at the edge: tensors and arrays, compiled programs, loading, and the compile cache."""

from cogvideox_torchax.runtime.arrays import (
    concatenate,
    device_and_dtype,
    dtype_name,
    fetch_async,
    first_nonfinite,
    host_array,
    jax_dtype,
    plain_tensor,
    take_frames,
    to_jax,
    to_torch,
    wait,
)
from cogvideox_torchax.runtime.bridge import (
    active,
    array_of,
    enable,
    is_enabled,
    jit_torch,
    on_jax,
    tensor_of,
    torch_view,
    without_torchax,
)
from cogvideox_torchax.runtime.compile_cache import (
    COMPILE_CACHE_VARIABLE,
    configure_compile_cache,
    default_compile_cache,
)
from cogvideox_torchax.runtime.gradients import (
    differentiable,
    differentiated,
    rematerialized,
    wants_gradient,
)
from cogvideox_torchax.runtime.profiling import profiling
from cogvideox_torchax.runtime.programs import (
    ChunkProgram,
    JaxRun,
    ModuleProgram,
    NativeRun,
    Programs,
    forget_programs,
    programs_of,
)
from cogvideox_torchax.runtime.skeleton import on_host
from cogvideox_torchax.runtime.weights import move_weights, put_weights, replace_weights, weights_of

__all__ = [
    "COMPILE_CACHE_VARIABLE",
    "ChunkProgram",
    "JaxRun",
    "ModuleProgram",
    "NativeRun",
    "Programs",
    "active",
    "array_of",
    "concatenate",
    "configure_compile_cache",
    "default_compile_cache",
    "device_and_dtype",
    "differentiable",
    "differentiated",
    "dtype_name",
    "enable",
    "fetch_async",
    "first_nonfinite",
    "forget_programs",
    "host_array",
    "is_enabled",
    "jax_dtype",
    "jit_torch",
    "move_weights",
    "on_host",
    "on_jax",
    "plain_tensor",
    "profiling",
    "programs_of",
    "put_weights",
    "rematerialized",
    "replace_weights",
    "take_frames",
    "tensor_of",
    "to_jax",
    "to_torch",
    "torch_view",
    "wait",
    "wants_gradient",
    "weights_of",
    "without_torchax",
]
