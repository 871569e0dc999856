"""`generate --prompts`: a video `ID.mp4` and a record `ID.json` for each line of a file, in a directory.

Of a video's two files the record is put in place first, so a video that is there has its record. A video is
done if its record has the request of its line: a run may be killed at any time, and the same command goes on.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import batch, common, devices, generation, stages
from cogvideox_torchax.dataset import loop, sources
from cogvideox_torchax.dataset.directory import OutputDirectory, ProcessShard
from cogvideox_torchax.dataset.names import ClipError, check_file
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.pipelines import description
from cogvideox_torchax.versions import TESTED, versions

FORMAT = "cogvideox-torchax-prompt/1"
FIELDS: dict[str, type] = {
    **dict.fromkeys(("prompt", "negative_prompt", "image", "video", "id"), str),
    **{"seed": int, "steps": int, "guidance_scale": float},
}
"""Fields that a line of a .jsonl file may have, and their types."""
SEEDS = 1000
"""Seeds that belong to a line; also the most videos of one prompt."""
ENCODED, GROUP = 8, 256
"""Texts in one call of the text encoder; videos whose texts are encoded before the first of them is made."""


def run(args: argparse.Namespace) -> int:
    """Generate the videos that the output directory lacks; return 1 if some cannot be generated, else 0."""
    batch.check_output_directory(args.output, "video")
    common.parse_dtype(args.dtype or "bfloat16")
    lines = list(_lines(Path(args.prompts)))
    if not lines:
        raise ValueError(f"{args.prompts} has no prompts: write one on each line")
    image, clip = (
        getattr(args, name) is not None or any(name in line for _, line in lines)
        for name in ("image", "video")
    )
    model = description.describe(args.model, image=image, clip=clip)
    defaults = stages.request_from_options({**vars(args), "prompt": ""}, model.size, None)
    with devices.share_of_this_process(args) as share:
        directory = PromptDirectory(args, model, defaults, lines, share)
        with directory.locked():
            steps = iter(())
            if directory.missing:
                load = generation.prepared(args, model, defaults)
                if args.ray is None:
                    steps = directory.work(Generator(args, model, load(devices.mesh_of(args))))
                else:
                    steps = directory.work_on_ray((args, model, defaults))
            report = batch.run_loop(args, steps, directory, unit="video")
    for name, reason in directory.bad.items():
        common.say(f"bad: {name}: {reason}")
    return batch.print_report(args, report, directory, "video")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each line; those of a bad line are {"error": the reason}."""
    for number, line in sources.lines(path):
        try:
            fields = sources.fields_of(line, path, "prompt", FIELDS, "prompt")
        except ClipError as error:
            fields = {"error": str(error)}
        yield number, fields


