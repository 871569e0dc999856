"""torchax at the edge: turning it on and off, JAX functions as torch functions and back.

The one place that imports torchax, and lazily: importing the package costs no JAX start-up, and a user who
stays in native PyTorch never pays for it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cogvideox_torchax.runtime.compile_cache import configure_compile_cache
from cogvideox_torchax.upstream import teach_copying, torchax_is_on

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of PyTorch's own tensors; one on JAX has a type of torchax's."""


@functools.cache
def import_torchax() -> Any:
    """torchax with its `interop`; `ImportError` with the pair to install where it does not import."""
    try:
        import torchax.interop
        import torchax.view
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"torchax does not import with torch {torch.__version__} ({error}); "
            "install a matching pair: pip install 'torchax>=0.0.14.dev20261026' 'torch>=2.11'"
        ) from error
    from cogvideox_torchax.runtime.arrays import to_torch

    for kind in (torchax.tensor.Tensor, torchax.view.View):
        teach_copying(kind, tensor_of, to_torch, without_torchax)
    return torchax


def enable() -> None:
    """Turns torchax on for this thread, once; calling it again, or after `torchax.enable_globally()`, does
    nothing."""
    torchax = import_torchax()
    if not is_enabled():
        torchax.enable_globally()
    configure_compile_cache()


def is_enabled() -> bool:
    """Whether this thread's torch calls go through torchax."""
    return torchax_is_on()


@contextlib.contextmanager
def active() -> Iterator[None]:
    """While it is open, this thread's torch calls go through torchax, whether or not it has enabled it."""
    if is_enabled():
        yield
    else:
        with import_torchax().default_env():
            yield


def without_torchax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` where torchax is off: its modes belong to a thread, so a fresh thread has none.

    Loading safetensors and building on `torch.device("meta")` go wrong while torchax is on.
    """
    if not is_enabled():
        return function(*args, **kwargs)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def on_jax(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on JAX (a torchax tensor or a view of one) rather than in PyTorch itself."""
    # torchax's mode turns each attribute of a plain tensor into a call of its own.
    return type(tensor) not in PLAIN and tensor.device.type == "jax"


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a torch function: `torchax.interop.torch_view`, imported at the first call."""

    @functools.wraps(jax_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return import_torchax().interop.call_jax(jax_function, *args, **kwargs)

    return call


def array_of(tensor: torch.Tensor) -> Any:
    """The `jax.Array` inside a torchax tensor."""
    return import_torchax().interop.jax_view(tensor)


def tensor_of(array: Any) -> torch.Tensor:
    """A `jax.Array` as a torchax tensor, without a copy."""
    return import_torchax().interop.torch_view(array)


def jit_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A torch function of tensors compiled by JAX; its first argument is static and hashable, the rest are
    tensors."""
    import jax

    compiled = jax.jit(
        lambda static, *args: import_torchax().interop.jax_view(functools.partial(function, static))(*args),
        static_argnums=0,
    )
    return lambda static, *args: tensor_of(compiled(static, *import_torchax().interop.jax_view(args)))
