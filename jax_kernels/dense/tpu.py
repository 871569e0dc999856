"""Operations on channels alone, by Pallas kernels for TPUs.

A video's text tokens come first, and its patches from the index `first_patch` on. Vectors (N, 2, C) are the
video's vector for text, then that for patches.

The kernel of `product` computes a block of outputs in *units*, one matrix product each. While one unit is
multiplied, the *epilogue* of the unit before is computed: its bias, then GELU or the gated sum.

Axis letters here: N videos, S tokens, C channels, I the channels that a matrix takes (the inputs), O those
that it gives (the outputs).
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from jax_kernels.common import tiles
from jax_kernels.common.pointwise import quantized, standardized

TOKENS = 512
"""Most tokens of a block."""

ROWS = 16
"""Tokens that are normed at a time: a tile of bfloat16 has so many sublanes."""

INT8_ROWS = 32
"""Tokens that are rounded to int8 at a time: a tile of int8 has so many sublanes."""

UNROLLED = 4 if tiles.PARTLY_UNROLLED else 1
"""Groups of `ROWS` tokens in a loop's body."""

TOKEN_BLOCKS = 512, 384
"""Choices for the tokens of a product's block: the number with the least padding is taken."""

UNIT_OUTPUTS = 256
"""Outputs of a unit."""

MOST_OUTPUTS = 1024
"""Most outputs of a block."""

MOST_PRODUCTS = 2**23
"""Most inputs times outputs of a loop's body: a larger body takes minutes to compile."""


