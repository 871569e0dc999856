"""`generate --prompts`: a video `ID.mp4` and a record `ID.json` for each line of a file, in a directory.

A run may be killed at any time, and the same command goes on: see `generation`.
"""

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cogvideox_torchax.cli import batch, devices
from cogvideox_torchax.cli.commands import SEEDS
from cogvideox_torchax.cli.generation import Generator, Request, Stage, check
from cogvideox_torchax.dataset import loop, sources
from cogvideox_torchax.dataset.clip import ClipError, check_id
from cogvideox_torchax.dataset.directory import OutputDirectory
from cogvideox_torchax.files import faults
from cogvideox_torchax.pipelines import description

FIELDS: dict[str, type] = {
    **dict.fromkeys(("prompt", "negative_prompt", "image", "video", "id"), str),
    **{"seed": int, "num_inference_steps": int, "guidance_scale": float},
}
"""Fields that a line of a .jsonl file may have, and their types."""
COMMENT = ("#", "//", ";")
"""Beginnings of lines that are no prompts."""

Line = tuple[int, dict[str, Any]]
"""The number and the fields of a line."""


def read(path: Path) -> list[Line]:
    """Return the lines of a file of prompts; `ValueError` for a wrong line, or for none."""
    lines = list(sources.entries(path, "prompt", FIELDS, "prompt", COMMENT))
    if not lines:
        raise ValueError(f"{path} has no prompts: write one on each line")
    return lines


def run(args: argparse.Namespace, generate: Generator, lines: list[Line]) -> int:
    """Generate the videos that the output directory lacks; return 1 if some cannot be generated, else 0."""
    with devices.share_of_this_process(args) as share:
        directory = PromptDirectory(args, generate, lines, share)
        with directory.locked():
            steps = directory.work() if directory.missing else iter(())
            report = batch.run_loop(args, steps, directory, unit="video")
    return batch.print_report(args, report, directory, "video")


class PromptDirectory(OutputDirectory):
    """A directory of videos and their records. The method `work` generates the videos that are missing.

    Args:
        args: the options.
        generate: of the pipeline; it has the model, and the request of a line that has a prompt alone.
        lines: the lines of the file, for all processes.
        share: the share of this process.
    """

    FAILED, SETTINGS = "failed-prompts.jsonl", "prompts.json"

    def __init__(self, args: argparse.Namespace, generate: Generator, lines: list[Line], share: slice):
        super().__init__(args.output, share)
        self._args, self._generate = args, generate
        self._begun = Stage.VIDEO  # the stage that all missing videos have
        copies = range(args.num_videos_per_prompt or 1)
        self._line_of = {self._settings.stem: 0}  # by a video's id; a record may not replace the settings
        for (number, fields), copy in itertools.product(lines, copies):
            self._line_of.setdefault(_id(number, fields, copy), number)
        for number, fields in lines[share]:
            try:
                requests = {_id(number, fields, copy): self._request(number, fields, copy) for copy in copies}
                stages = [generate.made(request) for request in requests.values()]
            except (ValueError, OSError) as error:
                self.bad[f"line {number}"] = str(error)
                continue
            for (video_id, request), made in zip(requests.items(), stages, strict=True):
                if made >= generate.until:
                    is_whole = made == Stage.VIDEO
                    self.add(video_id, Path(request.output) if is_whole else request.file(made), request)
                else:  # perhaps there is a video of another request: this one's replaces it
                    self.missing[video_id] = request
                    self._begun = min(self._begun, made)
        settings = {**asdict(generate.request), **generate.settings}
        for name in ("prompt", "image", "video", "output"):  # which are in each video's record
            del settings[name]
        self.save_or_check_settings(settings)  # nothing has been written before

    def _request(self, number: int, fields: dict[str, Any], copy: int) -> Request:
        """Return the request of a line's video number `copy`, after its checks."""
        video_id, defaults = _id(number, fields, copy), self._generate.request
        own = {name: value for name, value in fields.items() if name != "id"}
        for name in own.keys() & {"image", "video"}:  # paths are relative to the file
            own[name] = os.path.abspath(Path(self._args.prompts).parent / own[name])
        own["seed"] = own.get("seed", defaults.seed + SEEDS * (number - 1)) + copy
        check_id(video_id)
        request = replace(defaults, **own, output=str(self.directory / f"{video_id}.mp4"))
        owner = self._line_of[video_id]
        faults.refuse(
            (
                owner != number,
                f"its id {video_id} is that of {f'line {owner}' if owner else 'the settings'}: give another",
            ),
            (own["seed"] >= 2**64, f"got the seed {own['seed']}: at most {2**64 - 1}"),
            (
                self._args.cache and {"num_inference_steps", "guidance_scale"} & fields.keys(),
                "got num_inference_steps or guidance_scale with --cache, which is set for all lines: leave "
                "them out",
            ),
            (
                Path(request.output).exists() and not request.file(Stage.VIDEO).exists(),
                f"{request.output} has no record, so this command has not made it: move it away",
            ),
            error=ClipError,
        )
        check(request, self._generate.model)
        return request

    def work(self) -> Iterator[loop.Step]:
        """Generate the missing videos, here or by actors on Ray; yield the outcome of each."""
        args, generate = self._args, self._generate
        if args.ray is None:
            generate.load(devices.ProcessGroup(devices.mesh_of(args)), self._begun)
            return loop.work(
                jobs=self.missing,
                read=self.missing.__getitem__,
                compute=generate,
                write=lambda *_: None,  # the generator has written the video
                refuse=self._refuse,
            )
        from cogvideox_torchax.dataset import ray

        rows = [
            {"id": name, "request": json.dumps(asdict(request) | {"output": os.path.abspath(request.output)})}
            for name, request in self.missing.items()
        ]
        arguments = (args, generate.model, generate.request)
        chips = args.dp * args.tp
        return ray.dealt(
            rows, PromptActor, arguments, chips, self._refuse, args.ray or None, actors=args.actors
        )

    def _refuse(self, video_id: str, reason: str) -> None:
        self.refuse(video_id, f"line {self._line_of[video_id]}: {reason}")


def _id(number: int, fields: dict[str, Any], copy: int) -> str:
    """Return the id of a line's video number `copy`, counted from 0 on."""
    name = fields.get("id", f"{number:05}")
    return f"{name}-{copy + 1}" if copy else name


class PromptActor:
    """An actor on a Ray host: it holds a pipeline on the host's devices, and makes one video at a time."""

    def __init__(self, args: argparse.Namespace, model: description.Model, defaults: Request):
        self._generate = Generator(args, model, defaults)
        self._generate.load(devices.ProcessGroup(devices.mesh_of(args)), Stage.NOTHING)

    def __call__(self, row: dict[str, str]) -> dict[str, Any]:
        """Make the video of a row's "request", unless an actor that died has made it."""
        _, reason = loop.attempt(self._generate, Request(**json.loads(row["request"])), loop.COMPUTING_ERRORS)
        return {"id": row["id"], "error": reason or ""}
