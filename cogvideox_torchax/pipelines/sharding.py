"""The sharding of the transformer's and the text encoder's weights: a table by name.

A network uses the mesh's axis "tp" in one of two ways:

    context: tokens are split, and every device has whole weights. If they do not fit, they are sharded, and
        the weights of each layer are gathered before it runs.
    tensor: the channels of weights are split. Of two matrices that follow each other the first is split by
        its outputs, the second by its inputs. So the activations between them stay on their devices, and one
        sum over "tp" follows (Shoeybi et al. 2019, "Megatron-LM"). Attention's heads are split over "tp"; if
        "tp" does not divide them, attention is split by queries (`jax_kernels.attention`).
"""

import re
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from cogvideox_torchax.sharding import Parallel

BY_OUTPUTS, BY_INPUTS = P("tp"), P(None, "tp")
"""Shardings of a matrix (out, in); the first is that of its bias (out) too."""

WEIGHTS: dict[str, P] = {
    # The first of two matrices, and its bias. A LoRA's layer has the matrix as its `base_layer`.
    r"attn1\.to_(q|k|v|qkv)(\.base_layer)?\.(weight|bias|weight_scale)": BY_OUTPUTS,
    r"ff\.net\.0\.proj(\.base_layer)?\.(weight|bias|weight_scale)": BY_OUTPUTS,
    r"SelfAttention\.(q|k|v)(\.base_layer)?\.(weight|bias|weight_scale)": BY_OUTPUTS,
    r"DenseReluDense\.wi(_[01])?(\.base_layer)?\.(weight|bias|weight_scale)": BY_OUTPUTS,
    # The second of two matrices. Its bias is not here: each device has all of it, to add it after the sum.
    r"attn1\.to_out\.0(\.base_layer)?\.weight": BY_INPUTS,
    r"ff\.net\.2(\.base_layer)?\.weight": BY_INPUTS,
    r"SelfAttention\.o(\.base_layer)?\.weight": BY_INPUTS,
    r"DenseReluDense\.wo(\.base_layer)?\.weight": BY_INPUTS,
    # The results are cut into six parts (shift, scale and gate, for text and patches). With a split by
    # outputs, a shard would have pieces of two parts.
    r"norm[12]\.linear(\.base_layer)?\.weight": BY_INPUTS,
    # Tables of embeddings (entries, channels).
    r"(shared|embed_tokens|relative_attention_bias)\.weight": BY_INPUTS,
}
"""Sharding with "tensor" of the weights whose names end so; every device has all other weights whole."""


def weight_spec(name: str) -> P:
    """Return the sharding of a weight by `WEIGHTS`; one that matches no pattern is whole on every device."""
    return next((spec for ending, spec in WEIGHTS.items() if re.search(f"(^|\\.)({ending})$", name)), P())


CONTEXT: Parallel = "context"
TENSOR: Parallel = "tensor"
"""The two uses of "tp" by a network."""

SHARE_OF_WEIGHTS = 0.5
"""Share of a device's memory that a network's whole weights may take; activations need the other half."""


@dataclass(frozen=True)
class Parallelism:
    """The use of "tp" by a network.

    Attributes:
        kind: CONTEXT splits tokens, TENSOR the channels of weights.
        gathered: whether weights are sharded, and gathered a layer at a time; only with CONTEXT.
        reason: the reason for the choice, in a few words; the default is that of a text encoder.
    """

    kind: Parallel = TENSOR
    gathered: bool = False
    reason: str = field(default="its sequences are short", compare=False)

    def __str__(self) -> str:
        weights = "" if self.kind == TENSOR else f", weights {'gathered' if self.gathered else 'whole'}"
        return f"{self.kind} over tp{weights} ({self.reason})"


@dataclass(frozen=True)
class BatchParallelism:
    """The use of a mesh by a network that this package does not know: "dp" splits the batch.

    With `split`, weights are split over devices too, and gathered when they are used.
    """

    split: bool = False

    def __str__(self) -> str:
        return f"batch over dp, weights {'split' if self.split else 'whole'}, tokens not split"


def exceed_share(weight_bytes: int, mesh: Mesh, memory: float | None = None) -> bool:
    """Return whether whole weights take more than `SHARE_OF_WEIGHTS` of a device's `memory` in bytes.

    Without `memory` the device says it; if it does not, the weights are taken to fit.
    """
    memory = memory_of(mesh) if memory is None else memory
    return memory is not None and weight_bytes > SHARE_OF_WEIGHTS * memory


def choose_parallelism(
    mesh: Mesh, *, heads: int, weight_bytes: int, memory: float | None, requested: Parallel | None = None
) -> Parallelism:
    """Choose what a transformer splits over "tp": tokens if "tp" divides the heads, else channels of weights.

    Where tokens are split, a device computes attention for all tokens and its share of the heads, which must
    be whole heads.

    Args:
        mesh: a mesh of `make_mesh`.
        heads: number of attention's heads.
        weight_bytes: bytes of the whole weights. If tokens are split, and `exceed_share` is true for the
            weights, they are gathered a layer at a time.
        memory: bytes of a device's memory; None asks the device.
        requested: the user's choice; None for none.

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
    gathered = tp > 1 and exceed_share(weight_bytes, mesh, memory)
    return Parallelism(CONTEXT, gathered, "requested" if requested else f"tp={tp} divides {heads} heads")


def memory_of(mesh: Mesh | None) -> float | None:
    """Return the bytes of memory of a mesh's or, without one, of JAX's devices; None if none reports them."""
    try:
        # All devices are alike.
        stats = (jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]).memory_stats()
    except (
        RuntimeError,
        jax.errors.JaxRuntimeError,
    ):  # they may not exist: it is compiled for them
        return None
    return (stats or {}).get("bytes_limit")


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...], parallelism: Parallelism) -> NamedSharding:
    """Return the sharding of a weight; raise `ValueError` if "tp" does not divide the axis that it splits.

    With CONTEXT weights are split only if they are `gathered`: the matrices of blocks, by their outputs, if
    "tp" divides these. All other weights are whole.
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
                # A message has room for the twelve smallest divisors.
                f"choose tp among {[n for n in range(1, size + 1) if size % n == 0][:12]}"
            )
    return NamedSharding(mesh, spec)
