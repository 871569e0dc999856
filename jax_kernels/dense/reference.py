"""Operations on channels alone, in their plainest form, which the fast forms have to equal.

Tokens are (N, S, C): those of a video's text, then, from the index `first` on, its patches. A gate, scale or
shift (N, 2, C) has one vector for the text tokens, then one for the patches.
"""

import jax
import jax.numpy as jnp


def linear(x, weight, bias=None, *, scale=None, dynamic=False, rounded_parts=False):
    """Multiply in float32 and round once, whatever `rounded_parts` is: one device has no parts of a sum."""
    x, dtype = x.astype(jnp.float32), x.dtype
    if dynamic:
        largest = jnp.abs(x).max(-1, keepdims=True)
        x = jnp.rint(x * jnp.where(largest == 0, 0, 127 / largest)) * (largest / 127)
    weight = weight.astype(jnp.float32)
    weight = weight if scale is None else weight * scale.astype(jnp.float32)[:, None]
    y = jnp.matmul(x, weight.T, precision=jax.lax.Precision.HIGHEST)
    return (y if bias is None else y + bias).astype(dtype)


def split_linear(x, weight, bias=None, *, scale=None, dynamic=False, parts):
    return jnp.stack(jnp.split(linear(x, weight, bias, scale=scale, dynamic=dynamic), parts, axis=1))


def layer_norm(x, weight, bias, eps=1e-5):
    """Normalize the last axis in float32, then apply `weight` and `bias`, each of which may be None."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).astype(x.dtype)


def adaptive_layer_norm(x, weight, bias, scale, shift, first, eps=1e-5):
    kind = (jnp.arange(x.shape[1]) >= first).astype(int)  # of each token: 0 is text, 1 a patch
    y = layer_norm(x.astype(jnp.float32), weight, bias, eps)
    return (y * (1 + scale.astype(jnp.float32)[:, kind]) + shift[:, kind]).astype(x.dtype)


def gated_residual(x, y, gate, first):
    kind = (jnp.arange(x.shape[1]) >= first).astype(int)  # of each token: 0 is text, 1 a patch
    return (x + gate.astype(jnp.float32)[:, kind] * y.astype(jnp.float32)).astype(x.dtype)


def linear_gelu(x, weight, bias=None, *, scale=None, dynamic=False):
    return gelu(_in_float32(linear, x, weight, bias, scale=scale, dynamic=dynamic)).astype(x.dtype)


def gated_linear(x, weight, bias, residual, gate, first, *, scale=None, dynamic=False, transposed=False):
    x = x.swapaxes(1, 2) if transposed else x
    y = _in_float32(linear, x, weight, bias, scale=scale, dynamic=dynamic)
    return gated_residual(residual, y, gate, first)


def _in_float32(function, *arrays, **options):
    """Call a function with the arrays as float32, so that its result is not rounded; None stays None."""
    return function(*(None if array is None else array.astype(jnp.float32) for array in arrays), **options)


def silu(x, *, time_axis=None):
    """Compute SiLU in float32, all frames at once: `time_axis` makes no difference here."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def gelu(x):
    """Compute JAX's own GELU, by its tanh approximation, in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
