"""Operations that torchax computes in another way here: attention, and random numbers."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax.runtime.bridge import array_of, host_array, tensor_of
from cogvideox_torchax.upstream import is_traced

MASKED = -6e4
"""Score, before its scale, of a key that a mask leaves out; the largest that float16 has is 65,504."""

EXTRA_CHANNELS = 8
"""Channels that carry a mask: as many as keep a number of channels a multiple of 8, which kernels want."""


class RandomInTraceError(ValueError):
    """A random number drawn while JAX traces a program, which would have the same one in each call."""


def replace_functions(table: dict[Any, Any]) -> None:
    """Replace functions in torchax's table of operators, for all of the process."""
    aten = torch.ops.aten
    functions = {F.scaled_dot_product_attention: _attention(table[F.scaled_dot_product_attention].func)}
    for make in (torch.randn, torch.rand, torch.randint):
        functions |= dict.fromkeys((make, getattr(aten, make.__name__)), _drawn_on_host(make))
    functions[aten.randn_like] = _drawn_on_host(_of_array(torch.randn_like))
    for fill, make in ((aten.normal, torch.Tensor.normal_), (aten.uniform, torch.Tensor.uniform_)):
        functions[fill] = _drawn_on_host(_of_array(make))
    for operation, function in functions.items():
        entry = table[operation]
        entry.func, entry.is_jax_function, entry.needs_env = function, True, False


def replace_keys(environment: Any) -> None:
    """Have torchax's other random functions, such as dropout, follow torch's seed, and refuse a trace.

    Args:
        environment: torchax's class of environments, which take their keys by `get_and_rotate_prng_key`.
    """

    def key(_self: Any, generator: torch.Generator | None = None) -> Any:
        if is_traced(jnp.zeros(())):
            raise RandomInTraceError("it draws random numbers, which no program on JAX does")
        with no_dispatch(), torch._C.DisableTorchFunction():
            return jax.random.PRNGKey(int(torch.randint(2**31 - 1, (), generator=generator)))

    environment.get_and_rotate_prng_key = key


def _attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `scaled_dot_product_attention` as a function of JAX arrays (..., H, S, D).

    `jax_kernels.attention`, which never has all scores in memory, runs without a mask and with a boolean mask
    of keys. `plain`, torchax's own function of its tensors, runs with other masks and options.
    """

    @functools.wraps(F.scaled_dot_product_attention)
    def call(q: Any, k: Any, v: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        is_default = not args and not any(value for name, value in options.items() if name != "scale")
        if is_default and _kernel_takes(q, k, v, attn_mask):
            return _attend(q, k, v, attn_mask, options.get("scale"))
        q, k, v, attn_mask = (None if x is None else tensor_of(x) for x in (q, k, v, attn_mask))
        return array_of(plain(q, k, v, attn_mask, *args, **options))

    return call


def _kernel_takes(q: Any, k: Any, v: Any, mask: Any) -> bool:
    heads_fit = q.ndim == k.ndim == v.ndim and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    of_keys = mask is None or (mask.dtype == bool and mask.ndim == q.ndim == 4 and mask.shape[1:3] == (1, 1))
    return heads_fit and q.ndim > 1 and q.dtype == k.dtype == v.dtype and of_keys


def _attend(query: Any, key: Any, value: Any, mask: Any, scale: float | None) -> Any:
    """Return attention (..., H, S, D) by `jax_kernels.attention`; `mask` is (N or 1, 1, 1, K) or None.

    The kernel takes no mask, so one more channel carries it: 1 in each query, and 0 or `MASKED` in each key,
    which adds 0 or `MASKED` to the scores of that key.
    """
    import jax_kernels  # takes longer to import than all others

    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # (N, S, H, D): leading axes are joined, and a single head has no axis of its own in torch.
    q, k, v = (
        jnp.moveaxis(x.reshape(-1, *(x.shape[-3:] if x.ndim > 2 else (1, *x.shape))), 1, 2)
        for x in (query, key, value)
    )
    channels = max(q.shape[-1], v.shape[-1])
    added = 0 if mask is None else EXTRA_CHANNELS
    # Zeros in queries and keys change no score.
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, channels + added - x.shape[-1]),)) for x in (q, k, v))
    if mask is not None:
        bias_NK = jnp.where(jnp.broadcast_to(mask[:, 0, 0], k.shape[:2]), 0, MASKED).astype(k.dtype)
        q, k = q.at[..., channels].set(1), k.at[..., channels].set(bias_NK[..., None])
    y = jax_kernels.attention(*map(_split_by_video, (q, k, v)), scale=scale)[..., : value.shape[-1]]
    return jnp.moveaxis(y, 2, 1).reshape(*query.shape[:-1], value.shape[-1])


def _split_by_video(x: Any) -> Any:
    """Return queries, keys or values (N, S, H, D); if there is a mesh, they are split by videos alone.

    The kernel splits heads too. XLA's partitioner would propagate that split to earlier operations, and then
    compute one of them wrongly: `x[:, a:] = rotated`, for some of the tokens (JAX 0.10.2, on a CPU).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    first = mesh.axis_names[0]
    by_video = first if x.shape[0] % mesh.shape[first] == 0 else None
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(by_video))


def _drawn_on_host(draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function that draws on the host, as torch does on the CPU, and returns a JAX array."""

    @functools.wraps(draw)
    def call(*args: Any, **options: Any) -> Any:
        if is_traced(jnp.zeros(())):
            raise RandomInTraceError(f"{draw.__name__} draws random numbers, which no program on JAX does")
        for name in ("device", "layout", "pin_memory", "memory_format", "requires_grad"):
            options.pop(name, None)
        with no_dispatch(), torch._C.DisableTorchFunction():
            return jnp.array(host_array(draw(*args, **options)))

    return call


def _of_array(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of a JAX array that calls `function` with an empty tensor of its shape and dtype."""

    @functools.wraps(function)
    def call(array: Any, *args: Any, **options: Any) -> torch.Tensor:
        dtype = getattr(torch, array.dtype.name)
        return function(torch.empty(array.shape, dtype=dtype), *args, **options)

    return call
