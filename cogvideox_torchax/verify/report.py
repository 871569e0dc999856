"""The results of `verify` as JSON, as Markdown tables and as a picture."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from cogvideox_torchax.files.reports import pyplot, save_figure, table
from cogvideox_torchax.vae import tolerances
from cogvideox_torchax.verify.compare import Result

FORMAT = "cogvideox-torchax-verify/1"


def as_json(results: list[Result], about: dict[str, Any]) -> dict[str, Any]:
    """Return the report as a dictionary for `json.dumps`, in which infinities and NaNs are "inf" and "nan".

    Args:
        results: of all backends and dtypes.
        about: facts of the run by name, which become fields of the report.
    """
    entries = [{**dataclasses.asdict(result), "passed": result.passed} for result in results]
    passed = all(result.passed for result in results)
    text = json.dumps({"format": FORMAT, **about, "passed": passed, "results": entries})
    # `dumps` writes NaN and Infinity, which JSON does not have. `loads` passes their text to
    # `parse_constant`, and `str(float(...))` makes "nan" and "inf" of it.
    return json.loads(text, parse_constant=lambda constant: str(float(constant)))


def contracts_table(results: list[Result]) -> str:
    """Return a table with a row for each contract of each backend."""
    rows = [
        (
            f"{result.backend} {result.dtype}",
            contract.name,
            f"{contract.measured:.3g}",
            f"{'' if contract.exact else 'at most '}{contract.allowed:.3g}",
            "PASS" if contract.passed else "FAIL",
        )
        for result in results
        for contract in result.contracts
    ]
    return table(("backend", "contract", "measured", "wanted", "verdict"), rows)


def whole_table(results: list[Result]) -> str:
    """Return a table with a row for each direction of each backend: errors, and the lowest PSNR and SSIM."""
    rows = []
    for result in results:
        for direction, error in result.whole.items():
            # Moments, the result of encoding, have no PSNR and SSIM.
            lowest = (f"{min(error.psnr):.1f}", f"{min(error.ssim):.6f}") if error.psnr else ("", "")
            errors = (error.mean, error.largest, error.relative, error.at_borders, error.inside)
            rows.append((f"{result.backend} {result.dtype}", direction, *map(_error_text, errors), *lowest))
    head = ("backend", "direction", "mean", "max", "relative", "mean at chunk borders", "mean inside")
    return table((*head, "lowest PSNR, dB", "lowest SSIM"), rows)


def layers_table(result: Result) -> str:
    """Return a table with a row for each layer of one backend, in running order."""
    # `layer.chunk` is the first chunk in which the layer leaves the tolerance; None if it leaves it in none.
    rows = [
        (
            layer.name,
            _error_text(layer.mean),
            _error_text(layer.largest),
            _error_text(layer.relative),
            "" if layer.chunk is None else f"from chunk {layer.chunk}",
        )
        for layer in result.layers
    ]
    return table(("layer", "mean", "max", "relative", "outside the tolerance"), rows)


def verdict(result: Result) -> str:
    """Return PASS or FAIL for one backend, in one line.

    A failure names the contracts that are not kept, and the first layer outside the tolerance.
    """
    head = f"{'PASS' if result.passed else 'FAIL'}  {result.backend} {result.dtype}"
    if result.passed:
        return head
    failed = ", ".join(contract.name for contract in result.contracts if not contract.passed)
    layer = result.first_bad_layer
    if layer is None:
        return f"{head}: {failed}; no single layer leaves the tolerance"
    return (
        f"{head}: {failed}; the first layer outside the tolerance is {layer.name}, "
        f"from chunk {layer.chunk} on (relative error {layer.relative:.3g})"
    )


def markdown(results: list[Result], about: dict[str, Any]) -> str:
    """Return the whole report as a Markdown page; `about` are facts of the run, by name."""
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    parts = ["# verify", facts, "\n".join(f"    {verdict(result)}" for result in results)]
    parts += ["## Contracts", contracts_table(results), "## As a whole", whole_table(results)]
    for result in results:
        parts += [f"## Layers: {result.backend} {result.dtype}", layers_table(result)]
    return "\n\n".join(parts) + "\n"


def _error_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def draw_layers(results: list[Result], path: Path) -> None:
    """Draw each layer's relative error on a log axis, a line for each result, and save the picture.

    A dashed line is the tolerance of float32. That of bfloat16 is not drawn, as it bounds another error: RMS,
    relative to that of PyTorch. A log axis has no 0, so a layer with an error of 0 is drawn on a line named
    "exact", below all other errors.
    """
    figure, axes = pyplot().subplots(figsize=(12, 6), layout="constrained")
    values = [layer.relative for result in results for layer in result.layers]
    # The height of the line "exact": a third of the smallest error, or of 1e-7 if there is no error.
    exact_height = min((value for value in values if value > 0), default=1e-7) / 3
    markers = "os^Dvx"  # matplotlib's names of shapes, which tell lines apart that cover each other
    # A backend may lack a layer that others have, so the longest list gives the places on the axis.
    names = [layer.name for layer in max((result.layers for result in results), key=len)]
    for index, result in enumerate(results):
        heights = [max(layer.relative, exact_height) for layer in result.layers]
        axes.semilogy(
            [names.index(layer.name) for layer in result.layers],
            heights,
            marker=markers[index % len(markers)],
            markersize=4,
            label=f"{result.backend} {result.dtype}",
        )
    if any(result.dtype == "float32" for result in results):
        label = f"tolerance of float32, {tolerances.FLOAT32_RELATIVE:.0e}"
        axes.axhline(tolerances.FLOAT32_RELATIVE, color="C3", linestyle="--", linewidth=0.8, label=label)
    axes.axhline(exact_height, color="0.8", linewidth=0.8)
    axes.text(0, exact_height, "exact", va="bottom", color="0.5", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set(
        ylabel="largest difference / largest reference value",
        title="Error of each layer against PyTorch in float32, in running order",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    save_figure(figure, path)
