"""`python -m benchmarks plan`: programs on chips that need not be there; the cases of the documents."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.jobs import BACKENDS
from benchmarks.options import JSON, add_to, option, output, print_figures, say
from benchmarks.pages import FORMAT, RESULTS
from benchmarks.report import host_peak_bytes
from cogvideox_torchax.files import faults, reports, whole
from cogvideox_torchax.pipelines import cache_options

TOPOLOGY, MODELS = "v6e:1x1", "2b|5b|1.5-5b|DIR_OR_ID"
OPTIONS = (
    option("--model", metavar=MODELS, help="whose shapes to plan, of a pipeline or a VAE (default: 5b)"),
    option(
        "--pipeline",
        metavar=MODELS,
        help="plan this pipeline whole, or one of its networks with --network",
    ),
    option(
        "--network",
        choices=("vae", "step", "prompt", "pipeline", "train-step"),
        help="the VAE, a step of the transformer, the text encoder, all of them with all weights in memory, "
        "or the gradients of a step that trains the VAE (default: vae, or pipeline with --pipeline)",
    ),
    option(
        "--topology",
        default=TOPOLOGY,
        help=f"generation and grid of TPUs, or h100, h200, a100, l4 for a GPU (default: {TOPOLOGY})",
    ),
    option("--platform", choices=("tpu", "cpu"), default="tpu", help="cpu: no floor and no times, but quick"),
    option("--dp", type=int, default=1, help="mesh: devices that a batch is split over"),
    option("--tp", type=int, default=1, help="mesh: devices that a width is split over"),
    option(*("--frames", "--num-frames"), type=int, default=49, help="frames of the video (default: 49)"),
    option("--height", type=int, default=480, help="in pixels (default: 480)"),
    option("--width", type=int, default=720, help="in pixels (default: 720)"),
    option("--encode", action="store_true", help="plan encoding instead of decoding"),
    option(
        "--tiling",
        nargs="?",
        const="default",
        metavar="HEIGHTxWIDTH",
        help="plan a tile of the video, in pixels; without a size, the tile that enable_tiling() takes",
    ),
    option(
        "--backend",
        choices=BACKENDS[:3],  # those that JAX compiles
        default="torchax",
        help="whose programs; torchax-stock runs diffusers' own modules",
    ),
    option(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of weights and activations (default: bfloat16)",
    ),
    option("--no-guidance", action="store_true", help="of a step: without guidance, which doubles the batch"),
    option(
        "--parallel",
        choices=("context", "tensor"),
        help="of a step: split the tokens (context) or the weights (tensor) over --tp "
        "(default: context where --tp divides the heads)",
    ),
    option(
        "--cache",
        metavar="first-block:0.1|pab|magcache:FILE|taylorseer|fastercache",
        help="with --network step: what a video takes with one of diffusers' caches",
    ),
    option(
        "--skips",
        type=int,
        metavar="N",
        help="with --cache first-block: how many of 50 steps it skips",
    ),
    option(
        "--weights",
        choices=("int8", "int8-dynamic"),
        help="matrices of the transformer and the text encoder in eight bits; with int8-dynamic the "
        "transformer's tokens too",
    ),
    option(
        "--offload",
        action="store_true",
        help="with --pipeline: does it fit if a network's weights wait on the host while it is not used",
    ),
    option("--no-advice", action="store_true", help="when it does not fit, do not compile what would"),
    option("--save-hlo", metavar="DIR", help="keep the compiled text of each program there"),
    output("write the plan there as JSON", metavar="FILE"),
    JSON,
    option("--cases", nargs="+", default=[], metavar="CASE", help="of the documents, kept in results/"),
)
ONLY = {
    **dict.fromkeys(("backend", "encode"), ("vae",)),
    **dict.fromkeys(("tiling", "no_advice"), ("vae", "pipeline")),
    **dict.fromkeys(("cache", "skips"), ("step",)),
    **dict.fromkeys(("no_guidance", "parallel"), ("step", "pipeline")),
    "weights": ("prompt", "step", "pipeline"),
    "offload": ("pipeline",),
    **dict.fromkeys(("frames", "height", "width"), ("vae", "step", "pipeline", "train-step")),
}
"""By option, the values of `--network` that it goes with; other options go with all values."""

SMALL = "--frames 49 --height 480 --width 720"
WIDE = "--frames 49 --height 720 --width 1280"
LARGE = "--frames 81 --height 768 --width 1360"
ONE, EIGHT = "--topology v6e:1x1", "--topology v6e:2x4"
STEP = f"--network step --model 5b {ONE} {SMALL}"
VIDEOS = {
    "v6e-1-decode": f"{ONE} {SMALL}",
    "v6e-1-encode": f"{ONE} {SMALL} --encode",
    "v6e-1-decode-still": f"{ONE} {SMALL} --frames 1",
    "v6e-1-encode-still": f"{ONE} {SMALL} --frames 1 --encode",
    "v6e-1-encode-13": f"{ONE} {SMALL} --frames 13 --encode",
    "v6e-1-decode-wide": f"{ONE} {WIDE}",
    "v6e-8-decode-small": f"{EIGHT} --tp 8 {SMALL}",
    "v6e-8-decode": f"{EIGHT} --tp 8 {LARGE}",
    "v6e-8-encode": f"{EIGHT} --tp 8 {LARGE} --encode",
    **{
        f"{topology.partition(':')[0]}-{tp}-decode": f"--topology {topology} --tp {tp} {SMALL}"
        for topology, tp in (
            ("v5e:1x1", 1),
            ("v5e:2x4", 8),
            ("v5p:1x1x1", 1),
            ("v5p:2x2x2", 8),
            ("tpu7x:1x1x1", 1),
            ("tpu7x:2x2x1", 8),
        )
    },
}
SLICES = {
    **{name: {1: ("1x1", 1), 4: ("2x2", 4), 8: ("2x4", 8)} for name in ("v5e", "v6e")},
    "v5p": {1: ("1x1x1", 1), 4: ("2x2x1", 4)},
    "tpu7x": {1: ("1x1x1", 2), 4: ("2x2x1", 8)},
}
"""By a generation and a number of chips of one host: the grid and its devices.

