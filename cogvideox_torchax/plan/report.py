"""Each layer's sharding and communication on a mesh, read from a program's compiled text."""

import itertools
import math
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.plan.hlo import Instruction, collectives, instructions
from cogvideox_torchax.plan.programs import ProgramPlan, Row, Work, read_program
from cogvideox_torchax.sharding import MeshPlace
from cogvideox_torchax.vae.directions import DECODE, Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

ELSEWHERE = "(program)"
"""Name of the row of instructions that belong to no layer."""


def table(rows: list[Row]) -> list[list[str]]:
    """Return a table of layers: the cells of its header, then those of each row."""
    cells = [["layer", "shape", "spec", "shards", "bytes a device", "collectives"]]
    for row in rows:
        shape = " x ".join(map(str, row.shape or ()))
        totals = sorted(row.collectives.items())
        traffic = ", ".join(f"{total['count']} {kind} ({total['bytes']:,} B)" for kind, total in totals)
        cells.append(
            [row.layer, shape, row.spec, str(row.shards or ""), f"{row.bytes_per_device:,}", traffic]
        )
    return cells


def report(vae: Any, shape: tuple[int, ...], *, direction: Direction = DECODE) -> ProgramPlan:
    """Compile the program of an input's last chunk; return its plan, with a `Row` for each layer.

    The `shape` and `spec` of a row are from tracing; its other figures are read from the compiled program.

    Args:
        vae: an `AutoencoderKLCogVideoX` with a mesh, in PyTorch, on JAX or on torch's "meta" device.
        shape: the whole input's (N, C, T, H, W): latents to decode, frames to encode.
        direction: `DECODE` or `ENCODE`.

    Raises:
        ValueError: the model is of the Flax build, or has no mesh.
    """
    if not isinstance(vae, AutoencoderKLCogVideoX):
        raise ValueError(
            f"got a {type(vae).__name__}: a report needs diffusers' model; pass port(vae, mesh=...)"
        )
    _check_mesh("model", vae)
    _, _, frames, *_ = shape
    program, compiled = compile_last_chunk(vae, shape, direction=direction)
    return _read_plan(direction, frames, program, compiled)


def compile_last_chunk(
    vae: AutoencoderKLCogVideoX, shape: tuple[int, ...], *, direction: Direction = DECODE
) -> tuple[runtime.Program, Any]:
    """Compile the program of an input's last chunk, which is the first chunk if there is only one.

    Return it as a `Program`, and in JAX's compiled form. The `shape` of the whole input is (N, C, T, H, W),
    as for `report`; the model needs no mesh.
    """
    program, dtype = vae.build_program(direction), runtime.jax_dtype(vae.dtype)
    videos, channels, frames, *size = shape
    # Each chunk's range of frames. `direction` may also be the name of one, "encode" or "decode".
    ranges = Direction(direction).chunks(vae, frames)
    chunks = [((videos, channels, len(frames_of_chunk), *size), dtype) for frames_of_chunk in ranges]
    # A later chunk takes a cache. Its shapes are the same after every chunk: the first chunk gives them.
    structs = program.structs(chunks[-1], before=chunks[0] if len(chunks) > 1 else None)
    return program, program.lower(*structs).compile()


def report_network(network: Any, tensors: dict[str, Any]) -> ProgramPlan:
    """Compile a ported transformer or text encoder; return its plan, with each layer's sharding.

    Args:
        network: a network with a mesh, in PyTorch, on JAX or on torch's "meta" device; else a `ValueError`.
        tensors: (shape, JAX dtype) of each argument, by name, from `step_tensors` or `prompt_tensors` of
            `pipelines.networks`.
    """
    _check_mesh("network", network)
    program = network.build_program()
    compiled = program.lower(*program.structs(tensors)).compile()
    # The first argument is a step's latents (N, T, C, H, W), or a prompt's token numbers (N, S).
    (_, frames_or_tokens, *_), _dtype = next(iter(tensors.values()))
    return _read_plan(type(network).__name__, frames_or_tokens, program, compiled)


def _check_mesh(kind: str, model: Any) -> None:
    if model.mesh is None:
        raise ValueError(f"report got a {kind} without a mesh: port(..., mesh=make_mesh(dp, tp)) first")


