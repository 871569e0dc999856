"""Functions that find and check the files of a VAE, and read their tensors."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from cogvideox_torchax.files.models import INDEX, ModelError, locate, read_json

CLASS_NAME = "AutoencoderKLCogVideoX"
WEIGHTS_STEM = "diffusion_pytorch_model"
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The names of dtypes in torch and JAX, by their names in safetensors; the widest dtype comes first."""

FILES = ("config.json", f"{WEIGHTS_STEM}*.safetensors*")
"""The files of a VAE to download."""


def locate_vae(
    name: str | Path, part: str | None = "vae", variant: str | None = None, **hub_options: Any
) -> Path:
    """Return the directory of a VAE, whose config and safetensors files have been checked.

    `name` is a directory or a hub id. `part` is the VAE's folder in a pipeline, or None for a VAE alone.
    `hub_options` are those of huggingface_hub's `snapshot_download`, such as `revision`.

    Raises:
        ModelError: there is no such model, or a file is missing or wrong.
    """
    directory = locate(name, part, files=FILES, **hub_options)
    read_config(directory)
    for file in weight_files(directory, variant):
        _check_safetensors(file)
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a VAE; `ModelError` if it is missing, unreadable or another model's."""
    path = directory / "config.json"
    if not path.is_file() and (directory / INDEX).is_file():  # model_index.json, which only a pipeline has
        raise ModelError(f"{directory} has no config.json; this is a whole pipeline: pass subfolder='vae'")
    config = read_json(path)
    if config.get("_class_name") != CLASS_NAME:
        raise ModelError(
            f"{path} is for {config.get('_class_name') or 'no known class'}, not for {CLASS_NAME}: give a "
            "CogVideoX VAE"
        )
    return config


def weight_files(directory: Path, variant: str | None = None, *, stem: str = WEIGHTS_STEM) -> list[Path]:
    """Return the files of a model's weights, whose names begin with `stem`: a single file, or all shards.

    Raises:
        ModelError: there are no such files, a shard is missing, or the list of shards is unreadable.
    """
    suffix = "" if variant is None else f".{variant}"
    single = directory / f"{stem}{suffix}.safetensors"
    index = directory / f"{stem}.safetensors.index{suffix}.json"  # lists the shards
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set((read_json(index).get("weight_map") or {}).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(
                f"{directory} lacks {missing[0]}, one of the {len(names)} shards in {index.name}"
            )
        return [directory / name for name in names]
    raise ModelError(
        f"{directory} has no {single.name}: is the download complete, and the variant right? A pickle, such "
        "as a .bin, is never loaded, because it can run code"
    )


def dtype_name_of(
    dtype: Any, directory: Path, variant: str | None = None, *, stem: str = WEIGHTS_STEM
) -> str:
    """Return the name of the dtype that a caller of `from_pretrained` asks for.

    `dtype` is a dtype of torch, its name, "auto" for the widest dtype in the model's files, or None for
    float32. "auto" reads only the first of the files, and takes the others to be alike.

    Raises:
        ValueError: `dtype` is another object or name.
    """
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if name == "auto":
        with safe_open(weight_files(directory, variant, stem=stem)[0], framework="numpy") as file:
            saved = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 (it has no iterator)
        # `DTYPES` maps safetensors' names to torch's, from the widest dtype down. If the file has none of
        # them, such as only integers, the result is float32.
        name = next((DTYPES[saved_name] for saved_name in DTYPES if saved_name in saved), "float32")
    if name not in DTYPES.values():
        raise ValueError(
            f'got dtype {dtype!r}: give a torch dtype such as torch.bfloat16, its name, "auto" for that of '
            "the files, or None for float32"
        )
    return name


def locate_with_dtype(
    name: str | Path, part: str | None, variant: str | None, dtype: Any, options: dict[str, Any]
) -> tuple[Path, str]:
    """Return the directory of a VAE as `locate_vae` does, and the name of its dtype as `dtype_name_of` does.

    `options` are those of the hub, and `torch_dtype`, the older name of `dtype`, which is removed from them.

    Raises:
        ValueError: both dtypes are given.
    """
    if dtype is not None and "torch_dtype" in options:
        raise ValueError("got both dtype and torch_dtype, which are one option: leave one out")
    dtype = options.pop("torch_dtype", dtype)
    directory = locate_vae(name, part, variant, **options)
    return directory, dtype_name_of(dtype, directory, variant)


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of safetensors files, one at a time; `ModelError` if some are in eight bits."""
    for path in files:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            dtypes = {file.get_slice(name).get_dtype() for name in names}
        if of_bytes := dtypes & {"F8_E4M3", "F8_E5M2", "I8", "U8"}:
            raise ModelError(
                f"{path} has weights in {', '.join(sorted(of_bytes))}: load the model by its own class's "
                "from_pretrained, and port it"
            )
        for name in names:
            # The file is mapped into memory, and what was read of it stays there until it is closed. If it
            # stayed open for all tensors, the whole file would be in memory beside the weights. So it is
            # opened again for each tensor.
            with safe_open(path, framework="numpy") as file:
                yield name, file.get_tensor(name)


def first_rows(path: Path) -> Iterator[bytes]:
    """Yield name, shape and first row of each tensor in a safetensors file; `ModelError` for another file."""
    _check_safetensors(path)
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (it has no iterator)
            shape = file.get_slice(name).get_shape()
            yield f"{name} {shape}".encode()
            yield (file.get_slice(name)[:1] if len(shape) > 1 else file.get_tensor(name)).tobytes()


def _check_safetensors(path: Path) -> None:
    """Raise `ModelError` unless a safetensors file is complete and has tensors."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except SafetensorError as error:
        raise ModelError(
            f"{path} is truncated or no safetensors file ({error}): download it again"
        ) from error
    if not names:
        raise ModelError(f"{path} holds no tensors: download it again")


def check_loading_info(info: dict[str, Any], source: object) -> None:
    """Raise `ModelError` if loading left a parameter without a value, or a value without a parameter.

    `info` has lists of parameters' names under the keys that diffusers uses. The message calls the weights by
    `source`.
    """
    kinds = {"missing": "missing", "unexpected": "unexpected", "mismatched": "of another shape"}
    for kind, words in kinds.items():
        # For another shape diffusers lists tuples, of a name and two shapes: `str` makes text of both forms.
        names = sorted(map(str, info.get(f"{kind}_keys") or []))
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"the weights of {source} do not match their config.json: {words} "
                f"{', '.join(names[:3])}{more}"
            )
