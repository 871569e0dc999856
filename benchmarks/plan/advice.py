"""The changes of a command line with which a job that does not fit would: offload, tiles, a larger slice.

A job *fits* if its peak memory is at most a chip's.
"""

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.options import say
from benchmarks.plan import programs, videos
from benchmarks.plan.chips import GRIDS
from benchmarks.plan.programs import ProgramPlan, peak_bytes
from benchmarks.plan.requests import PlanRequest, requested, weightless_vae, with_changes
from cogvideox_torchax.vae.sizes import SMALLEST_TILE


def changes(
    args: argparse.Namespace, request: PlanRequest, memory: float, plans: Sequence[ProgramPlan]
) -> Iterator[tuple[str, int]]:
    """Yield changes, each of which alone makes a video or a pipeline fit, with the peak memory in bytes.

    Args:
        args: the options of `plan`, for which the job does not fit.
        request: the job.
        memory: bytes of a chip's memory.
        plans: the job's compiled programs.
    """
    if args.network == "pipeline":
        yield from _offloads(args, request, memory, plans)
        # The first program, the text encoder's, would not run. Its weights are in the `other_weights` of all
        # later programs, and would not be in memory either.
        peak = peak_bytes(plans[1:], request.other_weights[1:]) - request.weights[0]
        if peak <= memory and not args.offload:
            yield "the prompt encoded on the host", peak
    else:
        yield from _tiles(args, request, memory, peak_bytes(plans))
    yield from _slices(args, request, memory, peak_bytes(plans, request.present_weights))


def _offloads(
    args: argparse.Namespace, request: PlanRequest, memory: float, plans: Sequence[ProgramPlan]
) -> Iterator[tuple[str, int]]:
    """Yield the offload with which a pipeline fits, with tiles if only the VAE's chunks do not fit."""
    peak = peak_bytes(plans, request.own_weights)
    # The first two programs, the text encoder's and a step's, have no tiles.
    others_peak = peak_bytes(plans[:2])
    if peak <= memory:
        yield "--offload", peak
    elif others_peak <= memory:
        beside = request.own_weights[-1]
        for tiles, tile_peak in _tiles(args, request, memory - beside, peak_bytes(plans[2:])):
            yield f"--offload {tiles}", max(others_peak, tile_peak + beside)


def _tiles(
    args: argparse.Namespace, request: PlanRequest, memory: float, peak: int
) -> Iterator[tuple[str, int]]:
    """Yield the option for about the largest tile, in the picture's aspect ratio, whose programs fit.

    A program's memory besides its weights grows with the pixels. That gives a first size of the tile, with a
    margin of a twentieth. The tile's programs are compiled, and the tile is made smaller until they fit.
    Nothing is yielded if not even the smallest tile fits. `peak` is the VAE's as it is, which is too much.
    """
    vae = weightless_vae(args)
    scale = vae.spatial_compression_ratio
    weights = videos.weight_bytes(vae.encoder if args.encode else vae.decoder)
    height, width = request.job["tile"] or (args.height, args.width)
    while True:
        # `peak`, `height` and `width` are the last round's, at first the job's as it is.
        share_of_pixels = 0.95 * max(memory - weights, 0) / (peak - weights)
        shrink = min(share_of_pixels, 0.9) ** 0.5  # of each side; at most 0.9, so that the tile gets smaller
        height, width = (int(size * shrink) // scale * scale for size in (height, width))
        if min(height, width) < SMALLEST_TILE * scale:  # `SMALLEST_TILE` is in latent pixels
            return
        tiled = requested(with_changes(args, network="vae", tiling=f"{height}x{width}"))
        change = f"--tiling {height}x{width} ({tiled.about['tiles']} tiles)"
        peak = _compiled_peak(tiled, change)
        if peak <= memory:
            yield change, peak
            return


def _slices(
    args: argparse.Namespace, request: PlanRequest, memory: float, peak: int
) -> Iterator[tuple[str, int]]:
    """Yield the options for the smallest larger grid of `GRIDS`, of the same generation, on which a job fits.

    Grids of v5p and tpu7x have three axes, and are not tried. `peak` is the job's as it is.
    """
    generation, _, grid = args.topology.partition(":")
    # Each pass of guidance has devices of its own; a video of the VAE is split over all.
    dp = 2 if args.network == "pipeline" and not args.no_guidance else args.dp
    # The memory that is not weights, such as activations, is split over the devices.
    split_bytes = (peak - request.present_bytes) * request.mesh.size
    for count, name in GRIDS.items() if grid.count("x") == 1 else ():
        if count <= request.mesh.size or count < dp:
            continue
        larger = with_changes(args, topology=f"{generation}:{name}", dp=dp, tp=count // dp)
        on_grid = requested(larger)
        # Nothing is compiled for a grid on which the job clearly does not fit; 1.1 is a margin.
        if on_grid.present_bytes + split_bytes / count > 1.1 * memory:
            continue
        change = f"--topology {larger.topology} --dp {dp} --tp {larger.tp}"
        peak = _compiled_peak(on_grid, change)
        if peak <= memory:
            yield change, peak
            return


def _compiled_peak(request: PlanRequest, change: str) -> int:
    say(f"compiling with {change}")
    return peak_bytes(
        [programs.compile_program(work, request.mesh) for work in request.works], request.present_weights
    )