def _read_plan(name: str, frames: int, program: Any, compiled: Any) -> ProgramPlan:
    """Return the plan of `program`, with each layer's sharding; `compiled` is JAX's compiled form of it."""
    plan = read_program(Work(name, frames, program.lower, program.structs, program), compiled, 0.0)
    plan.layers = layers(program, plan.text)
    return plan


def layers(program: runtime.Program, text: str) -> list[Row]:
    """Return each layer's sharding and communication in a traced program, whose compiled text is `text`.

    The list is empty on one device and for the Flax build, whose programs name no layers.
    """
    place: Any = program.place
    # By a layer's name, the shapes of its activations in the last tracing. Only the place of a mesh records
    # them, so another place has no attribute `layers`.
    shapes = getattr(place, "layers", {})
    if not shapes:
        return []
    # By a layer's name, its instructions. Those outside of every layer are in ELSEWHERE.
    by_layer: dict[str, list[Instruction]] = {name: [] for name in [*shapes, ELSEWHERE]}
    for instruction in instructions(text):
        # An instruction belongs to the innermost layer that it was traced in. A scope, such as "a/b", has
        # names from the outside in. Not all of them are names of layers.
        names = reversed(instruction.scope.split("/"))
        by_layer[next((name for name in names if name in by_layer), ELSEWHERE)].append(instruction)
    return [_row(name, shapes.get(name), of_layer, place) for name, of_layer in by_layer.items()]


def _row(
    name: str, shapes: set[tuple[int, ...]] | None, of_layer: list[Instruction], place: MeshPlace
) -> Row:
    """Return a layer's row; `shapes` are those of its activations, None for the row `ELSEWHERE`."""
    computing = [
        instruction
        for instruction in of_layer
        if not instruction.op.startswith(("parameter", "tuple", "get-tuple"))  # these make no new array
    ]
    row = Row(
        name,
        bytes_per_device=max((instruction.bytes for instruction in computing), default=0),
        collectives={
            kind: {"count": traffic.count, "bytes": traffic.bytes}
            for kind, traffic in collectives(of_layer).items()
        },
    )
    if shapes is not None:
        row.shape = max(shapes, key=math.prod)
        row.spec = str(place.spec(row.shape))
        row.shards = _shard_count(shapes, row.shape, computing, place)
    return row


def _shard_count(
    shapes: set[tuple[int, ...]], largest: tuple[int, ...], computing: list[Instruction], place: MeshPlace
) -> int | None:
    """Return the number of devices that split a layer's activations: 1 for no split, None if not known."""
    # `computing` are the layer's instructions, among whose results the activations are searched by shape.
    results = {array.shape for instruction in computing for array in instruction.results}
    axis_shards = place.parts(place.spec(largest))  # number of shards of each axis, as requested
    shards = math.prod(axis_shards)
    # No split was requested, or the compiled program has the whole activation in spite of the request.
    # `_can_hold` allows for axes that XLA has transposed or joined.
    if shards == 1 or any(_can_hold(result, largest) for result in results):
        return 1
    # The shard of any one activation shows the split: the compiler may have fused the others away.
    for shape in shapes:
        # The activation's shape on one device.
        local = tuple(-(-size // count) for size, count in zip(shape, axis_shards, strict=True))
        if any(_can_hold(result, local) for result in results):
            return shards
    return None


def _can_hold(result: tuple[int, ...], activation: tuple[int, ...]) -> bool:
    """Return whether an array of shape `result` can be an activation of shape `activation`."""
    # XLA transposes an activation's axes, and joins some of them. Weights seldom have such a shape by chance.
    if math.prod(result) != math.prod(activation):
        return False
    if not result:
        return True
    first, *rest = result
    axes = range(len(activation))
    # Each set of the activation's axes is tried as the axes that are joined to the first axis of `result`.
    # The other axes must then be joined to the rest of `result`.
    sets = (joined for count in range(len(axes) + 1) for joined in itertools.combinations(axes, count))
    return any(
        math.prod(activation[axis] for axis in joined) == first
        and _can_hold(tuple(rest), tuple(activation[axis] for axis in axes if axis not in joined))
        for joined in sets
    )
