"""Many machines by Ray Data: an actor for each host's chips; Ray replaces actors that die.

An actor writes its result itself, such as a clip's latents, into a directory that all machines see. If an
actor dies, Ray has another one do its work, unless the result was written already.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import loop
from cogvideox_torchax.dataset.clip import Clip, ClipConfig, EncodeClip
from cogvideox_torchax.dataset.directory import LatentDirectory, save
from cogvideox_torchax.files.extras import needing


class ClipActor:
    """An actor on a Ray host: it holds a model, and encodes clips one at a time."""

    def __init__(self, config: ClipConfig):
        self._unit = EncodeClip(config)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Encode a clip; return the outcome, as `dealt` takes it.

        The row has the "clip", the fields of a `Clip` as a JSON object, and the "path" of its output.
        """
        clip, path = Clip(**json.loads(row["clip"])), Path(row["path"])
        steps = loop.work(
            jobs=[] if path.exists() else [clip],  # an actor may have written it, and died before it returned
            read=self._unit.read,
            compute=lambda part: list(self._unit.encode_all(part)),
            write=lambda _, latents: save(latents, path, self._unit),
            refuse=lambda *_: None,  # by the process that deals out the clips
        )
        done = [
            {"error": step.error or "", "waited": step.waited, "computed": step.computed} for step in steps
        ]
        return {"id": clip.id, "error": "", "waited": 0.0, "computed": 0.0, **(done[0] if done else {})}


def work(
    directory: LatentDirectory,
    config: ClipConfig,
    address: str | None = None,
    *,
    actors: int | None = None,
) -> Iterator[loop.Step]:
    """Encode a directory's missing clips on a Ray cluster; yield each one's outcome as `directory.work` does.

    An actor takes the chips of the config's mesh if the cluster has TPUs, and else a CPU.

    Args:
        directory: the output, which lacks at least one clip. Every machine opens it, and the clips, by the
            same paths.
        config: settings by which clips are encoded.
        address: of the cluster; None for the one that RAY_ADDRESS names, or a new one on this machine.
        actors: number of models that run at a time; None for as many as the chips allow, or one.

    Raises:
        ValueError: Ray is not installed, or there is no cluster.
    """
    # Ray Data keeps rows as Arrow tables: as JSON, a row's values are plain texts.
    rows = [
        {
            "clip": json.dumps({**asdict(clip), "source": str(Path(str(clip.source)).absolute())}),
            "path": str(directory.path(clip).absolute()),
        }
        for clip in directory.missing.values()
    ]
    chips = (config.dp or 1) * (config.tp or 1)
    return dealt(rows, ClipActor, (config,), chips, directory.refuse, address, actors=actors)


def dealt(
    rows: list[dict[str, str]],
    actor: type,
    arguments: tuple[Any, ...],
    chips: int,
    refuse: Callable[[str, str], None],
    address: str | None,
    *,
    actors: int | None,
) -> Iterator[loop.Step]:
    """Deal out rows to the actors of a Ray cluster; yield the outcome of each, as it is done.

    Args:
        rows: the work, at least one row.
        actor: a class whose objects are called with a row. They return its "id", an "error", "" for none, and
            the seconds that they "waited" for the input and "computed", if known.
        arguments: of the class.
        chips: number of chips that one actor takes if the cluster has TPUs; else it takes a CPU.
        refuse: called with the id of a row that failed and the reason.
        address, actors: see `work`.

    Raises:
        ValueError: Ray is not installed, or there is no cluster.
    """
    with needing("ray", "working on Ray needs it"):
        import ray.data
    # Ray prints on stdout, and a command's stdout is its report.
    with contextlib.redirect_stdout(sys.stderr), _connected(ray, address):
        ray.data.DataContext.get_current().enable_progress_bars = False
        cluster_chips = int(ray.cluster_resources().get("TPU", 0))
        # Each row is a block: if an actor dies, only one is done again.
        blocks: Any = ray.data.from_items(rows, override_num_blocks=len(rows))
        results = blocks.map(
            actor,
            fn_constructor_args=arguments,
            compute=ray.data.ActorPoolStrategy(size=actors or max(cluster_chips // chips, 1)),
            # With chips no CPU is reserved: the chips alone limit the actors on a host.
            **({"num_cpus": 0, "resources": {"TPU": chips}} if cluster_chips else {"num_cpus": 1}),
        )
        for row in results.iter_rows():
            if row["error"]:
                refuse(row["id"], row["error"])
            yield loop.Step(row["id"], row["error"] or None, row.get("waited", 0.0), row.get("computed", 0.0))


def _connected(ray: Any, address: str | None) -> Any:
    """Connect to a cluster; return Ray's context, whose `with` block disconnects at its end."""
    try:
        return ray.init(address=address, log_to_driver=False)
    except ConnectionError as error:
        raise ValueError(f"there is no Ray cluster at {address}: {error}") from error
