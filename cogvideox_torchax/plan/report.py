"""The work of a program on a mesh on each device, layer by layer, read off its compiled text."""

import itertools
import math
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.plan.chips import GIB, Chip
from cogvideox_torchax.plan.hlo import Instruction, collectives, instructions
from cogvideox_torchax.plan.programs import ProgramPlan, Row, read_program
from cogvideox_torchax.sharding import MeshPlace
from cogvideox_torchax.vae.directions import DECODE, Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

ELSEWHERE = "(program)"


def figures(
    network: str,
    memory: dict[str, int],
    seconds: dict[str, Any],
    *,
    flops: float,
    compile_seconds: float,
    chip: Chip | None,
    **about: str,
) -> dict[str, Any]:
    """Return a plan in words and figures, a device: what `plan` prints.

    Args:
        network: what was planned.
        memory: bytes by their name, the peak last.
        seconds: what it is estimated to take; empty for no estimate.
        flops, compile_seconds: of all programs.
        chip: whose memory the peak has to fit, or None.
        about: further rows, by their names.
    """
    rows: dict[str, Any] = {"network": network, **about, "TFLOP": flops / 1e12}
    rows |= {name: size / GIB for name, size in memory.items()}
    if chip is not None:
        fits = "yes" if [*memory.values()][-1] <= chip.memory else "no"
        rows["fits"] = f"{fits} ({chip.memory / GIB:.2f} GiB)"
    return {**rows, **seconds, "compiled_in_s": compile_seconds}


def table(rows: list[Row]) -> list[list[str]]:
    """Return the layers as rows of cells, the header first."""
    header = ["layer", "shape", "spec", "shards", "bytes a device", "collectives"]
    return [header, *map(_cells, rows)]


def _cells(row: Row) -> list[str]:
    """Return a layer as the cells of a table's row."""
    moved = ", ".join(
        f"{what['count']} {kind} ({what['bytes']:,} B)" for kind, what in sorted(row.collectives.items())
    )
    shape = " x ".join(map(str, row.shape)) if row.shape else ""
    return [row.layer, shape, row.spec, str(row.shards or ""), f"{row.bytes_per_device:,}", moved]


def report(vae: Any, shape: tuple[int, ...], *, direction: Direction = DECODE) -> ProgramPlan:
    """Compile the program of an input's last chunk and report its sharding, layer by layer.

    In the result's `layers` all but `shape` and `spec` is read off the compiled program.

    Args:
        vae: an `AutoencoderKLCogVideoX` with a mesh, in PyTorch, on JAX or on torch's "meta" device.
        shape: the whole input's (N, C, T, H, W): latents to decode, frames to encode.
        direction: `DECODE` or `ENCODE`.

    Raises:
        ValueError: a model of the Flax build, or one that was ported without a mesh.
    """
    if not isinstance(vae, AutoencoderKLCogVideoX):
        raise ValueError(
            f"got a {type(vae).__name__}: a report needs diffusers' model; pass port(vae, mesh=...)"
        )
    _check_mesh("model", vae)
    return _read(direction, shape[2], *compile_last_chunk(vae, shape, direction=direction))


def compile_last_chunk(
    vae: AutoencoderKLCogVideoX, shape: tuple[int, ...], *, direction: Direction = DECODE
) -> tuple[runtime.Program, Any]:
    """Compile, without running it, the program of an input's last chunk, which all but the first share.

    Args:
        vae, shape, direction: as `report` takes them; a mesh is not needed.

    Returns:
        The program and its compiled form.
    """
    program, dtype = vae.build_program(direction), runtime.jax_dtype(vae.dtype)
    pieces = Direction(direction).chunks(vae, shape[2])
    chunks = [((*shape[:2], piece.length, *shape[3:]), dtype) for piece in pieces]
    structs = program.structs(chunks[-1], before=chunks[0] if len(chunks) > 1 else None)
    return program, program.lower(*structs).compile()


