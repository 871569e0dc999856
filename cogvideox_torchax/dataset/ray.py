"""Encoding on Ray Data: many machines, an actor for each host's chips; Ray replaces actors that die.

An actor writes a clip's latents itself, into a directory that all machines see, and returns the clip's line
of the manifest. A task that Ray runs again because its actor died finds the latents there. The process that
started the work writes manifest and shards.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset.clip import Clip, ClipConfig, EncodeClip
from cogvideox_torchax.dataset.loop import CLIPS_OWN, IN_READING, Step, attempt
from cogvideox_torchax.dataset.manifest import DatasetDirectory, manifest_fields, save_latents
from cogvideox_torchax.files import latents as latent_files

RETRIES = 100
"""Restarts of an actor, and attempts at a clip, before the work fails."""


class ClipActor:
    """An actor on a Ray host: a model, which encodes the clips that it is given one at a time.

    Args:
        config: settings by which they are encoded.
    """

    def __init__(self, config: ClipConfig):
        """Keep the config; the model is loaded for the first clip."""
        self._encode = EncodeClip(config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Encode the clips of a batch; return their outcomes, in JSON, under "line".

        Under "row" a batch has the JSON that `work` makes of each clip.
        """
        return {"line": [self._encode_row(json.loads(row)) for row in batch["row"]]}

    def _encode_row(self, row: dict[str, Any]) -> str:
        """Encode a clip and write its latents, unless they are there already.

        Args:
            row: the clip's number "index", the "path" of its latents, and "clip", the fields of its `Clip`.

        Returns:
            JSON of an object with the "index", and "about", the fields of the manifest's line, or an "error".
        """
        # `attempt` returns (result, None), or (None, reason) for an error in `IN_READING` or `CLIPS_OWN`.
        path, latents, reason = Path(row["path"]), None, None
        if path.exists():  # written by an actor that died before it could return
            latents = latent_files.load(path)
        else:
            decoded, reason = attempt(self._encode.read, Clip(**row["clip"]), IN_READING)
            if reason is None:
                latents, reason = attempt(self._encode.encode, decoded, CLIPS_OWN)
            if latents is not None:
                save_latents(latents, path)
        outcome = {"error": reason} if latents is None else {"about": manifest_fields(latents)}
        return json.dumps({"index": row["index"], **outcome})


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Connect this process to a Ray cluster for a `with` block, unless it is connected already; yield `ray`.

    Ray prints on stdout that an actor has died, and more when a connection ends. In the block stdout is
    stderr: a command's stdout is its report.

    Args:
        address: of the cluster; where None, the one that RAY_ADDRESS names, or a new one on this machine.

    Raises:
        ValueError: Ray is not installed, or no cluster is there.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError("encoding on Ray needs it: pip install 'cogvideox-torchax[ray]'") from error
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False)
            except ConnectionError as error:
                raise ValueError(f"there is no Ray cluster at {address}: {error}") from error
            stack.callback(ray.shutdown)  # runs before stdout is back, as callbacks run in reverse order
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray


def work(
    directory: DatasetDirectory, config: ClipConfig, address: str | None = None, *, actors: int | None = None
) -> Iterator[Step]:
    """Encode a directory's missing clips on a Ray cluster; yield each one's outcome.

    An actor takes the chips of the config's mesh where the cluster has TPUs, and a CPU elsewhere.

    Args:
        directory: the output; every machine can open it and the clips by the same paths.
        config: settings by which clips are encoded.
        address: of the cluster; None for the cluster that RAY_ADDRESS names, or a new one on this machine. If
            a connection is open, it is used.
        actors: number of models that run at a time; None for as many as the chips allow, or one.

    Raises:
        ValueError: Ray is not installed, or no cluster is there.
    """
    rows = []  # the input of `ClipActor`
    for index in directory.missing:
        clip, path = directory.clip(index), directory.clip_path(index).absolute()
        fields = {**asdict(clip), "source": str(Path(str(clip.source)).absolute())}
        rows.append({"row": json.dumps({"index": index, "path": str(path), "clip": fields})})
    if not rows:
        return
    with _connected(address) as ray:
        # Numbers of chips: of the cluster, and those that one model needs.
        chips, needed = int(ray.cluster_resources().get("TPU", 0)), (config.dp or 1) * (config.tp or 1)
        # With chips no CPU is reserved: the chips alone limit the actors on a host.
        resources: dict[str, Any] = (
            {"num_cpus": 0, "resources": {"TPU": needed}} if chips else {"num_cpus": 1}
        )
        # Each clip is a block and a batch: if an actor dies, only one clip is encoded again.
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            ClipActor,
            fn_constructor_args=(config,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=actors or max(chips // needed, 1)),
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
            **resources,
        )
        for row in data.iter_rows():
            line = json.loads(row["line"])
            if "error" in line:
                directory.refuse(line["index"], line["error"])
            else:
                directory.note(line["index"], **line["about"])
            yield Step(line["index"], line.get("error"), 0.0, 0.0)  # an actor's seconds are not measured
