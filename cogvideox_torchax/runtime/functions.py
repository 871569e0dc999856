"""Operations for which torchax's own functions are replaced: attention, random numbers, and scaling.

Random numbers are drawn on the host by torch, so that a seed gives the same numbers as in PyTorch on a CPU.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax.runtime.host import host_array
from cogvideox_torchax.upstream import is_traced

MASKED = -6e4
"""What a mask adds to the score of a key that it leaves out; float16 goes down to -65,504."""

EXTRA_CHANNELS = 8
"""Channels that are added to carry a mask. One would do, but kernels want a multiple of 8 channels."""


class RandomInTraceError(ValueError):
    """A random number drawn while JAX traces a program, which would repeat this number in each call."""


def replace_functions(table: dict[Any, Any], interop: Any) -> None:
    """Replace functions and operators (of `torch.ops.aten`) in torchax's table, for all of the process.

    `interop` is torchax's module of that name, which converts between arrays and torchax's tensors.
    """
    # The table has, for each operation of torch, an entry whose `func` computes it.
    aten = torch.ops.aten
    attention = F.scaled_dot_product_attention
    functions = {attention: _attention(table[attention].func, interop)}
    for draw in (torch.randn, torch.rand, torch.randint):  # each also has an operator of its name
        functions |= dict.fromkeys((draw, getattr(aten, draw.__name__)), _drawn_on_host(draw))
    # The operators below take an array and return random numbers in its place. They need only its shape and
    # dtype, so torch draws for an empty tensor of these.
    functions[aten.randn_like] = _drawn_on_host(_with_empty_tensor(torch.randn_like))
    for operator, fill in ((aten.normal, torch.Tensor.normal_), (aten.uniform, torch.Tensor.uniform_)):
        functions[operator] = _drawn_on_host(_with_empty_tensor(fill))
    for operator in (aten.mul.Tensor, aten.mul.Scalar, aten.div):
        functions[operator] = _scaled_in_float32(table[operator].func)
    for operation, function in functions.items():
        entry = table[operation]
        entry.func = function
        entry.is_jax_function = True  # takes and returns arrays, not torchax's tensors
        entry.needs_env = False  # takes no argument `env`, torchax's environment


def _scaled_in_float32(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product or a quotient that takes an array of 16 bits and a number in float32, as PyTorch does.

    JAX would first round the number to the array's dtype, so that all of the latents that a pipeline scales
    would be wrong by the same factor. A program that is traced keeps JAX's arithmetic.
    """

    @functools.wraps(scale)
    def call(x: Any, y: Any, *args: Any, **options: Any) -> Any:
        array, number = (y, x) if type(x) in (int, float) else (x, y)
        is_number = type(number) in (int, float)
        if not is_number or array.dtype not in ("bfloat16", "float16") or is_traced(array):
            return scale(x, y, *args, **options)
        wide_x, wide_y = (each.astype(jnp.float32) if each is array else each for each in (x, y))
        return scale(wide_x, wide_y, *args, **options).astype(array.dtype)

    return call


def replace_keys(environment_class: Any) -> None:
    """Have torchax's own random functions, such as dropout, follow torch's seed, and raise in a trace."""

    # This becomes the method `get_and_rotate_prng_key` of torchax's environment. torchax's random functions
    # call it to get a key for JAX, from which they draw.
    def new_key(_self: Any, generator: torch.Generator | None = None) -> Any:
        if _in_program():
            raise RandomInTraceError("it draws random numbers, which no program on JAX does")
        with no_dispatch(), torch._C.DisableTorchFunction():  # torch's own `randint`, even if torchax is on
            seed = int(torch.randint(2**31 - 1, (), generator=generator))
        return jax.random.PRNGKey(seed)

    environment_class.get_and_rotate_prng_key = new_key


def _in_program() -> bool:
    """Return whether an array that is made now has no value, since JAX is tracing a program."""
    # `upstream.is_tracing` is true also while JAX computes a gradient, which may draw random numbers.
    return is_traced(jnp.zeros(()))


