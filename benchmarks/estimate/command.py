"""`python -m benchmarks estimate`: the programs of `plan`, with times; the cases of the documents' tables."""

import argparse
import functools
from typing import Any

from benchmarks.estimate import chips, programs, training
from benchmarks.pages import FORMAT, RESULTS
from cogvideox_torchax import cli
from cogvideox_torchax.cli import common, plan, planning
from cogvideox_torchax.plan.chips import GPUS

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
    "network-prompt-v6e-1": f"--network prompt --model 5b {ONE}",
    "network-prompt-v6e-8": f"--network prompt --model 5b {EIGHT} --dp 2 --tp 4",
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
    "train-step-v6e-1": "--training --model 5b --frames 1 --height 64 --width 64",
}
"""By the name of a file in results/: the options of its estimate."""
for _case in ("pipeline-1.5-5b-v5e-1", "pipeline-1.5-5b-v5e-1-int8"):
    CASES[_case] += " --tiling 576x1024"  # the VAE's first chunk alone does not fit


def parsed(words: list[str]) -> argparse.Namespace:
    training_only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    training_only.add_argument("--training", action="store_true")
    own, others = training_only.parse_known_args(words)
    args = cli.parser().parse_args(["plan", *others], own)
    plan.check(args)
    if args.platform != "tpu" or args.topology in GPUS:
        raise ValueError("times are estimated for TPUs alone; for memory take cogvideox-torchax plan")
    return args


def estimated(args: argparse.Namespace) -> dict[str, Any]:
    """Compile the programs that the options ask for, and print their figures and times; return a document."""
    with chips.dumping_schedules():  # which libtpu does only if it is loaded here
        request = training.requested(args) if args.training else planning.requested(args)
    chip = chips.CHIPS[args.topology.partition(":")[0]]
    compile_one = functools.partial(programs.estimate_program, mesh=request.mesh, chip=chip)
    plans = planning.compiled(args, request, compile_one, lambda each, _chip: programs.timed_rows(each, chip))
    figures = request.figures(plans)
    if args.training:
        figures |= training.memory(request, plans, chip)
    figures |= programs.times(request.counts, plans)
    common.print_report(figures)
    return planning.document(args, request, FORMAT, plans, figures)


def run(options: argparse.Namespace) -> None:
    """Estimate what the words of `others` ask for; or else the `cases` of `CASES`, into results/.

    `ValueError` for a case that is not in `CASES`, and for words beside cases.
    """
    cases, words = options.cases, options.others
    if unknown := {*cases} - {*CASES}:
        raise ValueError(f"got case {', '.join(sorted(unknown))}: one of {', '.join(CASES)}")
    if cases and words:
        raise ValueError(f"got {' '.join(words)}: a case has its own options")
    given = [[*CASES[case].split(), "-o", str(RESULTS / f"{case}.json")] for case in cases] or [words]
    for args in map(parsed, given):
        plan.deliver(args, estimated)
