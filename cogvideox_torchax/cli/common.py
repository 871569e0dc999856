"""What several commands share: options, the model, the backend, tables and JSON."""

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from jax.sharding import Mesh

    from cogvideox_torchax.autoencoder import AutoencoderKLCogVideoX

BACKENDS = ("torchax", "torch", "flax")
DTYPES = ("float32", "bfloat16", "float16")
DEMO_MODEL = Path(__file__).parent.parent / "assets" / "tiny-vae"

Item = TypeVar("Item")


def add_command(subparsers: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A subparser whose help ends with an example."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model_options(command: argparse.ArgumentParser, default: str | None) -> None:
    shown = default or "the model named in the latent file"
    command.add_argument(
        "--model",
        metavar="DIR_OR_ID",
        default=default,
        help=f"a CogVideoX VAE or a whole pipeline, as a directory or a hub id (default: {shown})",
    )
    command.add_argument("--backend", choices=BACKENDS, default="torchax", help="default: torchax")
    command.add_argument(
        "--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: float32)"
    )
    command.add_argument(
        "--seed", type=int, default=None, help="sample the posterior with this seed instead of its mode"
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--quiet", action="store_true", help="no progress bars")


def add_clip_options(command: argparse.ArgumentParser, frames: int | None = None) -> None:
    command.add_argument("--frames", type=positive, default=frames, help="read only the first so many frames")
    command.add_argument("--height", type=positive, help="resize to this height in pixels")
    command.add_argument("--width", type=positive, help="resize to this width in pixels")
    command.add_argument(
        "--crop", action="store_true", help="crop the middle to the size instead of resizing"
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def quiet_libraries() -> None:
    """Keeps other packages' warnings and download chatter off a user's terminal."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers", "jax", "torchax"):
        logging.getLogger(name).setLevel(logging.ERROR)


def parse_dtype(name: str) -> "torch.dtype":
    import torch

    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def load_vae(model: str, backend: str, dtype: str, mesh: "Mesh | None" = None) -> "AutoencoderKLCogVideoX":
    """The model on its backend, over a mesh if there is one; of a pipeline directory or a bare pipeline id,
    its VAE."""
    from torch import nn

    from cogvideox_torchax.runtime import enable

    torch_dtype = parse_dtype(dtype)
    directory = Path(model).expanduser()
    subfolder = None
    if (directory / "model_index.json").is_file() or _is_pipeline_id(model):
        subfolder = "vae"
    vae = _backend_class(backend).from_pretrained(
        str(directory) if directory.exists() else model, subfolder=subfolder, torch_dtype=torch_dtype
    )
    if mesh is not None:
        vae.place_on(mesh)
    if backend == "torchax":
        enable()
        nn.Module.to(vae, "jax")
    return vae


def _backend_class(backend: str) -> "type[AutoencoderKLCogVideoX]":
    if backend == "flax":
        from cogvideox_torchax.flax import FlaxVAEForPipelines

        return FlaxVAEForPipelines
    from cogvideox_torchax.autoencoder import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX


def _is_pipeline_id(model: str) -> bool:
    """A hub id of one of the published pipelines, which hold their VAE in `vae/`."""
    return not Path(model).exists() and model.count("/") == 1 and "cogvideox" in model.lower()


def device_name(backend: str) -> str:
    if backend == "torch":
        return "cpu"
    import jax

    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind


def progress(items: Iterable[Item], *, total: int, name: str, args: argparse.Namespace) -> Iterator[Item]:
    """The items, with a bar that counts them."""
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=name, unit="chunk", disable=args.quiet, leave=False)


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """A report as JSON on one line, or as a table of two columns."""
    if as_json:
        print(json.dumps(report))
        return
    width = max(len(key) for key in report)
    for key, value in report.items():
        print(f"  {key.replace('_', ' '):<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
    return str(value)


class Stopwatch:
    """Wall seconds since it was made, and the seconds of them that JAX spent tracing, lowering and
    compiling."""

    def __init__(self) -> None:
        import jax.monitoring

        self._compiling = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._start = time.perf_counter()

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            self._compiling += duration_secs

    @property
    def compile_seconds(self) -> float:
        return self._compiling

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


def report_directory(name: str) -> Path:
    """A directory for a report with plots, made where it is not there yet."""
    from cogvideox_torchax import reports

    reports.pyplot()  # missing? say so before the work, not after it
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write into {path}: {error.strerror}") from error
    return path


def versions() -> dict[str, str]:
    """Of the packages that a figure depends on."""
    import importlib.metadata

    found = {}
    for name in ("torch", "torchax", "jax", "jaxlib", "libtpu", "diffusers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def say(message: str) -> None:
    """A line for the person at the terminal, kept out of what a program reads from stdout."""
    print(message, file=sys.stderr)