def report_network(network: Any, tensors: dict[str, Any]) -> ProgramPlan:
    """Compile a pipeline's ported transformer or text encoder and report its layers, as `report` does.

    Args:
        network: a network with a mesh; in PyTorch, on JAX or on torch's "meta" device.
        tensors: shape and JAX dtype of each argument, by name, from `step_tensors` or `prompt_tensors` of
            `pipelines.networks`.

    Raises:
        ValueError: a network that was ported without a mesh.
    """
    _check_mesh("network", network)
    program = network.build_program()
    compiled = program.lower(*program.structs(tensors)).compile()
    return _read(type(network).__name__, next(iter(tensors.values()))[0][1], program, compiled)


def _check_mesh(what: str, model: Any) -> None:
    """Raise `ValueError` for a model without a mesh, called by the word `what`."""
    if model.mesh is None:
        raise ValueError(f"report got a {what} without a mesh: port(..., mesh=make_mesh(dp, tp)) first")


def _read(name: str, frames: int, program: Any, compiled: Any) -> ProgramPlan:
    """Return the plan of a compiled program with its layers, without times."""
    plan = read_program(name, frames, compiled, None, 0.0)
    plan.layers = layers(program, plan.text)
    return plan


def layers(program: runtime.Program, text: str) -> list[Row]:
    """Return each layer's sharding and communication, read off the compiled text of the last tracing.

    The list is empty for a program on one device, and for one of the Flax build: they name no layers.
    """
    place: Any = program.place
    shapes = getattr(place, "layers", {})
    if not shapes:
        return []
    owned: dict[str, list[Instruction]] = {name: [] for name in [*shapes, ELSEWHERE]}
    for instruction in instructions(text):
        owner = next((part for part in reversed(instruction.scope.split("/")) if part in owned), ELSEWHERE)
        owned[owner].append(instruction)
    return [_row(name, shapes.get(name), own, place) for name, own in owned.items()]


def _row(name: str, shapes: set[tuple[int, ...]] | None, own: list[Instruction], place: MeshPlace) -> Row:
    """Return the row of a layer.

    Args:
        name: of the layer.
        shapes: of its activations; None for what belongs to no layer.
        own: its instructions.
        place: the mesh, which knows how an activation was to be split.
    """
    arrays = [i for i in own if not i.op.startswith(("parameter", "tuple", "get-tuple"))]
    row = Row(
        name,
        collectives={kind: {"count": t.count, "bytes": t.bytes} for kind, t in collectives(own).items()},
        bytes_per_device=max((i.bytes for i in arrays), default=0),
    )
    if shapes is not None:
        row.shape = max(shapes, key=math.prod)
        row.spec = str(place.spec(row.shape))
        row.shards = _shards(shapes, row.shape, arrays, place)
    return row


def _shards(
    shapes: set[tuple[int, ...]], largest: tuple[int, ...], arrays: list[Instruction], place: MeshPlace
) -> int | None:
    """Return the number of devices that split a layer's activations, by the shapes in the text."""
    found = {array.shape for instruction in arrays for array in instruction.results}
    parts = place.parts(place.spec(largest))
    if math.prod(parts) == 1 or any(_is_laid_as(shape, largest) for shape in found):
        return 1
    local = {tuple(-(-size // n) for size, n in zip(s, parts, strict=True)) for s in shapes}
    return math.prod(parts) if any(_is_laid_as(shape, one) for shape in found for one in local) else None


def _is_laid_as(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Return whether an array of this shape can hold these axes: in any order, some of them joined.

    A weight with as many numbers as an activation seldom can.
    """
    if math.prod(shape) != math.prod(axes):
        return False
    if not shape:
        return True
    first, *rest = shape
    for count in range(len(axes) + 1):
        for joined in itertools.combinations(range(len(axes)), count):
            left = tuple(size for index, size in enumerate(axes) if index not in joined)
            if math.prod(axes[index] for index in joined) == first and _is_laid_as(tuple(rest), left):
                return True
    return False
