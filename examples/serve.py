"""Serve a pipeline: prompts come over HTTP, wait in a queue, and become videos, one after the other.

    python examples/serve.py                                    # the small bundled pipeline, on any computer
    python examples/serve.py --model zai-org/CogVideoX-5b --sizes 49x480x720

When it prints "ready", open http://127.0.0.1:8000 in a browser, or send requests of OpenAI's video API, which
its clients send too (`OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=...)`):

    POST /v1/videos {"prompt": "A cat walks."}    returns the video's id and its state
    GET /v1/videos                                all videos
    GET /v1/videos/ID                             its state, its step, and how many videos come before it
    GET /v1/videos/ID/content                     the video's file
    DELETE /v1/videos/ID                          takes it from the queue, stops it, or deletes its file
    GET /health                                   answers as soon as the server is ready

A POST has a body in JSON or in multipart/form-data, with the fields of `Wanted`. The size is one of --sizes,
which are all compiled before the server listens, or WIDTHxHEIGHT of one of them. "seconds" are rounded.
Errors have OpenAI's form at every address.

A video that is cancelled stops before its next denoising step; the VAE's decoding is not interrupted. The
server listens on the loopback interface unless --host changes it, and refuses what pages of other sites send.
There are no users: anyone who reaches the port may use it. But if the environment variable
COGVIDEOX_TORCHAX_TOKEN is set, every address but / and /health needs "Authorization: Bearer TOKEN", a header
for which the page asks.
"""

import argparse
import asyncio
import contextlib
import copy
import json
import logging
import os
import re
import reprlib
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import same_site
import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from cogvideox_torchax import Bucket, check_size, describe, load_pipeline, make_mesh, save_video

log = logging.getLogger(__name__)

KEPT = 16
"""Number of finished videos that are kept: a new request deletes the oldest ones."""

UNFINISHED = "queued", "running"

LARGEST = 100_000
"""Most bytes of a request's body."""

PATIENCE = 60.0
"""Seconds that a request's body may take to come."""

TINY_PIPELINE = files("cogvideox_torchax") / "assets" / "tiny-pipeline"
TINY_PROMPT = "a red circle moves to the left on a blue background"
TINY_SAMPLING = {"num_inference_steps": 20, "guidance_scale": 1.5}
"""The bundled pipeline, one of the prompts that it knows, and how its videos are best."""

SAMPLING = {"num_inference_steps": 50}
"""How a pipeline samples."""

SHUTDOWN = 5
"""Seconds that a server that ends waits for requests; a running video is stopped after its step."""

STATUS = {"queued": "queued", "running": "in_progress", "done": "completed"}
"""OpenAI's word for the state of a video that has not failed."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>A prompt to a video</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
  textarea, progress, video { display: block; margin: .5rem 0; width: 100% }
  output { color: #555 }
</style>
<h1>A prompt to a video</h1>
<form id="form">
  <textarea id="prompt" rows="3" aria-label="Prompt" required></textarea>
  <label>Size: <select id="size">SIZES</select></label>
  <label>Steps: <input id="steps" type="number" value="STEPS" min="1" max="1000"></label>
  <label>Seed: <input id="seed" type="number" value="0" min="0"></label>
  <button id="start">Generate</button>
  <button id="cancel" type="button" disabled>Cancel</button>
</form>
<progress id="bar" value="0"></progress>
<output id="said"></output>
<video id="video" controls loop></video>
<script>
  const at = name => document.getElementById(name);
  let mine = null;  // the address of the video that this page waits for
  let token = "";
  async function ask(address, options) {
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
    const answer = await fetch(address, { ...options, headers });
    if (answer.ok) return answer;
    if (answer.status === 401 && (token = window.prompt("The server's token"))) return ask(address, options);
    throw (await answer.json()).error.message;
  }
  function show(text, address) {
    mine = address;
    at("said").textContent = text;
    at("start").disabled = mine !== null;
    at("cancel").disabled = mine === null;
  }
  async function follow(address) {
    while (mine === address) {
      const video = await (await ask(address)).json();
      if (mine !== address) return;
      at("bar").max = video.steps;
      at("bar").value = video.step;
      if (video.status === "completed") {
        at("video").src = URL.createObjectURL(await (await ask(`${address}/content`)).blob());
        return show("done", null);
      }
      if (video.status === "failed") return show(video.error.message, null);
      const step = `step ${video.step} of ${video.steps}`;
      show(video.status === "queued" ? `${video.ahead} before it` : step, address);
      await new Promise(resolve => setTimeout(resolve, 300));
    }
  }
  async function generate() {
    const wanted = {};  // of texts: a number of JavaScript keeps 53 bits of a seed
    for (const name of ["prompt", "size", "steps", "seed"]) wanted[name] = at(name).value;
    const made = await (await ask("/v1/videos", { method: "POST", body: JSON.stringify(wanted) })).json();
    const address = `/v1/videos/${made.id}`;
    show("sent", address);
    await follow(address);
  }
  at("form").addEventListener("submit", event => {
    event.preventDefault();
    generate().catch(error => show(String(error), null));
  });
  function cancel() {
    if (mine !== null) ask(mine, { method: "DELETE", keepalive: true });
    show("cancelled", null);
  }
  at("cancel").addEventListener("click", cancel);
  addEventListener("pagehide", cancel);
</script>
</html>
"""


