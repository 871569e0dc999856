"""`doctor`: versions, tested or not, devices, and what is missing with the command that installs it."""

import argparse
import platform
from typing import Any

from cogvideox_torchax.cli import common, options
from cogvideox_torchax.cli.arguments import Command
from cogvideox_torchax.runtime.bridge import import_torchax
from cogvideox_torchax.versions import installed, untested

CORE = ("torch", "torchax", "jax", "jaxlib", "diffusers", "safetensors", "huggingface_hub", "numpy", "tqdm")
OPTIONAL = {
    "av": ("video", "reading and writing videos"),
    "flax": ("flax", "the Flax build"),
    "transformers": ("text", "text encoders of whole pipelines"),
    "sentencepiece": ("text", "the T5 tokenizer"),
    "peft": ("text", "LoRAs"),
    "matplotlib": ("bench", "plots of benchmarks"),
    "pyarrow": ("data", "data sets in Parquet"),
    "ray": ("ray", "encoding data sets on Ray"),
    "scikit-learn": ("train", "pictures that the bundled model is trained on"),
    "fastapi": ("web", "the example that streams into a browser"),
    "libtpu": ("tpu", "running on a TPU, and `plan` for one"),
}
"""By package: the extra of this project that installs it, and its purpose."""
INSTALL = "pip install -c constraints.txt -e"


COMMAND = Command("show versions and devices, and what is missing", "", (options.JSON,))


def run(args: argparse.Namespace) -> int:
    """Print versions, devices and advice; return 1 where torch and torchax do not work together, else 0."""
    report: dict[str, Any] = {"python": platform.python_version()}
    advice: list[str] = []
    for name in CORE:
        report[name] = installed(name) or "missing"
        if report[name] == "missing":
            advice.append(f"{name} is missing: in the checkout {INSTALL} .")
    for name, (extra, purpose) in OPTIONAL.items():
        report[name] = installed(name) or "not installed"
        if report[name] == "not installed":
            advice.append(f"optional, for {purpose}: {name}; in the checkout {INSTALL} '.[{extra}]'")
    advice += untested()
    broken = _broken_pair()
    if broken:
        advice.insert(0, broken)
    report["torchax works"] = "no" if broken else "yes"
    report["devices"] = _devices()
    if report["devices"].startswith(("tpu", "gpu")):
        advice.append("measure this device: cogvideox-torchax bench device -o out/device")
    report["compile cache"] = _compile_cache()
    common.print_report(report | ({"advice": advice} if args.json else {}), args.json)
    if not args.json and advice:
        print("\n" + "\n".join(f"  - {line}" for line in advice))
    return 1 if broken else 0


def _broken_pair() -> str | None:
    """Return why the installed torch and torchax do not work together; None where they do."""
    try:
        import_torchax()
    except Exception as error:
        return " ".join(str(error).split())[:600]
    return None


def _devices() -> str:
    """Return JAX's devices as text, or why there are none."""
    try:
        import jax

        return ", ".join(f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices())
    except Exception as error:
        return (
            f"none ({' '.join(str(error).split())[:200]}); on a machine without a TPU set JAX_PLATFORMS=cpu"
        )


def _compile_cache() -> str:
    """Return the directory of JAX's compile cache, or why there is none."""
    from cogvideox_torchax import runtime

    try:
        import jax
    except Exception:
        return "none, as JAX does not import"
    runtime.configure_compile_cache()
    return jax.config.jax_compilation_cache_dir or "off"  # pyright: ignore[reportAttributeAccessIssue]
