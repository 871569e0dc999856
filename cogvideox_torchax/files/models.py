"""Find models in directories and on the Hugging Face hub, and save them in the format that they came in."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.files import faults, reports

INDEX = "model_index.json"
"""File that a whole pipeline has, and a single model has not."""
FILE_SUFFIXES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of a model's files: the name of such a file stands for the model's directory."""


class ModelError(ValueError, OSError):
    """A model that cannot be loaded; the message names the file and what to do.

    It is an `OSError` too, because diffusers raises that for a missing file.
    """


def local(name: str | Path) -> Path | None:
    """Return the directory of a model on this machine; None for a hub id, OWNER/NAME.

    `name` is a directory, a file in one, or a hub id; any other name raises `ModelError`.
    """
    path = Path(name).expanduser()
    is_id = str(name).count("/") == 1 and str(name)[0] not in "./~"  # OWNER/NAME, and no path
    faults.refuse(
        (
            path.is_file() and path.suffix not in FILE_SUFFIXES,
            f"{path} is no file of a model: give the model's directory",
        ),
        (
            not (path.exists() or is_id),
            f"there is no model directory {path}: give a directory, or a hub id, which is OWNER/NAME without "
            "more",
        ),
        error=ModelError,
    )
    if path.exists():
        return path.parent if path.is_file() else path
    return None


def locate(
    name: str | Path, part: str | None = None, *, files: Sequence[str] = ("*.json",), **hub_options: Any
) -> Path:
    """Return the directory of a model, or of a part of a pipeline; download a hub id's files.

    Args:
        name: a directory, a file in one, or a hub id.
        part: the folder within a pipeline, such as "vae". A directory with neither this folder nor a
            model_index.json counts as the part.
        files: patterns of the files to download.
        hub_options: of huggingface_hub's `snapshot_download`, such as `revision` or `local_files_only`.
            Without a network huggingface_hub's cache is used.

    Raises:
        ModelError: there is no such directory, or neither the hub nor its cache has the repository.
    """
    directory = local(name)
    if directory is None:  # a hub id
        within_part = [f"{part}/{file}" for file in files] if part else []
        # A repository with the file `INDEX`, model_index.json, is a pipeline. Of a pipeline only the part's
        # files are downloaded, and whether it is one is known only after the first download.
        directory = _snapshot(str(name), [INDEX, *within_part], hub_options)
        # If the repository is no pipeline, or no part is wanted, the files are at its top.
        if not (part and (directory / INDEX).is_file()):
            directory = _snapshot(str(name), list(files), hub_options)
    is_pipeline = (directory / INDEX).is_file()
    # The folder of a pipeline is returned even if it is missing: the caller's error then names it.
    return directory / part if part and (is_pipeline or (directory / part).is_dir()) else directory


def _snapshot(repository: str, patterns: list[str], hub_options: dict[str, Any]) -> Path:
    """Download the files of a repository that match the patterns; return their directory."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, **hub_options))
    except (OSError, ValueError) as error:
        raise not_on_hub(repository, error) from error


def locate_file(name: str, default: str) -> Path:
    """Return the path of a file, which is downloaded if it is on the hub.

    Args:
        name: the file; or a directory or a hub id, alone or with ":" and the file's path in it.
        default: the path in a directory or a repository that is named alone.

    Raises:
        ModelError: there is no such file; the message names the .safetensors files that are there.
    """
    if Path(name).expanduser().is_file():
        return Path(name).expanduser()
    repository, _, part = name.partition(":")
    file, own = part or default, local(repository)
    directory = _snapshot(repository, [file], {}) if own is None else own
    if (directory / file).is_file():
        return directory / file
    there = [path.relative_to(directory).as_posix() for path in directory.rglob("*")]
    if own is None:  # what was downloaded is not all
        from huggingface_hub import list_repo_files

        there = list_repo_files(repository)
    files = ", ".join(sorted(each for each in there if each.endswith(".safetensors")))
    raise ModelError(f"{repository} has no file {file}: give one of its files as {repository}:FILE ({files})")


def not_on_hub(repository: str, error: Exception) -> ModelError:
    """Return the error for a repository that neither the hub nor its cache has."""
    # The first sentence: huggingface_hub goes on with addresses and advice of its own.
    reason = re.split(r"(?<=[.!?])\s", " ".join(str(error).split()), maxsplit=1)[0]
    return ModelError(
        f"cannot load {repository} from the hub, nor from its cache on this machine: check the name and the "
        f"network, or give a local directory ({reason})"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return a model's JSON file; `ModelError` where it is missing or no JSON object."""
    try:
        content = reports.parse(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent.absolute()} has no {path.name}: is this the directory of "
            f"{'a whole pipeline' if path.name == INDEX else 'a model'}?"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: download it again")
    return content


def saved_from_host(save_pretrained: Callable[..., None]) -> Callable[..., None]:
    """Wrap a model's method `save_pretrained`, so that it also saves weights that are on JAX.

    The wrapped method saves a copy of the module tree with plain tensors (`host_skeleton`). It then gives
    the weight files the permissions of config.json, because safetensors lets only their owner read them.
    """

    @functools.wraps(save_pretrained)
    def save(model: Any, save_directory: str | Path, *args: Any, **options: Any) -> None:
        if dtype := runtime.byte_dtype(model):
            raise ValueError(
                f"save_pretrained got weights in {dtype}, which diffusers cannot load as they are here: save "
                "the model before port"
            )
        save_pretrained(runtime.host_skeleton(model), save_directory, *args, **options)
        config = Path(save_directory) / "config.json"
        for file in config.parent.glob("*.safetensors") if config.exists() else ():
            file.chmod(config.stat().st_mode)

    return save
