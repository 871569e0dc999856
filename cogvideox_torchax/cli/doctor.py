"""`doctor`: print versions and devices, name untested versions, and say how to install what is missing."""

import argparse
import platform
from typing import Any

from cogvideox_torchax.arrays.compile_cache import configure_compile_cache
from cogvideox_torchax.files import reports
from cogvideox_torchax.versions import installed, untested

CORE = ("torch", "torchax", "jax", "jaxlib", "diffusers", "safetensors", "huggingface_hub", "numpy", "tqdm")
OPTIONAL = {
    "av": ("video", "reading and writing videos"),
    "flax": ("flax", "the Flax build"),
    "transformers": ("text", "text encoders of whole pipelines"),
    "sentencepiece": ("text", "the T5 tokenizer"),
    "peft": ("text", "LoRAs"),
    "matplotlib": ("plots", "pictures of measurements"),
    "pyarrow": ("data", "data sets in Parquet"),
    "webdataset": ("data", "data sets in tars of WebDataset"),
    "ray": ("ray", "encoding data sets on Ray"),
    "fastapi": ("web", "the example that streams into a browser"),
    "libtpu": ("tpu", "running on a TPU"),
}
"""By package: the extra of this project that installs it, and its purpose."""
INSTALL = "in the checkout pip install -c constraints.txt -e"


def run(args: argparse.Namespace) -> int:
    """Print versions, devices and advice; return 1 if torch and torchax do not work together, else 0."""
    # Each package's version, or a word in its place.
    core = {name: installed(name) or "missing" for name in CORE}
    optional = {name: installed(name) or "not installed" for name in OPTIONAL}
    advice = [
        *(f"{name} is missing: {INSTALL} ." for name in CORE if core[name] == "missing"),
        *(
            f"optional, for {purpose}: {name}; {INSTALL} '.[{extra}]'"
            for name, (extra, purpose) in OPTIONAL.items()
            if optional[name] == "not installed"
        ),
        *untested(),  # a line for each package whose version the tests have not passed with
    ]
    report: dict[str, Any] = {"python": platform.python_version(), **core, **optional, "torchax works": "yes"}
    try:
        from cogvideox_torchax.runtime.device import import_torchax  # it imports JAX

        import_torchax()
    except Exception as error:
        report["torchax works"] = "no"
        reason = " ".join(str(error).split())[:600]  # on one line, cut where it is long
        advice.insert(0, f"{reason}; what is tested comes by: {INSTALL} .")
    try:
        import jax

        report["compile cache"] = configure_compile_cache() or "off"
        report["devices"] = ", ".join(f"{one.platform}:{one.id} ({one.device_kind})" for one in jax.devices())
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        report["devices"] = f"none ({reason}); on a machine without a TPU set JAX_PLATFORMS=cpu"
    if report["devices"].startswith(("tpu", "gpu")):
        advice.append("measure this device: python -m benchmarks device -o out/device, in a checkout")
    reports.print_report(report | ({"advice": advice} if args.json else {}), args.json)
    if not args.json and advice:
        print("\n" + "\n".join(f"  - {line}" for line in advice))
    return 0 if report["torchax works"] == "yes" else 1
