"""torchax in this process: imported, corrected, and turned on or off.

Only this module imports torchax, and only when it is needed: a user of native PyTorch never starts JAX.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cogvideox_torchax.runtime.compile_cache import configure_compile_cache
from cogvideox_torchax.runtime.forks import check_not_forked
from cogvideox_torchax.runtime.host import on_host, plain_tensor
from cogvideox_torchax.runtime.user_checks import jax_checks_off, without_jax_checks
from cogvideox_torchax.upstream import (
    one_program_each,
    teach_copying,
    torchax_is_on as is_enabled,
    torchax_off,
)
from cogvideox_torchax.versions import TESTED, installed


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
            import torchax.ops.mappings
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

    @without_jax_checks
    def to_torch(tensor: Any) -> torch.Tensor:
        return plain_tensor(on_host(tensor.jax()))

    for tensor_class in (torchax.tensor.Tensor, torchax.view.View):
        # For `copy` and `pickle`.
        teach_copying(tensor_class, torchax.interop.torch_view, to_torch, without_torchax)
    ops: Any = torchax.ops
    registry = ops.ops_registry
    one_program_each(registry)  # sums and products run as one program, not as several
    # Attention runs by this project's kernel, and torch draws the random numbers, those of dropout too.
    replace_functions(registry, active)
    # JAX warns of each dtype of 64 bits that it is asked for, and takes 32. So torchax asks for 32.
    mappings, jax_dtype = ops.mappings, ops.mappings.t2j_dtype
    mappings.t2j_dtype = lambda dtype: dtypes.canonicalize_dtype(jax_dtype(dtype))
    if dtypes.canonicalize_dtype("int64") == "int32":
        for module in (ops.jaten, ops.jtorch):
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


def on_meta(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `build(*args, **kwargs)`; the weights that it makes take no memory: torch's device "meta"."""
    with torchax_off() if is_enabled() else contextlib.nullcontext(), torch.device("meta"):
        return build(*args, **kwargs)
