"""`python -m benchmarks draw`: the tables of the documents, from results/."""

import argparse
from collections.abc import Callable

from benchmarks import estimated_tables as estimated, measured_tables as measured
from benchmarks.pages import RESULTS, ROOT, fill
from benchmarks.report import markdown
from cogvideox_torchax.files.reports import write_text

TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "figures"): estimated.figures,
    ("README.md", "times"): estimated.times,
    ("docs/accuracy.md", "layers"): measured.layers,
    ("docs/architecture.md", "sharding"): estimated.sharding,
    ("docs/datasets.md", "throughput"): measured.throughput,
    ("docs/install.md", "versions"): measured.versions,
    ("docs/kernels.md", "attention-schedule"): estimated.attention,
    ("docs/kernels.md", "composition"): estimated.composition,
    ("docs/kernels.md", "conv-schedule"): estimated.convolutions,
    ("docs/kernels.md", "layer"): estimated.layer,
    ("docs/performance.md", "compiling"): measured.compiling,
    ("docs/performance.md", "devices"): measured.device_links,
    ("docs/performance.md", "host"): measured.host,
    ("docs/performance.md", "network plans"): estimated.networks,
    ("docs/performance.md", "plans"): estimated.plans,
    ("docs/performance.md", "videos"): estimated.videos,
    ("docs/performance.md", "memory"): measured.memory,
    ("docs/pipelines.md", "caches"): estimated.caches,
    ("docs/pipelines.md", "eight bits"): measured.eight_bits,
    ("docs/planning.md", "calibration"): estimated.calibrations,
    ("docs/planning.md", "gpus"): estimated.gpus,
    ("docs/planning.md", "intervals"): estimated.intervals,
    ("docs/planning.md", "pipelines"): estimated.pipelines,
    ("docs/small-chips.md", "small chips"): estimated.small_chips,
    ("docs/tiny-pipeline.md", "choices"): measured.prompt_choices,
    **dict.fromkeys(
        (("docs/tiny-pipeline.md", "groups"), ("cogvideox_torchax/assets/tiny-pipeline/README.md", "groups")),
        measured.prompts,
    ),
    ("docs/tiny-vae.md", "results"): measured.tiny_vae,
    ("docs/torchax-or-flax.md", "builds"): measured.builds,
}
"""By page and name of its marks: the function that returns what goes between them."""


def run(options: argparse.Namespace) -> None:
    """Draw the tables of `pages`, such as "performance.md"; by default all, and what lies beside results."""
    names = {page.rpartition("/")[2] for page, _name in TABLES}
    if unknown := {*options.pages} - names:
        raise ValueError(f"got page {', '.join(sorted(unknown))}: one of {', '.join(sorted(names))}")
    for (page, name), drawn in TABLES.items():
        if not options.pages or page.rpartition("/")[2] in options.pages:
            fill(ROOT / page, name, drawn())
    if not options.pages:
        measured.plot_memory()
        for name, report in measured.devices().items():
            write_text(RESULTS / "devices" / f"{name}.md", markdown(report))
