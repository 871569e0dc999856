"""Serve a pipeline: prompts come over HTTP, wait in a queue, and become videos, one after the other.

    python examples/serve.py --model zai-org/CogVideoX-5b --sizes 49x480x720

When it prints "ready", open http://127.0.0.1:8000 in a browser, or send requests with bodies in JSON:

    POST /videos {"prompt": "A cat walks."}    returns an id; also takes "size", "steps" and "seed"
    GET /videos/ID                             its state, its step, and how many videos come before it
    GET /videos/ID/file                        the video
    DELETE /videos/ID                          takes it from the queue, stops it, or deletes its file

OpenAI's video API is there too, for its clients (`OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=...)`):
POST /v1/videos with "prompt", "size" (WIDTHxHEIGHT), "seconds" and, beyond OpenAI's fields, "seed" and
"steps"; GET and DELETE /v1/videos/ID, GET /v1/videos/ID/content, and GET /v1/videos. "seconds" are rounded.
GET /health answers as soon as the server is ready.

A request has one of --sizes, which are all compiled before the server listens. A video that is cancelled
stops before its next denoising step; the VAE's decoding is not interrupted. The server listens on the
loopback interface unless --host changes it. There are no users and no passwords: anyone who reaches the port
may use it. But if the environment variable COGVIDEOX_TORCHAX_TOKEN is set, every address but /health refuses
requests without the header "Authorization: Bearer TOKEN", the page's too.
"""

import argparse
import contextlib
import email.policy
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from cogvideox_torchax import load_pipeline, make_mesh, runtime, save_video
from cogvideox_torchax.dataset import Bucket
from cogvideox_torchax.pipelines import description

KEPT = 16
"""Number of finished videos that are kept: a new request deletes the oldest ones."""

UNFINISHED = "queued", "running"

LARGEST = 100_000
"""Most bytes of a request's body."""

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
  <label>Steps: <input id="steps" type="number" value="50" min="1" max="1000"></label>
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
  function show(text, address) {
    mine = address;
    at("said").textContent = text;
    at("start").disabled = mine !== null;
    at("cancel").disabled = mine === null;
  }
  async function follow(address) {
    while (mine === address) {
      const answer = await fetch(address), video = await answer.json();
      if (mine !== address) return;
      if (!answer.ok) return show(video.detail, null);
      at("bar").max = video.steps;
      at("bar").value = video.step;
      if (video.state === "done") at("video").src = `${address}/file`;
      if (!["queued", "running"].includes(video.state)) return show(video.state, null);
      const step = `step ${video.step} of ${video.steps}`;
      show(video.state === "queued" ? `${video.ahead} before it` : step, address);
      await new Promise(resolve => setTimeout(resolve, 300));
    }
  }
  at("form").addEventListener("submit", async event => {
    event.preventDefault();
    const wanted = { steps: +at("steps").value, seed: +at("seed").value };
    for (const name of ["prompt", "size"]) wanted[name] = at(name).value;
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch("/videos", { method: "POST", headers, body: JSON.stringify(wanted) });
    const made = await answer.json();
    if (!answer.ok) return show(JSON.stringify(made.detail), null);
    const address = `/videos/${made.id}`;
    show("sent", address);
    follow(address);
  });
  function cancel() {
    if (mine !== null) fetch(mine, { method: "DELETE", keepalive: true });
    show("cancelled", null);
  }
  at("cancel").addEventListener("click", cancel);
  addEventListener("pagehide", cancel);
</script>
</html>
"""


class Wanted(BaseModel, extra="forbid"):
    """The body of a request; without a size, it gets the server's first."""

    prompt: Annotated[str, Field(min_length=1, max_length=4000)]
    size: str = ""
    steps: Annotated[int, Field(ge=1, le=1000)] = 50
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class Cancelled(Exception):
    """Ends a pipeline's call between two steps."""


