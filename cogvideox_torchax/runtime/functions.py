"""Operations for which torchax's own functions are replaced: attention, scaling, writes into parts."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
import torchax.interop
from torch._decomp.decompositions import native_batch_norm_helper
from torch.nn import functional as F

from cogvideox_torchax.runtime.views import written
from cogvideox_torchax.upstream import is_traced

MASKED = -6e4
"""What a mask adds to the score of a key that it leaves out; float16 goes down to -65,504."""

EXTRA_CHANNELS = 8
"""Channels that are added to carry a mask. One would do, but kernels want a multiple of 8 channels."""


def replace_functions(registry: Any) -> None:
    """Replace functions and operators (of `torch.ops.aten`) in torchax's tables, for all of the process.

    `registry` is torchax's module of that name, with a table of operators and one of functions.
    """
    # The tables have, for each operation of torch, an entry whose `func` computes it.
    aten, operators = torch.ops.aten, registry.all_aten_ops
    table = operators | registry.all_torch_functions
    lacking: dict[Any, Callable[..., Any]] = {
        aten._is_all_true: jnp.all,  # torch.distributions has these two
        aten._is_any_true: jnp.any,
        aten.view.dtype: lambda x, dtype: x.view(jnp.dtype(str(dtype).removeprefix("torch."))),
    }
    for operator, function in lacking.items():
        registry.register_torch_dispatch_op(operator, function)
    norm = operators[aten.native_batch_norm]
    norm.func, norm.is_jax_function = _batch_norm, False
    one_hot = registry.all_torch_functions[F.one_hot].func
    table[F.one_hot].func = lambda input, num_classes=-1: one_hot(input, num_classes)  # torch's own names
    functions = {F.scaled_dot_product_attention: _attention(table[F.scaled_dot_product_attention].func)}
    for operator in (aten.mul.Tensor, aten.mul.Scalar, aten.div):
        functions[operator] = _scaled_in_float32(table[operator].func)
    for operator in (aten.slice_scatter, aten.select_scatter, aten.index_put, aten.index_copy):
        functions[operator] = _then_written(table[operator].func)
    for operation, function in functions.items():
        entry = table[operation]
        entry.func = function
        entry.is_jax_function = True  # takes and returns arrays, not torchax's tensors
        entry.needs_env = False  # takes no argument `env`, torchax's environment


def _batch_norm(*args: Any) -> Any:
    return native_batch_norm_helper(*args, functional=False)[:3]  # torchax's keeps no running statistics


def _then_written(write: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(write)(lambda *args, **options: written(write(*args, **options)))


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


def _attention(torchax_attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `scaled_dot_product_attention` as a function of JAX arrays (..., H, S, D).

    H is the heads, S the tokens, and D the channels of a head. `jax_kernels.attention`, which never has all
    scores in memory, runs without a mask, and with a boolean mask that leaves keys out. In all other cases
    `torchax_attention` runs, torchax's own function, which takes and returns torchax's tensors.
    """

    def call(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        has_keys: Any = True
        if attn_mask is not None:
            # A query without keys attends to all, so that its gradients are finite, and results in zeros.
            has_keys = (attn_mask > (False if attn_mask.dtype == bool else -jnp.inf)).any(-1, keepdims=True)
            attn_mask = jnp.where(has_keys, attn_mask, jnp.asarray(attn_mask.dtype == bool, attn_mask.dtype))
        if not (dropout_p or is_causal or enable_gqa) and _kernel_takes(query, key, value, attn_mask):
            result = _attend(query, key, value, attn_mask, scale)
        else:
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            tensors = (
                None if x is None else torchax.interop.torch_view(x) for x in (query, key, value, attn_mask)
            )
            result = torchax_attention(*tensors, **options, enable_gqa=enable_gqa).jax()
        return result if attn_mask is None else jnp.where(has_keys, result, 0)

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
    padded_NSHD = jax_kernels.attention(q, k, v, scale=scale)
    y_NSHD = padded_NSHD[..., : value.shape[-1]]
    return jnp.moveaxis(y_NSHD, 2, 1).reshape(*query.shape[:-1], value.shape[-1])
