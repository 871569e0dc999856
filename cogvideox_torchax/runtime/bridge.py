"""The bridge between torch and JAX by torchax, which converts functions and tensors.

A *plain* tensor is one of PyTorch's own, and a *torchax* tensor holds a JAX array. Only this module imports
torchax, and only when it is needed: a user of native PyTorch never starts JAX. Ported modules know only
`on_accelerator` and `torch_view`, which serve the bridge of TorchTPU (`runtime.torchtpu`) too.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.compile_cache import configure_compile_cache
from cogvideox_torchax.runtime.forks import check_not_forked
from cogvideox_torchax.runtime.user_checks import jax_checks_off, without_jax_checks
from cogvideox_torchax.upstream import (
    one_program_each,
    teach_copying,
    torchax_is_on as is_enabled,
    torchax_off,
)
from cogvideox_torchax.versions import TESTED, installed

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of plain tensors; a tensor on JAX has a type of torchax."""
TPU = "tpu"
"""The name of TorchTPU's device, and of its compiler for `torch.compile`."""


def import_torchax() -> Any:
    """Return the package torchax, with its `interop`; the first call imports and patches it.

    Raises:
        ForkError: this process was forked from one that uses JAX.
        ImportError: torchax does not import; the message names the pair of versions to install.
    """
    # Checked in each call. `_patched_torchax` runs once, and a forked child has its parent's cached result.
    check_not_forked()
    return _patched_torchax()


@functools.cache
def _patched_torchax() -> Any:
    """Import torchax, and replace those of its functions that do not fit; the first call does so."""
    try:
        with jax_checks_off():  # a user may have turned them on for their own code
            # The modules of `ops` put their operations into torchax's tables, which are changed below.
            import torchax.interop
            import torchax.ops.jaten
            import torchax.ops.jtorch
            import torchax.ops.ops_registry
            import torchax.view
    except (ImportError, RuntimeError, AttributeError) as error:
        # AttributeError: torch has dropped an operator that torchax names.
        pair = " ".join(f"{package}=={TESTED[package].newest}" for package in ("torchax", "torch"))
        raise ImportError(
            f"torchax {installed('torchax')} does not import with torch {torch.__version__} ({error}); "
            f"install the pair that is tested: pip install {pair}"
        ) from error
    # Imported here, as all of them import JAX.
    from jax import dtypes

    from cogvideox_torchax.runtime.functions import replace_functions
    from cogvideox_torchax.runtime.views import share_views

    for tensor_class in (torchax.tensor.Tensor, torchax.view.View):
        teach_copying(tensor_class, tensor_of, to_torch, without_torchax)  # for `copy` and `pickle`
    registry = torchax.ops.ops_registry
    one_program_each(registry)  # sums and products run as one program, not as several
    # Attention runs by this project's kernel, and torch draws the random numbers, those of dropout too.
    replace_functions(registry)
    # JAX warns of each dtype of 64 bits that it is asked for, and takes 32. So torchax asks for 32.
    mappings, jax_dtype = torchax.ops.mappings, torchax.ops.mappings.t2j_dtype
    mappings.t2j_dtype = lambda dtype: dtypes.canonicalize_dtype(jax_dtype(dtype))
    if dtypes.canonicalize_dtype("int64") == "int32":
        for module in (torchax.ops.jaten, torchax.ops.jtorch):
            module.jnp = SimpleNamespace(**vars(module.jnp) | {"int64": module.jnp.int32})
    share_views(torchax)  # a write into a view changes the tensor that it is a view of
    with jax_checks_off():
        # Make torchax's environment now: it makes a key for random numbers, which a user's checks refuse.
        torchax.default_env()
    return torchax


def enable() -> None:
    """Turn torchax on for this thread, if it is off; point JAX's compile cache at the user's directory."""
    torchax = import_torchax()
    if not is_enabled():
        torchax.enable_globally()
    configure_compile_cache()


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Enable torchax for this thread's torch calls in a `with` block.

    Inference mode is off in the block: in that mode torch does not decompose operations such as `chunk` and
    `split`, and torchax implements only the smaller operations that they decompose into. Gradients are
    recorded in the block if they are outside.
    """
    if is_enabled() and not torch.is_inference_mode_enabled():  # there is nothing to change
        yield
        return
    records_gradients = torch.is_grad_enabled()
    # As a context manager, torchax's environment turns torchax on.
    torchax_on = contextlib.nullcontext() if is_enabled() else import_torchax().default_env()
    # `inference_mode(False)` turns gradients on, so their setting is restored after it.
    with torchax_on, torch.inference_mode(False), torch.set_grad_enabled(records_gradients):
        yield


def without_torchax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, with torchax off and every other setting of this thread kept.

    Loading safetensors and building on `torch.device("meta")` go wrong while torchax is on.
    """
    with torchax_off() if is_enabled() else contextlib.nullcontext():
        return function(*args, **kwargs)


