"""A video from its request to its files: what it depends on, and its stages, each a file.

What a user passes is checked against the model's configs before any weight is loaded. A video's *stages* are
its text, its latents and the video itself. A run goes on from the last one that is there.
"""

import argparse
import contextlib
import enum
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cogvideox_torchax.cli import common, devices, preview
from cogvideox_torchax.files import faults, latents as latent_files, reports, video, whole
from cogvideox_torchax.files.models import locate_file
from cogvideox_torchax.pipelines import cache_options
from cogvideox_torchax.pipelines.description import (
    CLASSES,
    CONTROL,
    IMAGE,
    TEXT,
    VIDEO,
    Model,
    RequestError,
    check_inputs,
    check_size,
)
from cogvideox_torchax.runtime import to_torch
from cogvideox_torchax.vae import memory
from cogvideox_torchax.versions import TESTED, versions

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The name under which diffusers saves a LoRA."""
FORMAT, KEY = "cogvideox-torchax-video/1", "request"
"""The format of a record, and the key, there and in a stage's file under `about`, of what it depends on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to generate a video.

    Attributes:
        prompt: text that the video shall follow.
        negative_prompt: text that guidance leads away from; "" for none.
        image, video: paths of an image or a clip that conditions the video, or None.
        frames, height, width: size of the video, in frames and pixels.
        num_inference_steps: denoising steps.
        guidance_scale: scale of classifier-free guidance; 1 or less for none.
        strength: share of the steps, and so of the noise, that an input video goes through.
        seed: seed of the noise.
        dtype: name of the dtype of weights and latents.
        output: path of the video.
    """

    prompt: str
    negative_prompt: str = ""
    image: str | None = None
    video: str | None = None
    frames: int
    height: int
    width: int
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    strength: float = 0.8
    seed: int = 0
    dtype: str = "bfloat16"
    output: str

    def file(self, stage: "Stage") -> Path:
        """Return the path of a stage's file beside the video; of the video that of its record."""
        return Path(self.output).with_suffix(SUFFIXES[stage])


def request_of(args: argparse.Namespace, model: Model) -> Request:
    """Return the request of a command line's options, completed by defaults; "" is that of the prompt."""
    defaults = {"prompt": "", **dict(zip(("frames", "height", "width"), model.size, strict=True))}
    given = {each.name: getattr(args, each.name) for each in fields(Request)}
    return Request(**defaults | {name: value for name, value in given.items() if value is not None})


def check(request: Request, model: Model) -> None:
    """Raise an error unless the model can serve the request, and the request's image and clip can be read.

    Raises:
        ValueError: mostly a `RequestError`; the message says what the model takes.
        VideoError: an image or a clip that cannot be read.
    """
    check_inputs(model, image=request.image is not None, clip=request.video is not None)
    check_size(model, request.frames, request.height, request.width)
    tokenizer, limit = _tokenizer(model.directory / "tokenizer"), model.transformer["max_text_seq_length"]
    texts = {"--prompt": request.prompt, "--negative-prompt": request.negative_prompt}
    counts = {name: len(tokenizer(text).input_ids) for name, text in texts.items()}
    steps, scale, strength = request.num_inference_steps, request.guidance_scale, request.strength
    faults.refuse(
        (not request.prompt.strip(), "got an empty prompt: say what to show"),
        (not math.isfinite(scale), f"got --guidance-scale {scale}: give a number such as 6"),
        (
            request.negative_prompt and scale <= 1,
            f"got --negative-prompt with --guidance-scale {scale}, which does not use it: leave it out, or "
            "give a scale above 1",
        ),
        *(
            (count > limit, f"got a {name} of {count} tokens: {model.name} takes {limit}; shorten it")
            for name, count in counts.items()  # the pipelines would cut it
        ),
        (
            steps_of(request, model) < 1,
            f"got --strength {strength} with --num-inference-steps {steps}: no step is left of {steps} x "
            f"{strength}; give more of either",
        ),
        error=RequestError,
    )
    if request.image is not None:
        video.read_image(request.image)  # only for its error: the image is read again when it is used
    if request.video is not None:
        count = video.probe(request.video, request.frames).num_frames
        if count < request.frames:
            raise RequestError(
                f"{request.video} has {count} frames, {request.frames} are wanted: pass --frames"
            )


def steps_of(request: Request, model: Model) -> int:
    """Return the number of denoising steps that run: of a `VIDEO` pipeline the share `strength`, else all."""
    return (
        int(request.num_inference_steps * request.strength)
        if model.kind == VIDEO
        else request.num_inference_steps
    )


@functools.lru_cache(1)  # many prompts are checked by one
def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Raise a `RequestError` of one line for an error in the `with` block, where diffusers loads `name`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        # Messages of diffusers may have many lines: one line with their beginning is enough.
        raise RequestError(f"cannot load {name}: {' '.join(str(error).split())[:300]}") from error