class PromptDirectory(OutputDirectory):
    """A directory of videos and their records. The method `work` generates the videos that are missing.

    Args:
        args: the options.
        model: the pipeline.
        defaults: the request of a line that has a prompt alone, but for its prompt and its seed.
        lines: number and fields of each line of the file, for all processes.
        shard: the share of this process.
    """

    FAILED, SETTINGS = "failed-prompts.jsonl", "prompts.json"

    def __init__(
        self,
        args: argparse.Namespace,
        model: description.Model,
        defaults: stages.Request,
        lines: list[tuple[int, dict[str, Any]]],
        shard: ProcessShard,
    ):
        super().__init__(args.output, shard, retry=args.retry_failed)
        options = ("scheduler", "lora", "lora_scale", "cache", "tiling")
        settings = {
            **{name: value for name, value in asdict(defaults).items() if name != "prompt"},
            **{name: getattr(args, name) for name in options},
            **{"fps": str(args.fps), "model": model.name, "model_configs": model.fingerprint},
        }
        self._args, self._model = args, model
        self._defaults = defaults
        self._line_of: dict[str, int] = {}  # by a video's id
        ids = [fields.get("id", f"{number:05}") for number, fields in lines]
        paths = {self.path(name) for name in ids}
        taken = {Path(self.SETTINGS).stem: "the settings' file"}  # by id, what has it
        for index, ((number, fields), name) in enumerate(zip(lines, ids, strict=True)):
            is_own = index % shard.count == shard.index
            for copy in range(args.num_videos_per_prompt or 1):
                video_id = f"{name}-{copy + 1}" if copy else name
                owner = taken.setdefault(video_id, f"line {number}")
                if is_own:
                    try:
                        if owner != f"line {number}":
                            raise ClipError(f"its id {video_id} is that of {owner}: give it another")
                        request = self._request(number, fields, copy)
                        check_file(video_id, self.path(video_id), self.directory, paths)
                    except (ValueError, OSError) as error:
                        self.bad[f"line {number}"] = str(error)
                        break
                    self._line_of[video_id] = number
                    self.add(video_id, self.path(video_id), request)
        self.save_or_check_settings(settings)  # nothing has been written before

    def _request(self, number: int, fields: dict[str, Any], copy: int) -> stages.Request:
        """Return the request of a line's video number `copy`, after its checks."""
        if "error" in fields:
            raise ClipError(fields["error"])
        own = {"num_inference_steps" if name == "steps" else name: value for name, value in fields.items()}
        own.pop("id", None)
        for name in own.keys() & {"image", "video"}:  # paths are relative to the file
            own[name] = os.path.abspath(Path(self._args.prompts).parent / own[name])
        own["seed"] = own.get("seed", self._defaults.seed + SEEDS * (number - 1)) + copy
        request = replace(self._defaults, **own)
        kinds = {description.IMAGE: ("image",), description.TEXT: ()}
        for name in kinds.get(self._model.kind, ("video",)):
            if getattr(request, name) is None:
                raise ClipError(f"it has no {name}, which {self._model.name} or another line needs")
        if request.seed >= 2**64:
            raise ClipError(f"got the seed {request.seed}: at most {2**64 - 1}")
        if self._args.cache and {"steps", "guidance_scale"} & fields.keys():
            raise ClipError(
                "got steps or guidance_scale with --cache, which is set for all lines: leave them out"
            )
        generation.check(request, self._model)
        return request

    def path(self, video_id: str) -> Path:
        return self.directory / f"{video_id}.mp4"

    def add(self, clip_id: str, path: Path, source: stages.Request) -> None:
        """Count a video as done if its record has the request, else as missing; see `OutputDirectory.add`.

        `ClipError` for a video without a record, which is of somebody else.
        """
        record = path.with_suffix(".json")
        if path.exists() and self._settings.exists() and not record.exists():
            self.bad[clip_id] = f"{path} has no record, so this command has not made it: move it away"
        elif path.exists() and self._settings.exists() and not _fits(record, source):
            self.missing[clip_id] = source
        else:
            super().add(clip_id, path, source)

    def work(self, generate: "Generator") -> Iterator[loop.Step]:
        """Generate the missing videos; yield the outcome of each, whose result is its number of frames."""
        names = iter(self.missing)
        while group := list(itertools.islice(names, GROUP)):
            generate.encode(self.missing[name] for name in group)
            yield from loop.work(
                jobs=group,
                read=lambda name: name,
                compute=lambda name: generate(self.missing[name], self.path(name)),
                write=lambda *_: None,  # `generate` has written the video
                refuse=self._refuse,
            )

    def work_on_ray(self, arguments: tuple[Any, ...]) -> Iterator[loop.Step]:
        """Do what `work` does by the actors of a Ray cluster, of the class `PromptActor` with `arguments`."""
        from cogvideox_torchax.dataset import ray

        rows = [
            {"id": name, "request": json.dumps(asdict(request)), "path": str(self.path(name).absolute())}
            for name, request in self.missing.items()
        ]
        chips = self._args.dp * self._args.tp
        address, actors = self._args.ray or None, self._args.actors
        return ray.dealt(rows, PromptActor, arguments, chips, self._refuse, address, actors=actors)

    def _refuse(self, video_id: str, reason: str) -> None:
        self.refuse(video_id, f"line {self._line_of[video_id]}: {reason}")