class Wanted(BaseModel, extra="forbid"):
    """The fields of a request; `size` and `steps` have the server's defaults, and `model` changes nothing."""

    prompt: Annotated[str, Field(min_length=1, max_length=4000)]
    size: str = ""
    seconds: int | None = None
    steps: Annotated[
        int | None, Field(ge=1, le=1000, validation_alias=AliasChoices("steps", "num_inference_steps"))
    ] = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    model: str = ""


FIELDS = ", ".join([*Wanted.model_fields, "num_inference_steps"])


class Cancelled(Exception):
    """Ends a pipeline's call between two steps."""


@dataclass(eq=False)
class Video:
    """A request and its progress; `step` is the number of steps that the device has computed."""

    wanted: Wanted
    size: str
    steps: int
    path: Path
    work: Future[None] = field(default_factory=Future)
    step: int = 0
    error: str = ""
    cancelled: bool = False
    latents: torch.Tensor | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def state(self) -> str:
        if not self.work.done():
            return "running" if self.work.running() else "queued"
        return self.error or "done"

    def on_step_end(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Wait for the step before this one: the device computes a step while the host queues the next."""
        if self.latents is not None:
            self.latents.cpu()
        self.latents, self.step = tensors["latents"], step
        if self.cancelled:
            raise Cancelled
        return {}


def make_app(
    pipe: Any,
    sizes: dict[str, tuple[int, ...]],
    directory: Path,
    limit: int,
    fps: float,
    *,
    token: str = "",
    model: str = "cogvideox",
    host: str = "127.0.0.1",
    sampling: Mapping[str, Any] = SAMPLING,
) -> FastAPI:
    """Return the page and the requests, and the thread that runs the pipeline.

    The event loop's thread answers all requests, and is the only one to change the table of videos.

    Args:
        pipe: a ported text-to-video pipeline.
        sizes: frames, height and width, by the names that requests have for them.
        directory: for the videos' files.
        limit: number of videos that may wait.
        fps: frames a second of the files.
        token: that requests must have; "" for none.
        model: the model's name in answers.
        host: the server's name for requests without a token, besides "localhost".
        sampling: more arguments of the pipeline's call; a request may ask for other steps.
    """
    videos: dict[str, Video] = {}  # by id, in the order in which they came
    thread = ThreadPoolExecutor(max_workers=1)
    tokens = pipe.transformer.config["max_text_seq_length"]
    tokenizer = copy.deepcopy(pipe.tokenizer)  # the thread uses the pipeline's
    offers = {
        name: {"size": f"{width}x{height}", "seconds": str(round(frames / fps))}
        for name, (frames, height, width) in sizes.items()
    }

    def generate(video: Video) -> None:
        frames, height, width = sizes[video.size]
        try:
            made = pipe(
                video.wanted.prompt,
                num_frames=frames,
                height=height,
                width=width,
                generator=torch.Generator("cpu").manual_seed(video.wanted.seed),
                callback_on_step_end=video.on_step_end,
                max_sequence_length=tokens,
                output_type="np",
                **{**sampling, "num_inference_steps": video.steps},
            )
            video.step = video.steps
            save_video(made.frames[0], video.path, fps=fps)
        except Cancelled:
            pass
        except BaseException as error:  # also SystemExit, after which there is no file either
            # Its text may name files of the server, and the exception keeps the arrays of its frames alive.
            log.exception("%s failed", video.path.stem)
            video.error = f"failed: {type(error).__name__}"
        video.latents = None
        if video.cancelled:
            video.path.unlink(missing_ok=True)

    def find(id: str) -> Video:
        if id not in videos:
            raise HTTPException(404, "no such video: it was cancelled, or is too old")
        return videos[id]

    def size_of(wanted: Wanted) -> str:
        for name, its in offers.items():
            if wanted.size in ("", name, its["size"]) and str(wanted.seconds) in ("None", its["seconds"]):
                return name
        offered = ", ".join(
            f"{name} ({its['size']}, {its['seconds']} seconds)" for name, its in offers.items()
        )
        asked = f"the size {reprlib.repr(wanted.size)} with {wanted.seconds or 'any'} seconds"
        raise HTTPException(400, f"got {asked}: this server makes {offered}")

    def enqueue(wanted: Wanted) -> str:
        size, steps = size_of(wanted), wanted.steps or sampling["num_inference_steps"]
        length = len(tokenizer(wanted.prompt).input_ids)
        if length > tokens:  # the pipeline would cut it
            raise HTTPException(400, f"got a prompt of {length} tokens: {model} takes {tokens}; shorten it")
        if sum(video.state == "queued" for video in videos.values()) >= limit:
            raise HTTPException(429, f"{limit} videos are waiting: try again later")
        for id in [id for id, video in videos.items() if video.state not in UNFINISHED][:-KEPT]:
            drop(id)
        id = f"{time.monotonic_ns():020d}-{secrets.token_urlsafe(16)}"  # ids grow
        videos[id] = video = Video(wanted, size, steps, directory / f"{id}.mp4")
        video.work = thread.submit(generate, video)
        return id

    def drop(id: str) -> None:
        video = find(id)
        del videos[id]
        video.cancelled = True
        video.work.cancel()
        video.path.unlink(missing_ok=True)

    def described(id: str) -> dict[str, Any]:
        video, before = find(id), [*videos.values()][: [*videos].index(id)]
        return {
            **{"id": id, "object": "video", "model": model, "created_at": video.created},
            **{"prompt": video.wanted.prompt, **offers[video.size]},
            "status": STATUS.get(video.state, "failed"),
            "progress": 100 * video.step // video.steps,
            **{"step": video.step, "steps": video.steps},
            "ahead": sum(other.state in UNFINISHED for other in before),
            "error": {"code": "generation_failed", "message": video.error} if video.error else None,
        }

    async def check(request: Request) -> None:
        if not token:
            same_site.check(request, host)
        elif request.url.path not in ("/", "/health"):
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), token.encode()):
                text = "a token is needed: send the header Authorization: Bearer TOKEN"
                raise HTTPException(401, text, {"WWW-Authenticate": "Bearer"})

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        for name in sizes:
            print(f"compiling {name}", flush=True)
            generate(warm := Video(Wanted(prompt="warm"), name, 2, directory / "warm.mp4"))
            if warm.error:
                raise RuntimeError(f"{name} {warm.error}")
        print("ready", flush=True)
        yield
        for id in [*videos]:
            drop(id)
        thread.shutdown()

    app = FastAPI(
        lifespan=running, docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check)]
    )

    @app.exception_handler(StarletteHTTPException)
    async def refuse(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return refusal(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = reprlib.repr(("the body", *first["loc"])[-1])[1:-1]
        unknown = f"it is no field; the fields are {FIELDS}"
        text = unknown if first["type"] == "extra_forbidden" else first["msg"]
        return refusal(400, f"{name}: {text}", name)

    @app.get("/")
    async def page() -> HTMLResponse:
        options = "".join(f"<option>{name}</option>" for name in sizes)
        return HTMLResponse(
            PAGE.replace("SIZES", options).replace("STEPS", str(sampling["num_inference_steps"]))
        )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/v1/videos/{id}/content")
    async def content(id: str, variant: Literal["video"] = "video") -> FileResponse:
        video = find(id)
        if video.state != "done":
            raise HTTPException(409, f"no file: the video is {video.state}")
        return FileResponse(video.path, media_type="video/mp4")

    @app.post("/v1/videos")
    async def create(wanted: Annotated[Wanted, Depends(wanted_of)]) -> dict[str, Any]:
        return described(enqueue(wanted))

    @app.get("/v1/videos")
    async def listed(
        limit: Annotated[int, Query(ge=1)] = 20,
        after: Annotated[str, Query(pattern=r"^(\d{20}-.*)?$")] = "",
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        # Ids grow: a page begins where it should, even if the video `after` was deleted.
        ids = [id for id in videos if not after or (id > after if order == "asc" else id < after)]
        ids = ids if order == "asc" else ids[::-1]
        data = [described(id) for id in ids[:limit]]
        last = data[-1]["id"] if data else None
        return {"object": "list", "data": data, "last_id": last, "has_more": len(data) < len(ids)}

    @app.get("/v1/videos/{id}")
    async def retrieve(id: str) -> dict[str, Any]:
        return described(id)

    @app.delete("/v1/videos/{id}")
    async def delete(id: str) -> dict[str, Any]:
        drop(id)
        return {"id": id, "object": "video.deleted", "deleted": True}

    return app


def refusal(
    status: int, message: str, field: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error in OpenAI's form."""
    error = {"message": message, "type": "invalid_request_error", "param": field, "code": None}
    return JSONResponse({"error": error}, status, headers)


async def parts(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield a body as it comes; an error ends one that is larger than `LARGEST`, after its first parts."""
    left = LARGEST
    async for part in request.stream():  # the last part is empty
        if left < 0:
            raise HTTPException(413, f"a body has at most {LARGEST} bytes")
        left -= len(part)
        yield part


async def wanted_of(request: Request) -> Wanted:
    """Read a body in JSON or, as OpenAI's client sends it, in multipart/form-data."""
    headers, body = request.headers, parts(request)
    try:
        async with asyncio.timeout(PATIENCE):
            if headers.get("content-type", "").lower().startswith("multipart/form-data"):
                form = await MultiPartParser(headers, body, max_files=0, max_fields=100).parse()
                fields = dict(form)
            else:
                fields = json.loads(b"".join([part async for part in body]))
        return Wanted.model_validate({k: v for k, v in dict(fields).items() if v is not None})
    except (TimeoutError, ClientDisconnect) as error:
        raise HTTPException(408, f"the body did not come within {PATIENCE} seconds") from error
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    except MultiPartException as error:
        raise HTTPException(400, f"{error.message} A form has no files, such as input_reference") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is neither an object in JSON nor a form: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A page and an HTTP interface that turn prompts into videos.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=str(TINY_PIPELINE), help="a directory or a hub id")
    parser.add_argument("--sizes", nargs="+", help="FRAMESxHEIGHTxWIDTH; None for the model's")
    parser.add_argument("--dp", type=int, default=1, help="mesh: devices for the two passes of guidance")
    parser.add_argument(
        "--tp", type=int, help="mesh: devices for one pass; None for 1, or without guidance for all"
    )
    parser.add_argument("--guidance-scale", type=float, help="1 for none; None for the pipeline's own")
    parser.add_argument("--offload", action="store_true", help="keep weights on the host between uses")
    parser.add_argument("--fps", type=float, default=8, help="frames a second: 8, or 16 for CogVideoX 1.5")
    parser.add_argument("--queue", type=int, default=8, help="videos that may wait")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on")
    parser.add_argument("--port", type=int, default=8000, help="to listen on")
    args = parser.parse_args()
    token = os.environ.get("COGVIDEOX_TORCHAX_TOKEN", "")
    try:
        if not re.fullmatch("[!-~]*", token):
            raise ValueError("COGVIDEOX_TORCHAX_TOKEN has characters that a header cannot have: use ASCII")
        model = describe(args.model, image=False, clip=False)
        sizes = {size: astuple(Bucket.parse(size)) for size in args.sizes or ["x".join(map(str, model.size))]}
        tp = args.tp or (None if (args.guidance_scale or 6) <= 1 else 1)
        mesh = make_mesh(args.dp, tp, heads=model.transformer["num_attention_heads"])
        for size in sizes.values():  # before minutes of loading
            check_size(model, *size)
        pipe = load_pipeline(args.model, mesh=mesh, offload=args.offload)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    pipe.set_progress_bar_config(disable=True)
    guidance = {} if args.guidance_scale is None else {"guidance_scale": args.guidance_scale}
    if bundled := args.model == str(TINY_PIPELINE):
        print(f"the small bundled pipeline knows prompts such as: {TINY_PROMPT}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        app = make_app(
            pipe,
            sizes,
            Path(directory),
            args.queue,
            args.fps,
            token=token,
            model=os.path.basename(os.path.abspath(args.model)),
            host=args.host,
            sampling=(TINY_SAMPLING if bundled else SAMPLING) | guidance,
        )
        uvicorn.run(
            app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=SHUTDOWN
        )


if __name__ == "__main__":
    main()