def _attention(torchax_attention: Callable[..., Any], interop: Any) -> Callable[..., Any]:
    """Return torch's `scaled_dot_product_attention` as a function of JAX arrays (..., H, S, D).

    H is the heads, S the tokens, and D the channels of a head. `jax_kernels.attention`, which never has all
    scores in memory, runs without a mask, and with a boolean mask that leaves keys out. In all other cases
    `torchax_attention` runs, torchax's own function, which takes and returns torchax's tensors.
    """

    @functools.wraps(F.scaled_dot_product_attention)
    def call(q: Any, k: Any, v: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        # Plain attention is without dropout, causal mask and grouped heads: their options are 0 or False. A
        # call that passes one of them by position (`args`) is left to torchax's function.
        is_plain = not args and not any(value for name, value in options.items() if name != "scale")
        if is_plain and _kernel_takes(q, k, v, attn_mask):
            return _attend(q, k, v, attn_mask, options.get("scale"))
        q, k, v, attn_mask = (None if x is None else interop.torch_view(x) for x in (q, k, v, attn_mask))
        return interop.jax_view(torchax_attention(q, k, v, attn_mask, *args, **options))

    return call


def _kernel_takes(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Return whether `_attend` computes this attention: heads and dtypes are equal, and a mask is of keys."""
    # All three have the same axes before the last two (S, D): videos and heads.
    heads_fit = q.ndim == k.ndim == v.ndim and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    # A mask of keys (N or 1, 1, 1, K) is the same for all heads and queries.
    is_of_keys = mask is None or (
        mask.dtype == bool and mask.ndim == q.ndim == 4 and mask.shape[1:3] == (1, 1)
    )
    return heads_fit and q.ndim > 1 and q.dtype == k.dtype == v.dtype and is_of_keys


def _attend(query: Any, key: Any, value: Any, mask: Any, scale: float | None) -> Any:
    """Return attention (..., H, S, D) by `jax_kernels.attention`; `mask` is (N or 1, 1, 1, K) or None."""
    import jax_kernels  # here, as this import takes longer than all of the other imports together

    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # From (..., H, S, D) to the kernel's (N, S, H, D), where N joins all axes before the heads. torch also
    # takes (S, D), for a single head.
    q, k, v = (
        jnp.moveaxis(x.reshape(-1, *(x.shape[-3:] if x.ndim > 2 else (1, *x.shape))), 1, 2)
        for x in (query, key, value)
    )
    # The kernel wants as many channels in the values as in queries and keys, so zeros are added. Zeros in
    # queries and keys change no score, and those in the values are cut off the result.
    channels = max(q.shape[-1], v.shape[-1])
    added = 0 if mask is None else EXTRA_CHANNELS  # they follow the others, so the first has index `channels`
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, channels + added - x.shape[-1]),)) for x in (q, k, v))
    # The kernel takes no mask, so one of the added channels carries it: 1 in each query, and in each key 0
    # or, if the mask leaves the key out, the large negative number `MASKED`. The product of a query and a key
    # sums over channels, so this adds 0 or `MASKED` to the key's scores, before they are scaled.
    if mask is not None:
        bias_NK = jnp.where(jnp.broadcast_to(mask[:, 0, 0], k.shape[:2]), 0, MASKED).astype(k.dtype)
        q = q.at[..., channels].set(1)
        k = k.at[..., channels].set(bias_NK[..., None])
    padded_NSHD = jax_kernels.attention(*map(_split_by_video, (q, k, v)), scale=scale)
    y_NSHD = padded_NSHD[..., : value.shape[-1]]
    return jnp.moveaxis(y_NSHD, 2, 1).reshape(*query.shape[:-1], value.shape[-1])


def _split_by_video(x: Any) -> Any:
    """Return queries, keys or values (N, S, H, D), constrained on a mesh to a split by videos alone."""
    # The kernel splits heads too. Without the constraint XLA's partitioner would propagate that split to
    # earlier operations, and compute one of them wrongly: `x[:, a:] = rotated`, for some of the tokens (JAX
    # 0.10.2, on a CPU).
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # no mesh, or inside a `shard_map`, where arrays are one device's
        return x
    dp = mesh.axis_names[0]  # the axis that a batch of videos is split over
    by_video = dp if x.shape[0] % mesh.shape[dp] == 0 else None
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(by_video))


def _drawn_on_host(draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function that draws random numbers by `draw`, a function of torch, and returns an array."""

    @functools.wraps(draw)
    def call(*args: Any, **options: Any) -> Any:
        if _in_program():
            raise RandomInTraceError(f"{draw.__name__} draws random numbers, which no program on JAX does")
        # These options tell of the tensor that torchax makes of the array, not of the numbers.
        for name in ("device", "layout", "pin_memory", "memory_format", "requires_grad"):
            options.pop(name, None)
        with no_dispatch(), torch._C.DisableTorchFunction():  # torch draws on the CPU, even if torchax is on
            numbers = draw(*args, **options)
            return jnp.array(host_array(numbers))

    return call


def _with_empty_tensor(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of a JAX array that calls `function` with an empty tensor of its shape and dtype."""

    @functools.wraps(function)
    def call(array: Any, *args: Any, **options: Any) -> torch.Tensor:
        # `function` reads no values: it draws a new tensor, or fills this one with random numbers.
        dtype = getattr(torch, array.dtype.name)
        return function(torch.empty(array.shape, dtype=dtype), *args, **options)

    return call
