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
"""Environment variable that turns kernels off: "off" leaves the work of all Pallas kernels to XLA,
"off:OP,OP" that of the listed ops, and "direct" turns Winograd's filtering off.

An op reads it at each call; inside a compiled program, when the call is traced.
"""

BLOCK_BYTES = 4 * 2**20
"""Most bytes of the inputs and results of one grid step.

VMEM holds those of two steps, because the next step's inputs are fetched during a step. On a v5e a kernel has
16 MiB of VMEM if it asks for no more.
"""

LANES = 128
"""Lanes of a tile: the channels that it holds."""

SUBLANES = 8
"""Rows of a register of float32."""

SMALLEST_FRAME = 4096
"""Fewest pixels of a frame for which a kernel with frames in the sublanes is faster than XLA."""

KERNEL_VMEM = 64 * 2**20
"""Bytes of VMEM for a kernel with blocks of `BLOCK_BYTES`: for its blocks, and for what it computes."""

DTYPES = jnp.float32, jnp.bfloat16
"""Dtypes that a Pallas kernel loads."""

PARTLY_UNROLLED = jax.__version_info__ >= (0, 10, 1)
"""Whether a kernel's loop can be unrolled in part: before 0.10.1, JAX unrolls all of a loop or none of it."""


def pallas_mode(op: str | None = None) -> str:
    """Return the value of the environment variable that `SWITCH` names, "on" if it is not set.

    With the name of an op, a value "off:OP,OP" counts as "off" if its list has the op, else as "on".
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
    """Return `rows`, rounded up to the rows of whole tiles."""
    return pl.cdiv(rows, tile_rows(dtype)) * tile_rows(dtype)


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` up to `limit`; 0 if the limit is below 1."""
    return next((n for n in range(min(limit, count), 0, -1) if count % n == 0), 0)


def whole_spec(array: Array) -> pl.BlockSpec:
    """Return the spec by which every grid step of a kernel reads all of an array.

    The block is the same in every step, so one buffer is enough. A block that changes needs two: one that the
    step reads, and one for what is fetched meanwhile.
    """
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim, pipeline_mode=pl.Buffered(1))


def duplicated_in_words(rows: Float[Array, "rows lanes"]) -> Int[Array, "rows lanes"]:
    """Return 32-bit words that hold each bfloat16 number twice; call it inside a Pallas kernel.

    In a tile, a word holds the numbers of two adjacent rows of bfloat16. So the result, if it is read as
    bfloat16, has every row twice. Kernels repeat frames in this way.
    """
    # The number's 16 bits, then 16 zero bits: a bfloat16 is the upper half of a float32.
    high = pltpu.bitcast(rows.astype(jnp.float32), jnp.int32)
    return high | jax.lax.shift_right_logical(high, 16)


def vmem_limit() -> int:
    """Return the bytes of VMEM that a kernel may use: the chip's, but for 1 MiB that the compiler may need.

    The chip is the one that the kernel is traced for. If that is not a TPU, it is taken for a v6e.
    """
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes - 2**20
    except ValueError:  # traced on another platform
        return 127 * 2**20
