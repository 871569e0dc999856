"""Limits of the Pallas kernels for TPUs: supported arrays, and the size of a grid step.

A TPU keeps an array's last two axes in tiles: 128 lanes of the last, and as many sublanes (rows) of the one
before as 32 bytes hold.
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

SWITCH = "JAX_KERNELS_PALLAS"
"""Environment variable of the kernels: "off" leaves their work to XLA, "off:OP,OP" the work of these ops,
"direct" turns Winograd's filtering off.

It is read at each call; inside a compiled program, when the call is traced.
"""

BLOCK_BYTES = 4 * 2**20
"""Most bytes of a grid step's inputs and results; two steps' are in VMEM, as the next are fetched meanwhile.

A kernel has 16 MiB on a v5e.
"""

LANES = 128
"""Lanes of a tile: the channels that it holds."""

SUBLANES = 8
"""Rows of a register of float32."""

SMALLEST = 4096
"""Fewest pixels of a frame for which a kernel with frames in the sublanes is faster than XLA."""

KERNEL_VMEM = 64 * 2**20
"""Bytes of VMEM that a kernel with blocks of `BLOCK_BYTES` may use, for them and for what it computes."""

DTYPES = jnp.float32, jnp.bfloat16
"""Dtypes that a Pallas kernel loads."""

PARTLY_UNROLLED = jax.__version_info__ >= (0, 10, 1)
"""A kernel's loop can be unrolled in part; JAX before 0.10.1 takes 1 or the whole loop."""


def pallas_mode(op: str | None = None) -> str:
    """Return the value of the environment variable that `SWITCH` names, "on" if it is not set.

    With `op`, an op's name, a list "off:OP,OP" becomes "off" if it has the op, else "on".
    """
    mode = os.environ.get(SWITCH, "on")
    if op is None or not mode.startswith("off:"):
        return mode
    return "off" if op in mode.removeprefix("off:").split(",") else "on"


def fills_tiles(x: Float[Array | jax.ShapeDtypeStruct, "*axes C"]) -> bool:
    """Return whether the channels of `x` fill whole tiles, in a dtype that a Pallas kernel loads."""
    return x.size > 0 and x.shape[-1] % LANES == 0 and x.dtype in DTYPES


def tile_rows(dtype: jnp.dtype) -> int:
    return 32 // dtype.itemsize  # a tile is 32 bytes high in every dtype


def tiled_sublanes(rows: int, dtype: jnp.dtype) -> int:
    """Return the number of rows of the whole tiles that hold `rows` rows."""
    return pl.cdiv(rows, tile_rows(dtype)) * tile_rows(dtype)


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` up to `limit`; 0 if the limit is below 1."""
    return next((n for n in range(min(limit, count), 0, -1) if count % n == 0), 0)


def whole_spec(array: Array) -> pl.BlockSpec:
    """Return the spec by which every grid step of a kernel reads all of an array.

    The block never changes, so one buffer is enough; a block that changes from step to step has two.
    """
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim, pipeline_mode=pl.Buffered(1))


def duplicated_in_words(rows: Float[Array, "rows lanes"]) -> Int[Array, "rows lanes"]:
    """Return 32-bit words that hold each bfloat16 number twice; call it inside a Pallas kernel.

    A tile packs two rows of bfloat16 into one row of words. Read as bfloat16, the result has every row twice.
    """
    high = pltpu.bitcast(rows.astype(jnp.float32), jnp.int32)  # the number's 16 bits, then 16 zero bits
    return high | jax.lax.shift_right_logical(high, 16)


def vmem_limit() -> int:
    """Return the bytes of VMEM that a kernel may use: all but 1 MiB, left for what the compiler adds.

    The chip is the one that the kernel is traced for, or a v6e if none is known.
    """
    try:
        capacity = pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # traced on another platform
        capacity = 128 * 2**20
    return capacity - 2**20
