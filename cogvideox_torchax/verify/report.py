"""The results of `verify` as JSON and as Markdown tables."""

import dataclasses
import json
from typing import Any

from cogvideox_torchax.files.reports import table
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
            f"at most {contract.allowed:.3g}",
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
            errors = (f"{error.relative:.2e}", f"{error.rms:.2e}")
            rows.append((f"{result.backend} {result.dtype}", direction, *errors, *lowest))
    head = ("backend", "direction", "relative", "RMS", "lowest PSNR, dB", "lowest SSIM")
    return table(head, rows)


def layers_table(result: Result) -> str:
    """Return a table with a row for each layer of one backend, in running order."""
    # `layer.chunk` is the first chunk in which the layer leaves the tolerance; None if it leaves it in none.
    rows = [
        (
            layer.name,
            f"{layer.relative:.2e}",
            f"{layer.rms:.2e}",
            "" if layer.chunk is None else f"from chunk {layer.chunk}",
        )
        for layer in result.layers
    ]
    return table(("layer", "relative", "RMS", "outside the tolerance"), rows)


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
    parts = [
        "# verify",
        facts,
        "\n".join(f"    {verdict(result)}" for result in results),
        *("## Contracts", contracts_table(results)),
        *("## As a whole", whole_table(results)),
    ]
    for result in results:
        parts += [f"## Layers: {result.backend} {result.dtype}", layers_table(result)]
    return "\n\n".join(parts) + "\n"
