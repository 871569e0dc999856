"""What a compiled program does on each device, read off its text: shards, bytes and collectives, by layer."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from cogvideox_torchax import chunks, runtime
from cogvideox_torchax.sharding.placement import Layer, Placement, ShardedProgram

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
ELSEWHERE = "(program)"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (?P<result>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\(", re.M)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program: what it is, the arrays that it gives on one device, and whose it
    is."""

    op: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    scope: str

    @property
    def collective(self) -> str | None:
        """Its kind without the suffix of an asynchronous pair, of which only the start counts."""
        kind = self.op.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def bytes(self) -> int:
        """Of its result; the start of an asynchronous pair gives its operand too, which is no larger."""
        sizes = [math.prod(shape) * _bytes_of(dtype) for dtype, shape in self.arrays]
        return max(sizes, default=0) if self.op.endswith("-start") else sum(sizes)


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a compiled program's text (`compiled.as_text()`)."""
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            arrays = tuple(
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _ARRAY.findall(match["result"])
            )
            scope = _SCOPE.search(line)
            yield Instruction(match["op"], arrays, scope[1] if scope else "")


def _bytes_of(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return max(1, int(digits[0]) // 8) if digits else 1


@dataclass
class Row:
    """A layer.

    Attributes:
        layer: the module's name, or "(program)" for what belongs to none.
        shape: its largest activation, (N, C, T, H, W) or a sequence (N, S, C), whole.
        spec: how that was to be split.
        shards: over how many devices the compiled program splits it, by the sizes of the arrays that are
            there; 1 where it is whole, None where its arrays are of neither size (fused away).
        bytes_per_device: the largest array that the layer's instructions give on one device.
        collectives: by kind, how many and how many bytes a device receives.
    """

    layer: str
    shape: tuple[int, ...] | None = None
    spec: str = ""
    shards: int | None = None
    bytes_per_device: int = 0
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Report:
    """What one program does on each device."""

    kind: str
    shape: tuple[int, ...]
    mesh: dict[str, int]
    flops_per_device: float
    temp_bytes_per_device: int
    argument_bytes_per_device: int
    output_bytes_per_device: int
    largest_all_gather_bytes: int
    collectives: dict[str, dict[str, int]]
    rows: list[Row]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def table(self) -> list[list[str]]:
        """Rows of cells, the header first."""
        return table(self.rows)


def table(rows: list[Row]) -> list[list[str]]:
    """The layers as rows of cells, the header first."""
    header = ["layer", "shape", "spec", "shards", "bytes a device", "collectives"]
    return [header, *map(_cells, rows)]


def _cells(row: Row) -> list[str]:
    moved = ", ".join(
        f"{what['count']} {kind} ({what['bytes']:,} B)" for kind, what in sorted(row.collectives.items())
    )
    shape = " x ".join(map(str, row.shape)) if row.shape else ""
    return [row.layer, shape, row.spec, str(row.shards or ""), f"{row.bytes_per_device:,}", moved]


def compile_chunk(vae: Any, shape: tuple[int, ...], *, kind: str = "decode") -> tuple[Any, Any]:
    """Compiles, without running it, the program of an input's last chunk: of every later one, where there are
    several.

    Args:
        vae: an `AutoencoderKLCogVideoX`, in PyTorch, on JAX or on torch's "meta" device; on its mesh if
            it has one.
        shape: the whole input's (N, C, T, H, W): latents to decode, frames to encode.
        kind: "decode", "decode_uint8" or "encode".

    Returns:
        The program and what JAX compiled of it.
    """
    runtime.enable()
    encode = kind == "encode"
    plan = chunks.plan(
        shape[2], vae.num_sample_frames_batch_size if encode else vae.num_latent_frames_batch_size
    )
    program = vae.build_program(kind)
    dtype = runtime.jax_dtype(vae.dtype)

    def structs(length: int) -> tuple[Any, Any]:
        return program.structs((*shape[:2], length, *shape[3:]), dtype)

    weights, chunk = structs(plan[-1].length)
    cache = program.cache_structs(*structs(plan[0].length)) if len(plan) > 1 else None
    return program, program.lower(weights, chunk, cache).compile()


def report(vae: Any, shape: tuple[int, ...], *, kind: str = "decode") -> Report:
    """Compiles the program of an input's last chunk and says what lies where, layer by layer.

    Everything but `shape` and `spec` of a row is read off the compiled program.

    Args:
        vae, shape, kind: as `compile_chunk` takes them.

    Raises:
        ValueError: a model that was ported without a mesh.
    """
    if vae.mesh is None:
        raise ValueError("report got a model without a mesh: port(vae, mesh=make_mesh(dp, tp)) first")
    return _read(kind, tuple(shape), *compile_chunk(vae, shape, kind=kind))


def report_network(network: Any, tensors: dict[str, Any]) -> Report:
    """As `report`, for a pipeline's ported transformer or text encoder.

    Args:
        network: with a mesh; in PyTorch, on JAX or on torch's "meta" device.
        tensors: shape and JAX dtype of each argument, by name; `step_tensors` and `prompt_tensors` of
            `components` say which.

    Raises:
        ValueError: a network that was ported without a mesh.
    """
    if network.mesh is None:
        raise ValueError("report got a network without a mesh: port(pipe, mesh=make_mesh(dp, tp)) first")
    runtime.enable()
    program = network.build_program()
    shape = next(iter(tensors.values()))[0]
    return _read(
        type(network).__name__, shape, program, program.lower_structs(network.options(), tensors).compile()
    )


def _read(kind: str, shape: tuple[int, ...], program: Any, compiled: Any) -> Report:
    found = list(instructions(compiled.as_text()))
    memory = compiled.memory_analysis()
    return Report(
        kind=kind,
        shape=shape,
        mesh=dict(program.placement.mesh.shape),
        flops_per_device=compiled.cost_analysis()["flops"],
        temp_bytes_per_device=memory.temp_size_in_bytes,
        argument_bytes_per_device=memory.argument_size_in_bytes,
        output_bytes_per_device=memory.output_size_in_bytes,
        largest_all_gather_bytes=max((i.bytes for i in found if i.collective == "all-gather"), default=0),
        collectives=_count(found),
        rows=_rows(program, found),
    )


def _count(found: list[Instruction]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for instruction in found:
        if instruction.collective:
            entry = total.setdefault(instruction.collective, {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += instruction.bytes
    return total


def layers(program: runtime.ChunkProgram, text: str) -> list[Row]:
    """What each layer of a program lies in and moves, read off the compiled text of its last tracing.

    Raises:
        ValueError: a program for one device, which names no layers.
    """
    if not isinstance(program, ShardedProgram):
        raise ValueError("got a program for one device: layers are told apart on a mesh, dp * tp above 1")
    return _rows(program, list(instructions(text)))


def _rows(program: Any, found: list[Instruction]) -> list[Row]:
    owned: dict[str, list[Instruction]] = {name: [] for name in [*program.layers, ELSEWHERE]}
    for instruction in found:
        owner = next((part for part in reversed(instruction.scope.split("/")) if part in owned), ELSEWHERE)
        owned[owner].append(instruction)
    return [_row(name, program.layers.get(name), own, program.placement) for name, own in owned.items()]


def _row(name: str, layer: Layer | None, own: list[Instruction], placement: Placement) -> Row:
    arrays = [i for i in own if not i.op.startswith(("parameter", "tuple", "get-tuple"))]
    row = Row(
        name,
        collectives=_count(own),
        bytes_per_device=max((i.bytes for i in arrays), default=0),
    )
    if layer is not None:
        row.shape, row.spec = layer.largest, str(placement.spec(layer.largest))
        row.shards = _shards(layer, arrays, placement)
    return row


def _shards(layer: Layer, arrays: list[Instruction], placement: Placement) -> int | None:
    """Over how many devices a layer's activations are split, by the sizes of the arrays that are there."""
    sizes = {math.prod(shape) for instruction in arrays for _, shape in instruction.arrays}
    parts = placement.parts(placement.spec(layer.largest))
    if math.prod(parts) == 1 or math.prod(layer.largest) in sizes:
        return 1
    local = {math.prod(-(-size // n) for size, n in zip(s, parts, strict=True)) for s in layer.shapes}
    return math.prod(parts) if local & sizes else None
