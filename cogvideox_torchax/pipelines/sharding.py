"""The sharding of the transformer's and the text encoder's weights: a table by name.

With "context", every device has whole weights; if they do not fit, they are sharded, and each layer's are
gathered before it runs. With "tensor", the first of two matrices is split by its outputs, the second by its
inputs, so that activations between them stay local and one sum over "tp" follows (Shoeybi et al. 2019,
"Megatron-LM"). Attention's heads are split over "tp"; if "tp" does not divide them, attention is split by
queries (`jax_kernels.attention`).
"""

import re
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from cogvideox_torchax.sharding import Parallel

BY_OUTPUTS, BY_INPUTS = P("tp"), P(None, "tp")
"""Shardings of a matrix (out, in), and of its bias (out)."""

WEIGHTS: dict[str, P] = {
    # Matrices (out, in) and their biases: the first of two.
    r"attn1\.to_(q|k|v|qkv)(\.base_layer)?\.(weight|bias)": BY_OUTPUTS,
    r"ff\.net\.0\.proj(\.base_layer)?\.(weight|bias)": BY_OUTPUTS,
    r"SelfAttention\.(q|k|v)(\.base_layer)?\.(weight|bias)": BY_OUTPUTS,
    r"DenseReluDense\.wi(_[01])?(\.base_layer)?\.(weight|bias)": BY_OUTPUTS,
    # The second, whose bias is added once, after the sum.
    r"attn1\.to_out\.0(\.base_layer)?\.weight": BY_INPUTS,
    r"ff\.net\.2(\.base_layer)?\.weight": BY_INPUTS,
    r"SelfAttention\.o(\.base_layer)?\.weight": BY_INPUTS,
    r"DenseReluDense\.wo(\.base_layer)?\.weight": BY_INPUTS,
    # The modulation's result is cut into six parts, which shards of its outputs would straddle.
    r"norm[12]\.linear(\.base_layer)?\.weight": BY_INPUTS,
    # Tables (entries, channels).
    r"(shared|embed_tokens|relative_attention_bias)\.weight": BY_INPUTS,
}
"""Sharding of weights by the ending of their names, with TENSOR; all others are whole on every device."""


def weight_spec(name: str) -> P:
    """Return the sharding of a weight by `WEIGHTS`; one that matches no pattern is whole on every device."""
    return next((spec for ending, spec in WEIGHTS.items() if re.search(f"(^|\\.)({ending})$", name)), P())


CONTEXT: Parallel = "context"
TENSOR: Parallel = "tensor"
"""The two uses of "tp" by a network."""

SHARE_OF_WEIGHTS = 0.5
"""Share of a device's memory that a network's whole weights may take on every device."""


@dataclass(frozen=True)
class Parallelism:
    """The use of "tp" by a network.

    Attributes:
        kind: CONTEXT splits tokens, TENSOR the channels of weights.
        gathered: whether weights are sharded and gathered a layer at a time; with CONTEXT alone.
        reason: the reason for the choice, in a few words.
    """

    kind: Parallel = TENSOR
    gathered: bool = False
    reason: str = field(default="its sequences are short", compare=False)

    def __str__(self) -> str:
        weights = "" if self.kind == TENSOR else f", weights {'gathered' if self.gathered else 'whole'}"
        return f"{self.kind} over tp{weights} ({self.reason})"


@dataclass(frozen=True)
class BatchParallelism:
    """The use of a mesh by a network that this package does not know; split weights are gathered at use."""

    split: bool = False

    def __str__(self) -> str:
        return f"batch over dp, weights {'split' if self.split else 'whole'}, tokens not split"


def exceed(weight_bytes: int, memory: float | None) -> bool:
    """Return whether whole weights take more than `SHARE_OF_WEIGHTS` of a device's memory; None is enough."""
    return memory is not None and weight_bytes > SHARE_OF_WEIGHTS * memory


def choose_parallelism(
    mesh: Mesh, *, heads: int, weight_bytes: int, memory: float | None, requested: Parallel | None = None
) -> Parallelism:
    """Choose what a transformer splits over "tp": tokens if "tp" divides the heads, else channels of weights.

    With split tokens, weights that `exceed` a device's memory are gathered a layer at a time. None for
    `memory` means unknown, for `requested` no wish.

    Raises:
        ValueError: another request than CONTEXT or TENSOR, or CONTEXT if "tp" does not divide the heads.
    """
    tp = mesh.shape["tp"]
    if requested not in (None, CONTEXT, TENSOR):
        raise ValueError(f"got parallel={requested!r}: it takes {CONTEXT!r}, {TENSOR!r} or None")
    if heads % tp:
        if requested == CONTEXT:
            raise ValueError(
                f"got parallel={CONTEXT!r} and a mesh with tp={tp}: it does not divide the {heads} heads; "
                f"choose tp among {[n for n in range(1, heads + 1) if heads % n == 0]}, or "
                f"parallel={TENSOR!r}"
            )
        return Parallelism(TENSOR, reason=f"tp={tp} does not divide {heads} heads")
    if requested == TENSOR:
        return Parallelism(TENSOR, reason="requested")
    gathered = tp > 1 and exceed(weight_bytes, memory)
    return Parallelism(CONTEXT, gathered, "requested" if requested else f"tp={tp} divides {heads} heads")


def memory_of(mesh: Mesh) -> float | None:
    """Return the bytes of memory of one of a mesh's devices; None if it does not report them."""
    try:
        stats = mesh.devices.flat[0].memory_stats()  # all devices are alike
    except (RuntimeError, jax.errors.JaxRuntimeError):  # a plan's mesh has devices that are not there
        return None
    return (stats or {}).get("bytes_limit")


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...], parallelism: Parallelism) -> NamedSharding:
    """Return the sharding of a weight; raise `ValueError` if "tp" does not divide the axis that it splits.

    With CONTEXT only `gathered` weights are split: the blocks' matrices, by outputs where "tp" divides them.
    """
    if parallelism.kind == TENSOR:
        spec = weight_spec(name)
    else:
        is_block_matrix = re.search(r"transformer_blocks\.\d+\.", name) and len(shape) == 2
        splits = parallelism.gathered and is_block_matrix and shape[0] % mesh.shape["tp"] == 0
        spec = BY_OUTPUTS if splits else P()
    for size, axis in zip(shape, spec, strict=False):  # axes that the spec leaves out are not split
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"got a mesh with tp={mesh.shape[axis]}: it does not divide the {size} channels of {name}; "
                f"choose tp among {[n for n in range(1, size + 1) if size % n == 0][:12]}"
            )
    return NamedSharding(mesh, spec)