def scheduler_of(choice: str, model: Model) -> Any:
    """Return a scheduler of diffusers', made of the config of the model's own scheduler.

    `choice` is a class's name, alone or with settings: `CogVideoXDPMScheduler:timestep_spacing=trailing`.

    Raises:
        RequestError: no such class that is a scheduler for CogVideoX, or no such setting; the message has the
            names that there are.
    """
    import diffusers

    own = getattr(diffusers, model.scheduler["_class_name"]).from_config(model.scheduler)
    # diffusers' list of compatible classes lacks those that were made for CogVideoX.
    compatible = (kind.__name__ for kind in own.compatibles)
    classes = {"CogVideoXDDIMScheduler", "CogVideoXDPMScheduler", *compatible}
    name, _, text = choice.partition(":")
    settings = {key: value for key, _, value in (each.partition("=") for each in text.split(",")) if key}
    kind = getattr(diffusers, name) if name in classes else type(own)
    known = {key for key in kind.from_config(own.config).config if not key.startswith("_")}
    for got, names in ((name, classes), *((key, known) for key in settings)):
        if got not in names:
            raise RequestError(
                f"got --scheduler {choice}: for CogVideoX there is no {got}, but {', '.join(sorted(names))}"
            )
    with _loading(f"the scheduler {choice}"):
        scheduler = kind.from_config(own.config, **{key: _value(text) for key, text in settings.items()})
        scheduler.set_timesteps(2)  # for its error
    return scheduler


def _value(text: str) -> Any:
    """Return the value that a setting's text has in JSON, such as a number or true; else the text."""
    try:
        return reports.parse(text)
    except ValueError:
        return text


def _lora(name: str, model: Model) -> tuple[Path, str]:
    """Return the file of a LoRA for a model's transformer, and a hash of it; `name` is as in `locate_file`.

    Raises:
        RequestError: the file cannot be read, or has no weights for the transformer.
        ModelError: there is no such file.
    """
    import diffusers

    path = locate_file(name, LORA_FILE)
    with _loading(f"the LoRA {name}"):
        weights = getattr(diffusers, CLASSES[model.kind]).lora_state_dict(path, use_safetensors=True)
    # diffusers would only log a warning, and generate without the LoRA.
    if not any(key.startswith("transformer.") and "lora" in key for key in weights):
        raise RequestError(
            f"cannot load the LoRA {name}: none of its weights is one of a LoRA for CogVideoX's transformer, "
            "as diffusers names them, such as transformer.transformer_blocks.0.attn1.to_q.lora_A.weight"
        )
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


class Stage(enum.IntEnum):
    """The stages of a video: nothing, the embeddings of its prompts, its latents, and all."""

    NOTHING, TEXT, LATENTS, VIDEO = range(4)


SUFFIXES = {Stage.TEXT: ".text.safetensors", Stage.LATENTS: ".latents.safetensors", Stage.VIDEO: ".json"}
"""Suffixes of the files beside a video, in place of its own: of its stages, and of its record."""
OF_TEXT = ("prompt", "negative_prompt", "guided", "dtype", "weights", "model_sha256")
"""What the embeddings of the prompts depend on, of all that a video depends on."""
OF_VIDEO = ("tiling", "fps", "output")
"""What the latents do not depend on."""


def _request_in(file: Path) -> Any:
    """Return what a record or the file of a stage depends on."""
    try:
        if file.suffix == ".json":
            return reports.load(file, FORMAT)[KEY]
        return reports.parse(latent_files.load_metadata(file)[latent_files.KEY])["about"][KEY]
    except (KeyError, TypeError, ValueError) as error:
        raise whole.OutputError(f"{file} is broken, or not of this command: move it away") from error


