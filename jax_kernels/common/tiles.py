"""What the Pallas kernels for TPUs have in common: which arrays they take, and how much of one in a step."""

import os

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

SWITCH = "JAX_KERNELS_PALLAS"
"""The environment variable that, set to "off", leaves the work of the Pallas kernels to XLA, and set to
"direct" has them convolve directly, not by Winograd's filtering. It is read at each call; a call inside of a
compiled program, when that is traced."""

BLOCK_BYTES = 4 * 2**20
"""What one step may take and give: twice, since the next is fetched meanwhile, in the 16 MiB that a kernel
gets on a v5e."""

LANES = 128
"""How many channels a tile holds."""

SMALLEST = 4096
"""Pixels of a frame that are worth a kernel with frames in the sublanes of its tiles."""

MIB = 2**20


DTYPES = jnp.float32, jnp.bfloat16
"""Those that a Pallas kernel loads."""


def pallas_mode() -> str:
    """What `SWITCH` says now: "on", "off" or "direct"."""
    return os.environ.get(SWITCH, "on")


def fills_tiles(x: Float[Array | jax.ShapeDtypeStruct, "N T H W C"]) -> bool:
    """Whether a Pallas kernel takes frames of so many channels of this dtype."""
    return x.size > 0 and x.shape[-1] % LANES == 0 and x.dtype in DTYPES


def in_sublanes(frames: int, dtype: jnp.dtype) -> int:
    """What so many frames take up in whole tiles."""
    tile = 32 // dtype.itemsize
    return -(-frames // tile) * tile


def pixel_bytes(like: Float[Array, "N T H W C"], *frames: int) -> int:
    """What one pixel takes up in arrays of so many frames each, in whole tiles."""
    videos, channels = like.shape[0], like.shape[-1]
    return videos * sum(in_sublanes(n, like.dtype) for n in frames) * channels * like.dtype.itemsize


def words_of_twice(rows: Float[Array, "rows lanes"]) -> Int[Array, "rows lanes"]:
    """Inside a kernel: each row of bfloat16 twice, as a tile holds two rows in its words."""
    high = pltpu.bitcast(rows.astype(jnp.float32), jnp.int32)
    return high | lax.shift_right_logical(high, 16)


def vmem_limit() -> int:
    """What a kernel may hold on the chip that is compiled for, as far as it is known."""
    try:
        capacity = pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # traced on another platform
        capacity = 128 * MIB
    return capacity - MIB