A chip of tpu7x has two devices. A host of v5p or tpu7x has four chips.
"""
CASES = {
    **{
        f"plan-{name}-{backend}": f"--model 5b --backend {backend} {words}"
        for name, words in VIDEOS.items()
        for backend in ("torchax", "torchax-stock", "flax")
    },
    "network-step-1.5-5b-v6e-4": f"--network step --model 1.5-5b --topology v6e:2x2 --dp 2 --tp 2 {LARGE}",
    "network-step-1.5-5b-v6e-8": f"--network step --model 1.5-5b {EIGHT} --dp 2 --tp 4 {LARGE}",
    "network-step-1.5-5b-v6e-16": f"--network step --model 1.5-5b --topology v6e:4x4 --dp 2 --tp 8 {LARGE}",
    "network-step-1.5-5b-v6e-32": f"--network step --model 1.5-5b --topology v6e:4x8 --dp 2 --tp 16 {LARGE}",
    "network-step-5b-v6e-2": f"--network step --model 5b --topology v6e:1x2 --dp 2 {SMALL}",
    **{
        f"network-step-{model}-v6e-{chips}": f"--network step --model {model} {slice_} {SMALL}"
        for model in ("5b", "2b")
        for chips, slice_ in (
            (1, ONE),
            (4, "--topology v6e:2x2 --dp 2 --tp 2"),
            (8, f"{EIGHT} --dp 2 --tp 4"),
            (16, "--topology v6e:4x4 --dp 2 --tp 8"),
        )
    },
    **{
        f"one-pass-{model}-{name}": f"--network step --model {model} {slice_} {SMALL} --no-guidance"
        for model in ("5b", "2b")
        for name, slice_ in (("v5e-1", "--topology v5e:1x1"), ("v6e-1", ONE), ("v6e-8", f"{EIGHT} --tp 8"))
    },
    "cached-first-block": f"{STEP} --cache first-block:0.1 --skips 20",
    "cached-pab": f"{STEP} --cache pab",
    "cached-magcache": f"{STEP} --cache magcache:{RESULTS.parent / 'ratios.json'}",
    "cached-taylorseer": f"{STEP} --cache taylorseer",
    "cached-fastercache": f"{STEP} --cache fastercache",
    **{
        f"pipeline-{model}-{generation}-{count}": f"--pipeline {model} --topology {generation}:{grid} {size} "
        f"--dp {min(2, devices)} --tp {max(1, devices // 2)}"
        for model, size in (("5b", SMALL), ("1.5-5b", LARGE), ("2b", SMALL))
        for generation, slices in SLICES.items()
        for count, (grid, devices) in slices.items()
    },
    **{
        f"pipeline-{model}-{generation}-1-{weights}": f"--pipeline {model} --topology {generation}:1x1 "
        f"{size} --weights {weights}"
        for model, size in (("5b", SMALL), ("1.5-5b", LARGE), ("2b", SMALL))
        for generation in ("v5e", "v6e")
        for weights in ("int8", *(("int8-dynamic",) if model == "5b" else ()))
    },
    **{  # slices of several hosts
        f"pipeline-1.5-5b-{name}": f"--pipeline 1.5-5b --topology {topology} {LARGE} --dp 2 --tp {tp}"
        for name, topology, tp in (
            ("v5e-16", "v5e:4x4", 8),
            ("v6e-16", "v6e:4x4", 8),
            ("v6e-32", "v6e:4x8", 16),
        )
    },
}
"""By the name of a file in results/: the options of its plan."""
for _case in ("pipeline-1.5-5b-v5e-1", "pipeline-1.5-5b-v5e-1-int8"):
    CASES[_case] += " --tiling 576x1024"  # the VAE's first chunk alone does not fit


def parsed(words: list[str]) -> argparse.Namespace:
    """Return the options of a command line, once they are checked."""
    args = _parse(words)
    check(args)
    return args


def _parse(words: list[str]) -> argparse.Namespace:
    return add_to(argparse.ArgumentParser(allow_abbrev=False), OPTIONS).parse_args(words)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options with another value than their default, by name."""
    return {name: vars(args)[name] for name, value in vars(_parse([])).items() if vars(args)[name] != value}