@dataclass(eq=False)
class Video:
    """A request and its progress; `step` is the number of steps that the device has computed."""

    wanted: Wanted
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
            runtime.to_torch(self.latents)
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
    token: str = "",
    model: str = "cogvideox",
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
    """
    videos: dict[str, Video] = {}  # by id, in the order in which they came
    thread = ThreadPoolExecutor(max_workers=1)

    def generate(video: Video) -> None:
        frames, height, width = sizes[video.wanted.size]
        try:
            made = pipe(
                video.wanted.prompt,
                num_frames=frames,
                height=height,
                width=width,
                num_inference_steps=video.wanted.steps,
                generator=torch.Generator("cpu").manual_seed(video.wanted.seed),
                callback_on_step_end=video.on_step_end,
                output_type="np",
            )
            video.step = video.wanted.steps
            save_video(made.frames[0], video.path, fps=fps)
        except Cancelled:
            pass
        except Exception as error:  # only its text is kept: an exception keeps the arrays of its frames alive
            video.error = f"failed: {' '.join(str(error).split()) or type(error).__name__}"
        video.latents = None
        if video.cancelled:
            video.path.unlink(missing_ok=True)

    def find(id: str) -> Video:
        if id not in videos:
            raise HTTPException(404, "no such video: it was cancelled, or is too old")
        return videos[id]

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        for name in sizes:
            print(f"compiling {name}", flush=True)
            generate(warm := Video(Wanted(prompt="warm", size=name, steps=2), directory / "warm.mp4"))
            if warm.error:
                raise RuntimeError(f"{name} {warm.error}")
        print("ready", flush=True)
        yield
        for id in [*videos]:
            await cancel(id)
        thread.shutdown()

    app = FastAPI(lifespan=running, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.replace("SIZES", "".join(f"<option>{name}</option>" for name in sizes)))

    @app.post("/videos", status_code=201)
    async def add(wanted: Wanted) -> dict[str, str]:
        wanted.size = wanted.size or next(iter(sizes))
        if wanted.size not in sizes:
            raise HTTPException(422, f"got size {wanted.size}: one of {', '.join(sizes)}")
        if sum(video.state == "queued" for video in videos.values()) >= limit:
            raise HTTPException(429, f"{limit} videos are waiting: try again later")
        for id in [id for id, video in videos.items() if video.state not in UNFINISHED][:-KEPT]:
            await cancel(id)
        id = secrets.token_urlsafe(16)
        videos[id] = video = Video(wanted, directory / f"{id}.mp4")
        video.work = thread.submit(generate, video)
        return {"id": id}

    @app.get("/videos/{id}")
    async def state(id: str) -> dict[str, Any]:
        video, before = find(id), [*videos.values()][: [*videos].index(id)]
        ahead = sum(other.state in UNFINISHED for other in before)
        return {"state": video.state, "step": video.step, "steps": video.wanted.steps, "ahead": ahead}

    @app.get("/videos/{id}/file")
    async def file(id: str) -> FileResponse:
        video = find(id)
        if video.state != "done":
            raise HTTPException(409, f"no file: the video is {video.state}")
        return FileResponse(video.path, media_type="video/mp4")

    @app.delete("/videos/{id}", status_code=204)
    async def cancel(id: str) -> None:
        video = find(id)
        del videos[id]
        video.cancelled = True
        video.work.cancel()
        video.path.unlink(missing_ok=True)

    names = {
        name: {"size": f"{width}x{height}", "seconds": str(round(frames / fps))}
        for name, (frames, height, width) in sizes.items()
    }

    @app.exception_handler(StarletteHTTPException)
    async def refuse(request: Request, error: StarletteHTTPException) -> Response:
        if request.url.path.startswith("/v1/"):
            return refusal(error.status_code, error.detail)
        return await http_exception_handler(request, error)

    @app.middleware("http")
    async def check(request: Request, call_next: Any) -> Response:
        if (
            token
            and request.url.path != "/health"
            and not secrets.compare_digest(
                request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()
            )
        ):
            return refusal(401, "a token is needed: send the header Authorization: Bearer TOKEN")
        # A body without its length could be of any: it would have to be read to be counted.
        if (
            request.headers.get("transfer-encoding")
            or int(request.headers.get("content-length", 0)) > LARGEST
        ):
            return refusal(
                413, f"a body of at most {LARGEST} bytes is taken, and its Content-Length is needed"
            )
        return await call_next(request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    def described(id: str) -> dict[str, Any]:
        video = find(id)
        return {
            **{"id": id, "object": "video", "model": model, "created_at": video.created},
            **{"prompt": video.wanted.prompt, **names[video.wanted.size]},
            "status": STATUS.get(video.state, "failed"),
            "progress": 100 * video.step // video.wanted.steps,
            "error": {"code": "generation_failed", "message": video.error} if video.error else None,
        }

    @app.post("/v1/videos")
    async def create(request: Request) -> dict[str, Any]:
        fields = fields_of(request.headers.get("content-type", ""), await request.body())
        asked = {name: str(fields.pop(name)) for name in ("size", "seconds") if name in fields}
        fitting = [name for name, its in names.items() if asked.items() <= its.items()]
        if not fitting:
            offered = ", ".join(f"size {its['size']} with seconds {its['seconds']}" for its in names.values())
            raise HTTPException(400, f"got {asked}: this server makes {offered}")
        fields.pop("model", None)  # there is one
        try:
            wanted = Wanted(**{**fields, "size": fitting[0]})
        except (TypeError, ValidationError) as error:
            raise HTTPException(400, " ".join(str(error).split())) from error
        return described((await add(wanted))["id"])

    @app.get("/v1/videos")
    async def listed(limit: int = 20, after: str = "", order: str = "desc") -> dict[str, Any]:
        ids = [*videos] if order == "asc" else [*videos][::-1]
        ids = ids[ids.index(after) + 1 :] if after in ids else ids
        data = [described(id) for id in ids[: max(limit, 0)]]
        last = data[-1]["id"] if data else None
        return {"object": "list", "data": data, "last_id": last, "has_more": len(data) < len(ids)}

    app.get("/v1/videos/{id}/content")(file)

    @app.get("/v1/videos/{id}")
    async def retrieve(id: str) -> dict[str, Any]:
        return described(id)

    @app.delete("/v1/videos/{id}")
    async def delete(id: str) -> dict[str, Any]:
        await cancel(id)
        return {"id": id, "object": "video.deleted", "deleted": True}

    return app


def refusal(status: int, message: str) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": None}}, status_code=status
    )


def fields_of(kind: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a request in JSON or, as OpenAI's client sends them, in multipart/form-data."""
    try:
        if not kind.startswith("multipart/"):
            return dict(json.loads(body))
        head = f"Content-Type: {kind}\r\n\r\n".encode()
        parts = email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts()
        return {
            str(part.get_param("name", header="content-disposition")): bytes(
                part.get_payload(decode=True)
            ).decode()
            for part in parts
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise HTTPException(400, f"the body is neither an object in JSON nor a form: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A page and an HTTP interface that turn prompts into videos.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="zai-org/CogVideoX-5b", help="a directory or a hub id")
    parser.add_argument("--sizes", nargs="+", default=["49x480x720"], help="FRAMESxHEIGHTxWIDTH")
    parser.add_argument("--dp", type=int, default=1, help="mesh: devices for the two passes of guidance")
    parser.add_argument("--tp", type=int, default=1, help="mesh: devices for one pass")
    parser.add_argument("--offload", action="store_true", help="keep weights on the host between uses")
    parser.add_argument("--fps", type=float, default=8, help="frames a second: 8, or 16 for CogVideoX 1.5")
    parser.add_argument("--queue", type=int, default=8, help="videos that may wait")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on")
    parser.add_argument("--port", type=int, default=8000, help="to listen on")
    args = parser.parse_args()
    try:
        sizes = {size: astuple(Bucket.parse(size)) for size in args.sizes}
        mesh = make_mesh(args.dp, args.tp)
        model = description.describe(args.model, image=False, clip=False)
        for size in sizes.values():  # before minutes of loading
            description.check_size(model, *size)
        pipe = load_pipeline(args.model, mesh=mesh, offload=args.offload)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    pipe.set_progress_bar_config(disable=True)
    with tempfile.TemporaryDirectory() as directory:
        token = os.environ.get("COGVIDEOX_TORCHAX_TOKEN", "")
        app = make_app(pipe, sizes, Path(directory), args.queue, args.fps, token, args.model)
        uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
