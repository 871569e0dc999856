"""Limits of the Pallas kernels for TPUs: supported arrays, and the size of a step."""

import os

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

SWITCH = "JAX_KERNELS_PALLAS"
"""Environment variable of the kernels: "off" leaves their work to XLA, "off:OP,OP" the work of these ops,
"direct" turns Winograd off.

It is read at each call; inside a compiled program, when the call is traced.
"""

BLOCK_BYTES = 4 * 2**20
"""Bytes of a step's inputs and results, held twice, as the next are fetched meanwhile.

A kernel has 16 MiB on a v5e.
"""

LANES = 128
"""Channels of a tile."""

SMALLEST = 4096
"""Pixels of a frame that are worth a kernel with frames in the sublanes of its tiles."""

MIB = 2**20


DTYPES = jnp.float32, jnp.bfloat16
"""Dtypes that a Pallas kernel loads."""


def pallas_mode(op: str | None = None) -> str:
    """Return the value of `SWITCH`; of an op, if one is named, "on", "off" or "direct"."""
    mode = os.environ.get(SWITCH, "on")
    if op is None or not mode.startswith("off:"):
        return mode
    return "off" if op in mode.removeprefix("off:").split(",") else "on"


def fills_tiles(x: Float[Array | jax.ShapeDtypeStruct, "N T H W C"]) -> bool:
    """Return whether a Pallas kernel supports frames of so many channels of this dtype."""
    return x.size > 0 and x.shape[-1] % LANES == 0 and x.dtype in DTYPES


def tiled_sublanes(frames: int, dtype: jnp.dtype) -> int:
    """Return the sublanes that so many frames use in whole tiles."""
    tile = 32 // dtype.itemsize
    return -(-frames // tile) * tile


def pixel_bytes(like: Float[Array, "N T H W C"], *frames: int) -> int:
    """Return the bytes of one pixel in arrays of so many frames each, in whole tiles."""
    videos, channels = like.shape[0], like.shape[-1]
    return videos * sum(tiled_sublanes(n, like.dtype) for n in frames) * channels * like.dtype.itemsize


def words_of_twice(rows: Float[Array, "rows lanes"]) -> Int[Array, "rows lanes"]:
    """Return 32-bit words that hold each bfloat16 row twice, as a tile packs two rows; inside a kernel."""
    high = pltpu.bitcast(rows.astype(jnp.float32), jnp.int32)
    return high | lax.shift_right_logical(high, 16)


def vmem_limit() -> int:
    """Return the VMEM that a kernel may use on the target chip, as far as it is known."""
    try:
        capacity = pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # traced on another platform
        capacity = 128 * MIB
    return capacity - MIB
