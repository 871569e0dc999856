"""Encoding on Ray Data: many machines, an actor for each host's chips, and an engine that replaces dead ones.

An actor puts a clip's latents on the shelf itself, in a directory that all machines see, and gives the line
of the manifest back; so a task that Ray runs again, as its actor died, finds what was done. The process that
started it writes manifest and shards.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import formats
from cogvideox_torchax.dataset.clip import Clip, ClipError, EncodeClip, Reading, Recipe, check_ids
from cogvideox_torchax.dataset.loop import Step
from cogvideox_torchax.dataset.manifest import Shelf, described
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files.whole import OutputError

RETRIES = 100
"""How often an actor is started again, and a clip given to another, before the work fails."""


class ClipActor:
    """What Ray keeps alive on a host: a model, and the clips that it is given, one at a time.

    Args:
        recipe: how they are encoded.
    """

    def __init__(self, recipe: Recipe):
        self._encode = EncodeClip(recipe)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"line": [self._one(row) for row in _rows(batch)]}

    def _one(self, row: dict[str, Any]) -> str:
        """A clip encoded and put where it belongs; what became of it, as JSON."""
        index, path = row.pop("index"), Path(row.pop("path"))
        try:
            if path.exists():  # by an actor that died before it could say so
                latents = latent_files.load(path)
            else:
                latents = self._encode.encode(self._read(Clip(**json.loads(row["clip"]))))
                path.parent.mkdir(parents=True, exist_ok=True)
                latent_files.save(latents, path)
        except OutputError:
            raise
        except ValueError as error:
            return json.dumps({"index": int(index), "error": " ".join(str(error).split())})
        return json.dumps({"index": int(index), "about": described(latents)})

    def _read(self, clip: Clip) -> Reading:
        try:
            return self._encode.read(clip)
        except OSError as error:  # the clip's own; one of the output ends the work
            raise ClipError(str(error)) from error


def _rows(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(batch, values, strict=True))


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError("encoding on Ray needs it: pip install 'cogvideox-torchax[ray]'") from error
    return ray


def encode(
    clips: Sequence[Clip],
    recipe: Recipe,
    output: str | Path,
    *,
    actors: int = 1,
    kind: str = formats.PARQUET,
    shard_size: int = 64,
    resources: dict[str, float] | None = None,
    retry: bool = False,
    say: Callable[[Step], None] = lambda step: None,
) -> Shelf:
    """Encodes the clips that a directory lacks, on the Ray cluster that this process is connected to.

    Args:
        clips: with paths that every machine sees.
        recipe: how they are encoded; its `tp` splits a clip over the chips of an actor's host.
        output: a directory that every machine sees.
        actors: how many models run at a time, one a host.
        kind: of `formats`.
        shard_size: clips a shard.
        resources: what an actor takes, such as {"TPU": 4} for a host of four chips; a CPU where None.
        retry: whether clips that were bad before are tried again.
        say: is told of each clip.

    Returns:
        The shelf, closed: its `bad` says which clips could not be encoded.

    Raises:
        OutputError: a directory that cannot be written, or that was made by another recipe.
        ClipError: an id that comes twice, or names no file below the directory.
        ValueError: Ray is not installed.
    """
    ray = _ray()
    check_ids(clips, "the data set")
    by_id = {clip.id: clip for clip in clips}
    on_host = replace(recipe, backend="torch", dp=None, tp=None)
    unit = EncodeClip(on_host)
    unit.check()
    made_by = recipe.lasting(unit.model_sha256)
    options: dict[str, Any] = {"kind": kind, "shard_size": shard_size, "retry": retry}
    with Shelf(output, made_by, list(by_id), **options) as shelf:
        rows = []
        for index in shelf.pending():
            clip = by_id.get(shelf.ids[index] or "")
            if clip is None:
                shelf.refuse(index, "it is not among the clips any more")
                continue
            given = json.dumps({**asdict(clip), "source": str(Path(str(clip.source)).absolute())})
            rows.append({"index": index, "path": str(shelf.clip_path(index).absolute()), "clip": given})
        if not rows:
            return shelf
        asked = {"num_cpus": 1} if resources is None else {"num_cpus": 0, "resources": resources}
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            ClipActor,
            fn_constructor_args=(recipe,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=actors),
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
            **asked,
        )
        for row in data.iter_rows():
            line = json.loads(row["line"])
            if "error" in line:
                shelf.refuse(line["index"], line["error"])
            else:
                shelf.note(line["index"], **line["about"])
            say(Step(shelf.ids[line["index"]], line.get("error"), 0.0, 0.0))
        return shelf