def adaptive_layer_norm(
    x: Float[Array, "N S C"],
    factor: Float[Array, "N 2 C"],
    offset: Float[Array, "N 2 C"],
    first_patch: Int[Array, ""],
    *,
    eps: float,
) -> Float[Array, "N S C"]:
    """Return `standardized(x) * factor + offset` for each token; `factor` and `offset` are float32."""
    videos, tokens, width = x.shape
    # The tokens of a block are whole groups of `ROWS`: all tokens, or as many as fit, up to `TOKENS`.
    fitting = tiles.BLOCK_BYTES // (width * x.dtype.itemsize) // ROWS * ROWS
    block = max(ROWS, min(TOKENS, fitting, -(-tokens // ROWS) * ROWS))
    # Grid indices: n is the video, i the block of tokens. The scalar `first_patch` is prefetched, so Pallas
    # passes it to each index map as the last argument.
    token_spec = pl.BlockSpec((None, block, width), lambda n, i, _: (n, i, 0))
    vector_spec = pl.BlockSpec((None, 2, width), lambda n, i, _: (n, 0, 0))
    return pl.pallas_call(
        functools.partial(_norm_block, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(videos, pl.cdiv(tokens, block)),
            in_specs=[token_spec, vector_spec, vector_spec],
            out_specs=token_spec,
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=tiles.KERNEL_VMEM
        ),
        name="modulated_norm",
    )(first_patch.reshape(1), x, factor, offset)


def _norm_block(first_patch_ref, x_ref, factor_ref, offset_ref, y_ref, *, eps: float) -> None:
    """Norm a block of tokens (tokens, C), and apply factor and offset (2, C), `ROWS` tokens at a time."""
    block = x_ref.shape[0]
    # The first patch's index, counted from this block's start; the grid is (videos, blocks).
    boundary = first_patch_ref[0] - pl.program_id(1) * block

    def norm(at: Array) -> None:
        rows = pl.ds(pl.multiple_of(at, ROWS), ROWS)
        is_patch = at + jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0) >= boundary
        factor, offset = (jnp.where(is_patch, ref[1:], ref[:1]) for ref in (factor_ref, offset_ref))
        x = standardized(x_ref[rows].astype(jnp.float32), eps)
        y_ref[rows] = (x * factor + offset).astype(y_ref.dtype)

    pl.loop(0, block, step=ROWS, unroll=min(UNROLLED, block // ROWS))(norm)


def quantized_tokens(x: Float[Array, "N S C"]) -> tuple[Int8[Array, "N S C"], Float[Array, "N S 1"]]:
    """Return what `quantized` returns of each token; XLA would read `x` twice."""
    videos, tokens, width = x.shape
    fitting = tiles.BLOCK_BYTES // (width * x.dtype.itemsize) // INT8_ROWS * INT8_ROWS
    block = max(INT8_ROWS, min(TOKENS, fitting, -(-tokens // INT8_ROWS) * INT8_ROWS))

    def quantize_block(x_ref: Any, int8_ref: Any, scale_ref: Any) -> None:
        @pl.loop(0, block, step=INT8_ROWS)
        def _(at: Array) -> None:
            rows = pl.ds(pl.multiple_of(at, INT8_ROWS), INT8_ROWS)
            int8_ref[rows], scale_ref[rows] = quantized(x_ref[rows])

    specs = [pl.BlockSpec((None, block, size), lambda n, i: (n, i, 0)) for size in (width, 1)]
    return pl.pallas_call(
        quantize_block,
        grid=(videos, pl.cdiv(tokens, block)),
        in_specs=specs[:1],
        out_specs=specs,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.int8),
            jax.ShapeDtypeStruct((videos, tokens, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=tiles.KERNEL_VMEM
        ),
        name="quantize",
    )(x)


def supports_product(x: Float[Array, "N S_or_I I_or_S"], weight: Array, parts: int = 1) -> bool:
    """Return whether `product` supports the arrays.

    `x` must be bfloat16, the weight bfloat16 or int8, and I and O / `parts` multiples of a tile's lanes:
    `product` returns the outputs in so many equal parts. A block of tokens, and the weights of the outputs
    that are computed together, must fit into half of VMEM.
    """
    outputs, inputs = weight.shape
    return (
        x.size > 0
        and x.dtype == jnp.bfloat16
        and weight.dtype in (jnp.bfloat16, jnp.int8)
        and outputs % (parts * tiles.LANES) == 0
        and inputs % tiles.LANES == 0
        # 2 bytes for each number, in two buffers: the next step's numbers are fetched meanwhile.
        and 4 * inputs * (max(TOKEN_BLOCKS) + UNIT_OUTPUTS) < tiles.vmem_limit() // 2
    )


def product(
    x: Float[Array, "N S_or_I I_or_S"],
    weight: Float[Array, "O I"] | Int8[Array, "O I"],
    bias: Float[Array, " O"],
    scale: Float[Array, " O"] | None = None,
    residual: Float[Array, "N S O"] | None = None,
    gate: Float[Array, "N 2 O"] | None = None,
    first_patch: Int[Array, ""] | None = None,
    *,
    gelu: bool = False,
    dynamic: bool = False,
    transposed: bool = False,
    parts: int = 1,
) -> Float[Array, "N_parts S outputs"]:
    """Return `x weight^T + bias`, or GELU of it, or a gated sum with it, in one pass and rounded once.

    Args:
        x: tokens (N, S, I), or (N, I, S) if `transposed`.
        weight, bias: the product's.
        scale: factors of the sums before the bias, or None for 1.
        residual, gate, first_patch: for the gated sum `residual + gate * product`, and the index of the first
            patch. All three are given, or none.
        gelu: whether GELU is applied; not with a gate.
        dynamic: whether `x` is rounded to int8 here; the weight is int8 too, and has a scale.
        transposed: whether the channels of `x` come before its tokens.
        parts: number of equal parts that O is split into; 1 with a gate.

    Returns:
        (N * parts, S, O / parts): the parts of the first video, then those of the second, and so on.
    """
    gated_operands = [] if residual is None or gate is None else [residual, gate.astype(jnp.float32)]
    factors = [] if scale is None else [scale.astype(jnp.float32)[None]]
    dtype, videos = x.dtype, x.shape[0]
    outputs = weight.shape[0] // parts  # of a part
    inputs, tokens = x.shape[1:] if transposed else (x.shape[2], x.shape[1])
    if dynamic:
        x, token_scale = quantized(x, axis=1) if transposed else quantized_tokens(x)
        factors.append(token_scale.reshape(videos, tokens, 1))
    # The choice with the least padding; of two equally good ones, the larger.
    block_tokens = min(TOKEN_BLOCKS, key=lambda length: (pl.cdiv(tokens, length) * length, -length))
    # The last unit may reach beyond the outputs, where nothing is written, but not into another part. So if
    # `UNIT_OUTPUTS` does not divide a part, the part is one unit.
    unit = UNIT_OUTPUTS if parts == 1 or outputs % UNIT_OUTPUTS == 0 else outputs
    # A block has whole units, and a part has whole blocks: a number of units that divides the part's. The
    # weights of a block, 2 bytes each in two buffers, take half of VMEM at most.
    most_outputs = min(MOST_OUTPUTS, tiles.vmem_limit() // 2 // (4 * inputs))
    block_outputs = unit * tiles.largest_divisor(pl.cdiv(outputs, unit), max(1, most_outputs // unit))
    blocks = pl.cdiv(outputs, block_outputs)  # of a part
    # A grid step (j, n, i) computes block j of the outputs, counted over all parts, for block i of the tokens
    # of video n. j is the outermost index, so the weights of a block stay in VMEM for all tokens. The
    # prefetched index of the first patch is the last argument of each index map.
    x_spec = pl.BlockSpec(
        (None, inputs, block_tokens) if transposed else (None, block_tokens, inputs),
        lambda j, n, i, _: (n, 0, i) if transposed else (n, i, 0),
    )
    y_spec = pl.BlockSpec(
        (None, block_tokens, block_outputs),
        lambda j, n, i, _: (n * parts + jax.lax.div(j, blocks), i, jax.lax.rem(j, blocks)),
    )
    bias_spec = pl.BlockSpec((1, block_outputs), lambda j, n, i, _: (0, j))  # that of the scale too
    token_spec = pl.BlockSpec((None, block_tokens, 1), lambda j, n, i, _: (n, i, 0))
    gate_spec = pl.BlockSpec((None, 2, block_outputs), lambda j, n, i, _: (n, 0, j))
    # Without a gate the kernel does not read the index of the first patch.
    first_index = jnp.int32(0) if first_patch is None else first_patch
    return pl.pallas_call(
        functools.partial(
            _product_block,
            unit_outputs=unit,
            # So many units that their inputs times outputs are at most `MOST_PRODUCTS`, in order to limit the
            # time to compile the body.
            units_a_body=tiles.largest_divisor(
                block_outputs // unit, max(1, MOST_PRODUCTS // inputs // unit)
            ),
            scaled=scale is not None,
            gelu=gelu,
            transposed=transposed,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts * blocks, videos, pl.cdiv(tokens, block_tokens)),
            in_specs=[
                x_spec,
                pl.BlockSpec((block_outputs, inputs), lambda j, n, i, _: (j, 0)),  # of the weight
                bias_spec,
                *[bias_spec, token_spec][: len(factors)],
                # The residual is cut into blocks as the result is.
                *([y_spec, gate_spec] if gated_operands else []),
            ],
            out_specs=y_spec,
        ),
        out_shape=jax.ShapeDtypeStruct((videos * parts, tokens, outputs), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=tiles.vmem_limit()
        ),
        name="gated_linear" if gated_operands else "linear_gelu" if gelu else "linear",
    )(first_index.reshape(1), x, weight, bias.astype(jnp.float32)[None], *factors, *gated_operands)


def _product_block(
    first_patch_ref,
    x_ref,
    weight_ref,
    bias_ref,
    *other_refs,
    unit_outputs: int,
    units_a_body: int,
    scaled: bool,
    gelu: bool,
    transposed: bool,
) -> None:
    """Compute a block of tokens and outputs, in units of `unit_outputs` outputs.

    `x_ref` is (tokens, I), or (I, tokens) if `transposed`; `weight_ref` is (outputs, I), `bias_ref` (1,
    outputs). `other_refs` are the scale (1, outputs), if the product is `scaled`, that of tokens (tokens, 1),
    if `x_ref` is int8, the residual (tokens, outputs) and the gate (2, outputs), if there is a gated sum,
    then the result (tokens, outputs). The body of a loop computes `units_a_body` units. It multiplies a unit
    before it applies the epilogue to the unit before that, so that the TPU's matrix unit and its vector unit
    work at the same time.
    """
    dynamic = x_ref.dtype == jnp.int8
    *gated_refs, y_ref = other_refs[scaled + dynamic :]

    def multiply(outputs: Any) -> Array:
        # The products (tokens, outputs) for this slice of the block's outputs.
        return jax.lax.dot_general(
            x_ref[...],
            weight_ref[outputs, :].astype(x_ref.dtype),
            (((0 if transposed else 1,), (1,)), ((), ())),
            preferred_element_type=jnp.int32 if dynamic else jnp.float32,
        )

    def finish(outputs: Any, y: Array) -> None:
        """Apply the epilogue to the products `y` of a slice of outputs, and write the result."""
        if dynamic:
            y = y.astype(jnp.float32) * other_refs[1][...]
        if scaled:
            y = y * other_refs[0][:, outputs]
        y = y + bias_ref[:, outputs]
        if gelu:
            y = _gelu(y)
        if gated_refs:
            residual_ref, gate_ref = gated_refs
            # The first patch's index in this block; the grid's axis 2 has the blocks of tokens.
            boundary = first_patch_ref[0] - pl.program_id(2) * y.shape[0]
            is_patch = jax.lax.broadcasted_iota(jnp.int32, (y.shape[0], 1), 0) >= boundary
            gate = jnp.where(is_patch, gate_ref[1:, outputs], gate_ref[:1, outputs])
            y = residual_ref[:, outputs].astype(jnp.float32) + gate * y
        y_ref[:, outputs] = y.astype(y_ref.dtype)

    @pl.loop(0, y_ref.shape[1] // unit_outputs // units_a_body)
    def _(index: Array) -> None:
        def outputs_of(unit: int) -> Any:
            # The slice of one of this body's units, among the block's outputs.
            start = (index * units_a_body + unit) * unit_outputs
            return pl.ds(pl.multiple_of(start, unit_outputs), unit_outputs)

        units = [outputs_of(unit) for unit in range(units_a_body)]
        product_of_unit = multiply(units[0])
        for unit, next_unit in itertools.pairwise(units):
            product_of_next = multiply(next_unit)
            finish(unit, product_of_unit)
            product_of_unit = product_of_next
        finish(units[-1], product_of_unit)


def _gelu(x: Array) -> Array:
    """Compute GELU of float32 by its tanh approximation: a TPU has an instruction for tanh."""
    half, factor = 0.5 * x, math.sqrt(2 / math.pi)
    return half + half * jnp.tanh(x * (factor + (0.044715 * factor) * (x * x)))