def on_jax(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on JAX: a torchax tensor or a view of one."""
    # The type is read, not `tensor.device`: while torchax is on, torch sends each read of an attribute
    # through torchax, which is slow.
    return type(tensor) not in PLAIN and _is_of_torchax(type(tensor))


@functools.cache
def _is_of_torchax(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "torchax" for base in kind.__mro__)


def on_tpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on TorchTPU's device."""
    return tensor.device.type == TPU


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether kernels compute with a tensor: it is on JAX by torchax, or on a TPU by TorchTPU."""
    return on_jax(tensor) or on_tpu(tensor)


def is_on_jax(module: torch.nn.Module) -> bool:
    """Return whether a module's first weight or buffer, and so all of them, is on JAX."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return first is not None and on_jax(first)


def is_jax_device(device: Any) -> bool:
    """Return whether `device`, a name or a torch device, is "jax" or one of its devices, such as "jax:0"."""
    return str(device).partition(":")[0] == "jax"


def device_and_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.dtype | None]:
    """Return the device and the dtype that `.to(*args, **kwargs)` requests, each None if absent."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, str | torch.device):
            device = value
    if str(device).partition(":")[0] == TPU and upstream.added_device() != TPU:
        raise ValueError(
            f'got device "{device}", which PyTorch has only where TorchTPU is imported: for a TPU through '
            'torchax, move it .to("jax")'
        )
    return device, dtype


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors that runs a function of JAX arrays, by this process's bridge.

    A process has one bridge. PyTorch has room for one device from another package: the bridge is TorchTPU if
    that is TorchTPU's device, and torchax otherwise. This is looked up when the returned function is called.
    """

    @functools.wraps(jax_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if upstream.added_device() == TPU:
            # Imported here, as it imports JAX, which this module does without until a model needs JAX.
            from cogvideox_torchax.runtime import torchtpu

            return torchtpu.torch_view(jax_function)(*args, **kwargs)
        # If a user has turned on JAX's checks, they would refuse its broadcasting and Python numbers.
        with jax_checks_off():
            return import_torchax().interop.call_jax(jax_function, *args, **kwargs)

    return call


def array_of(tensor: torch.Tensor) -> Any:
    """Return the `jax.Array` inside a torchax tensor."""
    return import_torchax().interop.jax_view(tensor)


def tensor_of(array: Any) -> torch.Tensor:
    """Return a `jax.Array` as a torchax tensor, without a copy."""
    return import_torchax().interop.torch_view(array)


@without_jax_checks
def to_jax(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a plain tensor to JAX's default device; return a torchax tensor unchanged.

    No gradient flows from the copy back to the plain tensor.
    """
    return tensor if on_jax(tensor) else import_torchax().default_env().to_xla(tensor.detach())


@without_jax_checks
def to_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of torchax or TorchTPU to the CPU; return any other tensor unchanged.

    The copy waits until the tensor is computed.
    """
    if on_jax(tensor):
        return plain_tensor(np.array(array_of(tensor)))
    return tensor.cpu() if tensor.device.type == TPU else tensor


def plain_tensor(host: np.ndarray) -> torch.Tensor:
    """Return a NumPy array as a plain torch tensor, without a copy: the inverse of `host_array`."""
    if host.dtype.name == "bfloat16":  # the dtype of ml_dtypes, which `from_numpy` refuses
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a plain torch tensor as a NumPy array, without a copy if it is contiguous."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        # torch cannot convert bfloat16 to NumPy, which has no such dtype: the bits are taken as int16.
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_array(value: Any) -> Any:
    """Return a plain tensor as a NumPy array, and a tensor on JAX as its JAX array, without a copy.

    An array is returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return array_of(value) if on_jax(value) else host_array(value)
