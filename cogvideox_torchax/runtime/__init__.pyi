"""The public names of `runtime`, each with its module; `__init__.py` reads them here."""

from cogvideox_torchax.runtime.bridge import (
    all_finite as all_finite,
    array_of as array_of,
    as_array as as_array,
    dtype_name as dtype_name,
    first_nonfinite as first_nonfinite,
    is_on_jax as is_on_jax,
    jax_dtype as jax_dtype,
    largest as largest,
    on_accelerator as on_accelerator,
    tensor_of as tensor_of,
    to_jax as to_jax,
    to_torch as to_torch,
    wants_gradient as wants_gradient,
    without_gradient as without_gradient,
)
from cogvideox_torchax.runtime.calls import (
    run_method as run_method,
)
from cogvideox_torchax.runtime.device import (
    tracing as tracing,
)
from cogvideox_torchax.runtime.host import (
    device_and_dtype as device_and_dtype,
    host_array as host_array,
    is_in_host_memory as is_in_host_memory,
    is_jax_device as is_jax_device,
    on_default_device as on_default_device,
    on_jax as on_jax,
    plain_tensor as plain_tensor,
)
from cogvideox_torchax.runtime.layers import (
    profiling as profiling,
)
from cogvideox_torchax.runtime.operations import (
    torch_view as torch_view,
)
from cogvideox_torchax.runtime.programs import (
    Program as Program,
    Programs as Programs,
    forget_programs as forget_programs,
    programs_of as programs_of,
    warn_once as warn_once,
)
from cogvideox_torchax.runtime.torchtpu import (
    NO_GRADIENT as NO_GRADIENT,
    TorchTPUProgram as TorchTPUProgram,
    is_on_torchtpu as is_on_torchtpu,
)
from cogvideox_torchax.runtime.trees import (
    host_skeleton as host_skeleton,
)
from cogvideox_torchax.runtime.weights import (
    byte_dtype as byte_dtype,
    is_movable as is_movable,
    named_tensors as named_tensors,
    put_weights as put_weights,
    replace_weights as replace_weights,
)
