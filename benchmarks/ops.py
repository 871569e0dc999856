"""The ops that are measured alone: a table of their operands, and how one is loaded and run.

An operand is its shape, axis by axis, and after a colon its dtype where that is not the job's. Axes are
numbers, and letters that `axes` gives a length: T frames, H rows, W columns of a chunk at full size, and
fractions of these; S tokens, A heads, C channels of all heads, 4C inside the feed-forward.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_kernels
from benchmarks.jobs import TWO_LAYERS, Size
from benchmarks.plan import networks

TRANSFORMERS = networks.TRANSFORMERS | {TWO_LAYERS: networks.TRANSFORMERS["5b"] | {"num_layers": 2}}
"""The published transformers, and a part of one."""
TOKENS = 226
"""Tokens of a prompt."""
INTEGER = 7
"""Every number of an integer input: valid as a token, as a timestep and as a text's length."""
SMALL_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_layers": 2,
    "use_rotary_positional_embeddings": True,
    "text_embed_dim": 256,
    "max_text_seq_length": 64,
}

# The VAE's: a chunk; its latents; a norm's weight or bias; kernel and bias of a spatial norm's convolutions.
_X, _Z, _CHANNELS = "1 T H W 128", "1 T/4 H/8 W/8 16", "128"
_MODULATION = ("16 128", _CHANNELS, "16 128", _CHANNELS)
_GROUPS = {"num_groups": 32}
# The transformer's: two sequences, for guidance; of each a vector for the text and one for the video; the
# cosines or the sines of a rotation.
_SEQUENCES, _VECTORS, _TEXT_LENGTH, _ANGLES = "2 S C", "2 2 C", ": int32", "S 64: float32"

OPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm_conv3d": (
        (
            _X,
            jax_kernels.NormParams(_CHANNELS, _CHANNELS, _Z, *_MODULATION),
            "3 3 3 128 128",
            _CHANNELS,
            "1 2 H W 128",  # the convolution's cache: two frames of an earlier chunk
        ),
        _GROUPS,
    ),
    "upsample": (("1 T/2 H/2 W/2 128", "3 3 128 128", _CHANNELS), {"expand_time": True}),
    "group_norm": ((_X, _CHANNELS, _CHANNELS), {**_GROUPS, "channel_axis": -1, "activation": "silu"}),
    "spatial_norm": ((_X, _Z, _CHANNELS, _CHANNELS, *_MODULATION), {**_GROUPS, "activation": "silu"}),
    "attention": (("2 S A 64",) * 3, {}),
    "qk_norm_rope": ((_SEQUENCES, "64", "64", _ANGLES, _ANGLES), {"heads": "A"}),
    "adaptive_layer_norm": ((_SEQUENCES, "C", "C", _VECTORS, _VECTORS, _TEXT_LENGTH), {}),
    "linear_gelu": ((_SEQUENCES, "4C C", "4C"), {}),
    "gated_linear": (("2 S 4C", "C 4C", "C", _SEQUENCES, _VECTORS, _TEXT_LENGTH), {}),
}
"""By the name of an op: its operands, nested as the op takes them, and its options."""


def latents(size: Size) -> dict[str, int]:
    return {"frames": (size.frames - 1) // 4 + 1, "height": size.height // 8, "width": size.width // 8}


def axes(size: Size) -> dict[str, int]:
    """Return the lengths of the axes that `OPS` names, such as T or H/2, for a video and its model."""
    T, H, W = min(size.frames, 8), size.height, size.width  # 8: the frames of a chunk
    heads = TRANSFORMERS.get(size.model, SMALL_TRANSFORMER)["num_attention_heads"]
    patches = latents(size)["frames"] * (H // 16) * (W // 16)  # a patch: 2 x 2 latent pixels, 16 x 16 pixels
    channels = 64 * heads  # a head has 64; the feed-forward has 4 times as many inside
    return {
        **{"T": T, "H": H, "W": W, "S": TOKENS + patches, "A": heads, "C": channels, "4C": 4 * channels},
        **{"T/2": max(T // 2, 1), "H/2": H // 2, "W/2": W // 2},
        **{"T/4": max(T // 4, 1), "H/8": H // 8, "W/8": W // 8},
    }


def bound(name: str, size: Size, dtype: Any) -> tuple[functools.partial[Any], Any]:
    """Return an op of `OPS` with its options bound, and `jax.ShapeDtypeStruct`s, nested as its operands.

    `dtype` is that of the operands for which `OPS` names none.
    """
    lengths, (operands, options) = axes(size), OPS[name]  # lengths: by the axis's letter

    def struct(operand: str) -> Any:
        """Return the struct of an operand of `OPS`, such as "2 S C" or "S 64: float32"."""
        axes_text, _, own_dtype = operand.partition(": ")
        shape = [int(lengths.get(axis, axis)) for axis in axes_text.split()]  # a letter's length, or a number
        return jax.ShapeDtypeStruct(shape, own_dtype or dtype)

    # An option may be an axis too: `heads` is "A".
    options = {option: lengths.get(value, value) for option, value in options.items()}
    return functools.partial(getattr(jax_kernels, name), **options), jax.tree.map(struct, operands)


def load(name: str, size: Size, dtype: Any, reference: dict[str, int] | None) -> Callable[[], Any]:
    """Load an op of `OPS` with random operands; return the function that runs it once.

    `dtype` is as for `bound`. If `reference` is None, the op itself is loaded, compiled. A dictionary loads
    the op's plain form, not compiled, and has the options that only the plain form takes.
    """
    op, structs = bound(name, size, dtype)  # a partial of the op with its options; its operands' structs
    generator = torch.Generator().manual_seed(1)

    def draw(struct: Any) -> jax.Array:
        if struct.dtype == np.int32:
            return jnp.full(struct.shape, INTEGER, np.int32)  # valid for every integer operand of an op
        numbers = torch.randn(struct.shape, generator=generator).numpy()
        # Operands of 2 and 5 axes, among them the weights of matrix products and convolutions, are scaled
        # down, so that results stay near 1. The mean of 0.3, not 0, shows an error in a norm's mean.
        scale = math.sqrt(math.prod(struct.shape[:-1])) if len(struct.shape) in (2, 5) else 1.0
        return jnp.asarray((numbers + 0.3) / scale, struct.dtype)

    operands = jax.tree.map(draw, structs)
    if name == "qk_norm_rope":
        # RoPE rotates a pair of channels by one angle, so both have the same cosine and the same sine.
        x, weight, bias, *tables = operands
        operands = x, weight, bias, *(table[:, ::2].repeat(2, axis=1) for table in tables)
    if reference is None:
        run = functools.partial(jax.jit(op), *operands)
    else:
        package, _, _module = op.func.__module__.rpartition(".")
        module = importlib.import_module(package + ".reference")  # has the plain form, by the op's name
        run = functools.partial(getattr(module, name), *operands, **op.keywords, **reference)
    if name == "norm_conv3d":
        return lambda: run()[:2]  # without the result's statistics, which the plain form does not return
    return run