def check(args: argparse.Namespace) -> None:
    """Set `args.model` and `args.network`; raise `ValueError` for options that would have no effect."""
    set_options = given(args)
    if args.model and args.pipeline:
        raise ValueError(f"got --model {args.model} and --pipeline {args.pipeline}: give one of them")
    args.network = args.network or ("pipeline" if args.pipeline else "vae")
    args.model = args.pipeline or args.model or "5b"
    for name, networks in ONLY.items():
        if name in set_options and args.network not in networks:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --network {args.network}")
    if args.cache:
        # Called only for its error about an unknown cache.
        cache_options.config_of(args.cache, steps=50, guided=not args.no_guidance)
    has_skips, is_first_block = args.skips is not None, (args.cache or "").startswith("first-block")
    faults.refuse(
        (
            args.platform == "cpu" and "topology" in set_options,
            f"--topology {args.topology} does not go with --platform cpu: leave one out",
        ),
        (
            has_skips != is_first_block,
            "--skips N says how many of 50 steps --cache first-block skips, which decides as it runs: give "
            "both or neither",
        ),
        (
            has_skips and not 0 <= args.skips < 50,
            f"got --skips {args.skips}: of 50 steps, the first of which is computed",
        ),
    )


def run(options: argparse.Namespace) -> None:
    """Plan what the options ask for, or the `cases` of `CASES`, whose plans go into results/."""
    cases, others = options.cases, given(options).keys() - {"cases"}
    faults.refuse(
        (
            unknown := {*cases} - {*CASES},
            f"got case {', '.join(sorted(unknown))}: one of {', '.join(CASES)}",
        ),
        (cases and others, f"got --{', --'.join(sorted(others))}: a case has its own options"),
    )
    if not cases:
        check(options)
        deliver(options)
    for case in cases:
        args = parsed(CASES[case].split())
        args.output, args.no_advice = str(RESULTS / f"{case}.json"), True
        deliver(args)


def deliver(args: argparse.Namespace) -> None:
    """Compile the programs that the options ask for, and print their figures; write the plan with `--output`.

    With `--json` stdout gets the plan alone, and the figures go to stderr.
    """
    if args.output:  # raises before the work, not after it
        whole.check_file(args.output)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        document = planned(args)
    if args.output:
        reports.write_json(Path(args.output), document)
    if args.json:
        print(json.dumps(document))


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """Compile the programs that the options ask for, and print their figures; return the plan as JSON."""
    from benchmarks.plan import advice, chips, programs  # import JAX: wrong options are refused before that
    from benchmarks.plan.requests import requested
    from cogvideox_torchax.versions import versions

    request, plans = requested(args), []
    if args.save_hlo:
        whole.make_directory(args.save_hlo)
    say(f"programs to compile: {len(request.works)}; each can take minutes")
    for work in request.works:
        plan = programs.compile_program(work, request.mesh, request.chip)
        plans.append(plan)
        print(f"{plan.name}, {plan.frames} {'tokens' if plan.name == 'prompt' else 'frames'} in")
        print_figures(programs.program_rows(plan, request.chip))
        if args.save_hlo:
            name = f"{request.job.get('direction', args.network)}_{plan.name}.hlo.txt"
            reports.write_text(Path(args.save_hlo) / name, plan.text)
    figures = request.figures(plans)
    print_figures(figures)
    chip = request.chip
    if chip and not figures["fits"] and args.network in ("vae", "pipeline") and not args.no_advice:
        say("it does not fit: compiling what would")
        found = advice.changes(args, request, chip.memory, plans)
        figures["would_fit"] = {what: peak / chips.GIB for what, peak in found}
        shown = {f"with {what}": f"{size:.2f} GiB" for what, size in figures["would_fit"].items()}
        print_figures(shown or {"would fit": "nothing that was tried"})
    return {
        "format": FORMAT,
        "job": request.job,
        "topology": args.topology if args.platform == "tpu" else "cpu",
        "mesh": {"dp": args.dp, "tp": args.tp},
        "backend": args.backend,
        "dtype": args.dtype,
        "model": args.model,
        "versions": versions("torch", "torchax", "jax", "jaxlib", "libtpu", "diffusers"),
        "counts": list(request.counts),
        "programs": [plan.as_json() for plan in plans],
        "summary": figures,
        "process_bytes": host_peak_bytes(),
    }