class Generator:
    """A pipeline and its options, which are checked when it is made. It is loaded by `load`, and then called.

    Args:
        args: the options.
        model: the model, as `describe` returns it.
        request: its dtype is that of all weights, and a cache is made for its steps.

    Attributes:
        until: the stage to make.
        settings: what videos depend on besides their requests, as JSON's values.

    Raises:
        ValueError: mostly a `RequestError`, now, or as the pipeline or its LoRA is loaded.
    """

    def __init__(self, args: argparse.Namespace, model: Model, request: Request):
        self._args, self.model, self.request = args, model, request
        self.until = Stage[args.until.upper()]
        memory.check_tiling(args.tiling, model.spatial_compression_ratio)
        self._cache_config = functools.partial(
            cache_options.config_of,
            args.cache,
            steps=steps_of(request, model),
            guided=request.guidance_scale > 1,  # a scale of 1 or less is no guidance
        )
        if args.cache:
            self._cache_config()  # for its error
        self._scheduler = scheduler_of(args.scheduler, model) if args.scheduler else None
        self._lora, lora_sha256 = _lora(args.lora, model) if args.lora else (None, None)
        self._lora_scale = 1.0 if args.lora_scale is None else args.lora_scale
        self.settings = {
            "model_sha256": model.sha256(),
            "weights": args.weights,
            "scheduler": args.scheduler,
            "lora_sha256": lora_sha256,
            "lora_scale": self._lora_scale if args.lora else None,
            "cache": args.cache and cache_options.with_contents(args.cache),
            "tiling": args.tiling,
            "fps": str(args.fps),
        }

    def depends_on(self, request: Request, stage: Stage = Stage.VIDEO) -> dict[str, Any]:
        """Return what a stage of a video depends on, as JSON's values; a hash stands for an image."""
        guided, name = request.guidance_scale > 1, Path(request.output).name
        found = {**asdict(request), "guided": guided, **self.settings, "output": name}
        found |= {
            name: hashlib.sha256(Path(found[name]).read_bytes()).hexdigest()
            for name in ("image", "video")
            if found[name]
        }
        left_out = {Stage.TEXT: found.keys() - OF_TEXT, Stage.LATENTS: OF_VIDEO, Stage.VIDEO: ()}[stage]
        return {name: value for name, value in found.items() if name not in left_out}

    def made(self, request: Request) -> Stage:
        """Return the last stage that is there; `OutputError` for a file that this command has not written."""
        fitting = [
            stage
            for stage in SUFFIXES
            if request.file(stage).exists()
            and _request_in(request.file(stage)) == self.depends_on(request, stage)
            # A killed run may leave the record alone.
            and (stage != Stage.VIDEO or Path(request.output).exists())
        ]
        return max(fitting, default=Stage.NOTHING)

    def load(self, group: devices.ProcessGroup, begun: Stage) -> None:
        """Load as much of the pipeline as videos need of which the stage `begun` is there.

        `group` has the processes that make a video together, and their mesh.
        """
        import diffusers

        from cogvideox_torchax.pipelines.loading import load_pipeline

        args, name, dtype = self._args, self.model.name, self.request.dtype
        self._group = group
        self._show: Callable[[torch.Tensor], None] | None = None
        if begun == Stage.LATENTS:
            self._vae = common.load_vae(name, "torchax", dtype, group.mesh)
            return
        # diffusers does not load a component that is passed as an object or as None.
        parts: dict[str, Any] = {
            **({"scheduler": self._scheduler} if self._scheduler else {}),
            **({"text_encoder": None, "tokenizer": None} if begun == Stage.TEXT else {}),
            **({"transformer": None, "vae": None} if self.until == Stage.TEXT else {}),
        }
        if self._lora and self.until > Stage.TEXT:
            parts["transformer"] = self._with_lora()
        with _loading(name):
            self._pipe: Any = load_pipeline(
                name,
                pipeline_class=getattr(diffusers, CLASSES[self.model.kind]),
                mesh=group.mesh,
                weights=args.weights,
                offload=args.offload,
                dtype=getattr(torch, dtype),
                **parts,
            )
        if self.until == Stage.TEXT:
            return
        if args.cache:
            config = self._cache_config(timestep=lambda: self._pipe.current_timestep)
            self._pipe.transformer.enable_cache(config)
        self._pipe.set_progress_bar_config(disable=args.quiet, desc="denoise", leave=False)
        self._vae = self._pipe.vae
        if args.preview:
            self._show = (
                preview.preview_writer(self._vae, args.preview, common.say)
                if group.is_first
                else lambda _: None  # the other processes make the same calls
            )

    def _with_lora(self) -> Any:
        """Return the transformer in PyTorch, the LoRA added to its weights before they are rounded."""
        import diffusers
        from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel

        kind = getattr(diffusers, CLASSES[self.model.kind])
        with _loading(f"the LoRA {self._lora}"):
            transformer: Any = CogVideoXTransformer3DModel.from_pretrained(
                self.model.name, subfolder="transformer", torch_dtype=getattr(torch, self.request.dtype)
            )
            weights, metadata = kind.lora_state_dict(
                self._lora, use_safetensors=True, return_lora_metadata=True
            )
            kind.load_lora_into_transformer(weights, transformer, adapter_name="lora", metadata=metadata)
            transformer.fuse_lora(self._lora_scale)
            transformer.unload_lora()
        return transformer

    def __call__(self, request: Request) -> None:
        """Make a video, or its stages up to `--until`, from the last stage that is there."""
        made = self.made(request)
        if made >= self.until:
            return
        Path(request.output).parent.mkdir(parents=True, exist_ok=True)
        if made == Stage.LATENTS:
            latents = latent_files.load(request.file(Stage.LATENTS))
        else:
            file = request.file(Stage.TEXT)
            text = self._encode(request) if made == Stage.NOTHING else latent_files.load_tensors(file)[1]
            if self.until == Stage.TEXT:
                self._save(request, Stage.TEXT, text, {})
                return
            latents = self._sample(request, text)
            self._save(request, Stage.LATENTS, latents.tensors, latents.fields)
        if self.until == Stage.VIDEO:
            self._decode(request, latents)

    def _save(
        self, request: Request, stage: Stage, content: dict[str, torch.Tensor], fields: dict[str, Any]
    ) -> None:
        """Write a stage's file, in the form of latent files: so one of latents is one."""
        if self._group.is_first:
            about = {KEY: self.depends_on(request, stage)}
            latent_files.save_tensors(content, fields | {"about": about}, request.file(stage))

    def _encode(self, request: Request) -> dict[str, torch.Tensor]:
        """Return the embeddings (1, tokens, channels) of the prompts by the pipeline's argument names.

        Without guidance there are none of the negative prompt.
        """
        with torch.no_grad():
            embeddings = self._pipe.encode_prompt(
                request.prompt,
                request.negative_prompt,
                do_classifier_free_guidance=request.guidance_scale > 1,
                max_sequence_length=self.model.transformer["max_text_seq_length"],
            )
        names = ("prompt_embeds", "negative_prompt_embeds")
        return {name: each for name, each in zip(names, embeddings, strict=True) if each is not None}

    def _sample(self, request: Request, text: dict[str, torch.Tensor]) -> latent_files.Latents:
        """Return the latents of a request, as the content of a latent file."""

        def unscaled_on_host(latents: torch.Tensor) -> torch.Tensor:
            return 1 / self.model.vae["scaling_factor"] * to_torch(latents)

        def show_step(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            if self._show is not None:
                self._show(unscaled_on_host(kwargs["latents"]))
            return {}  # the pipeline replaces its variables by those in this dictionary: by none

        sampled = self._pipe(
            height=request.height,
            width=request.width,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            **_inputs(request, self.model.kind),
            **text,
            callback_on_step_end=show_step if self._show else None,
            output_type="latent",
        ).frames  # (1, T, C, H, W)
        if self._args.cache and self._group.is_first:
            # As text, the cache is the number of steps that it has skipped.
            common.say(f"--cache {self._args.cache}: {self._pipe.transformer.step_cache}")
        # To get whole patches, the pipelines pad the latents before the first frame: the padding is cut off.
        padding = sampled.shape[1] - self.model.latent_frames(request.frames)
        return latent_files.Latents(
            # A latent file has (1, C, T, H, W), the channels before the frames.
            tensor=unscaled_on_host(sampled)[:, padding:].permute(0, 2, 1, 3, 4).contiguous(),
            config=dict(self._vae.config),
            model=self.model.name,
            fps=self._args.fps,
            num_frames=request.frames,
        )

    def _decode(self, request: Request, latents: latent_files.Latents) -> None:
        """Write a video and its record."""
        with self._group.writing(request.output, self._args.fps) as write:
            frames = common.decode_to(write, self._vae, latents, self._args)
            if not self._group.is_first:
                return
            # The record comes before its video, which a killed run may leave out. An earlier request's video
            # goes before both: beside the new record it would be taken for its video.
            if Path(request.output).is_file():
                whole.resolved(request.output).unlink()
            record = {
                "format": FORMAT,
                KEY: self.depends_on(request),
                "names": {  # for people: what the video depends on is above
                    **{"model": self.model.name, "lora": self._args.lora},
                    **{"image": request.image, "video": request.video},
                },
                "versions": versions(*TESTED),
                "frames": frames,
            }
            reports.write_json(request.file(Stage.VIDEO), record)


def _inputs(request: Request, kind: str) -> dict[str, Any]:
    """Return the arguments of the call of a kind of pipeline, which other kinds do not have."""
    from PIL import Image

    def clip() -> list[Any]:
        framing = video.Framing(request.height, request.width)
        frames = video.Video(str(request.video)).frames(at_most=request.frames)
        # A frame is (1, 3, H, W) bytes, an image's array (H, W, 3).
        return [Image.fromarray(video.framed(each, framing)[0].movedim(0, -1).numpy()) for _, each in frames]

    return {
        TEXT: lambda: {"num_frames": request.frames},
        IMAGE: lambda: {"num_frames": request.frames, "image": video.read_image(str(request.image))},
        VIDEO: lambda: {"video": clip(), "strength": request.strength},
        CONTROL: lambda: {"control_video": clip()},
    }[kind]()