def _fits(record: Path, request: stages.Request) -> bool:
    """Return whether a record is that of a request."""
    try:
        return reports.load(record, FORMAT).get("request") == asdict(request)
    except ValueError:
        return False


class Generator:
    """A loaded pipeline that makes the videos of requests; the texts are encoded before, in batches."""

    def __init__(self, args: argparse.Namespace, model: description.Model, pipe: Any):
        self._args, self._model, self._pipe = args, model, pipe
        self._embeddings: dict[str, torch.Tensor] = {}  # (1, tokens, channels) by text, on the host

    def encode(self, requests: Iterable[stages.Request]) -> None:
        """Encode the texts of requests, and forget those of earlier ones."""
        texts = dict.fromkeys(text for each in requests for text in _texts(each).values() if text is not None)
        missing = [text for text in texts if text not in self._embeddings]
        self._embeddings = {text: found for text, found in self._embeddings.items() if text in texts}
        for start in range(0, len(missing), ENCODED):
            some = missing[start : start + ENCODED]
            # Always as many: one program, and the same bytes whatever prompts a process encodes together.
            with torch.no_grad():
                encoded, _ = self._pipe.encode_prompt(
                    some + [""] * (ENCODED - len(some)),
                    do_classifier_free_guidance=False,
                    max_sequence_length=self._model.transformer["max_text_seq_length"],
                )
            self._embeddings |= zip(some, runtime.to_torch(encoded).split(1), strict=False)

    def __call__(self, request: stages.Request, path: Path) -> int:
        """Write a request's video and its record; return the number of frames."""
        began = time.perf_counter()
        found = {
            name: None if text is None else self._embeddings[text] for name, text in _texts(request).items()
        }
        latents = generation.sample(self._pipe, self._model, request, found, self._args.fps)
        path.parent.mkdir(parents=True, exist_ok=True)
        with video.writing(path, self._args.fps) as sink:
            frames = common.decode_to(sink, self._pipe.vae, latents, self._args)
            # A video of an earlier request goes first: beside the new record it would count as its video.
            path.unlink(missing_ok=True)
            record = {
                "format": FORMAT,
                "prompt": request.prompt,
                "seed": request.seed,
                "request": asdict(request),
                "model": self._model.name,
                "versions": versions(*TESTED),
                "frames": frames,
                "fps": str(self._args.fps),
                "seconds": time.perf_counter() - began,
            }
            reports.write_json(path.with_suffix(".json"), record)
        return frames


class PromptActor:
    """An actor on a Ray host: it holds a pipeline on the host's devices, and makes one video at a time."""

    def __init__(self, args: argparse.Namespace, model: description.Model, defaults: stages.Request):
        pipe = generation.prepared(args, model, defaults)(devices.mesh_of(args))
        self._generate = Generator(args, model, pipe)

    def __call__(self, row: dict[str, str]) -> dict[str, Any]:
        """Make the video of a row's "request" at its "path"; the result is its number of frames."""
        request, path = stages.Request(**json.loads(row["request"])), Path(row["path"])

        def make(request: stages.Request) -> int:
            if path.exists() and _fits(path.with_suffix(".json"), request):
                return 0  # an actor has written it, and died before it could return
            self._generate.encode([request])
            return self._generate(request, path)

        frames, reason = loop.attempt(make, request, loop.COMPUTING_ERRORS)
        return {"id": row["id"], "result": json.dumps(frames), "error": reason or ""}


def _texts(request: stages.Request) -> dict[str, str | None]:
    """Return a request's texts by the pipeline's argument for their embeddings; None without guidance."""
    negative = request.negative_prompt if request.guidance_scale > 1 else None
    return {"prompt_embeds": request.prompt, "negative_prompt_embeds": negative}
