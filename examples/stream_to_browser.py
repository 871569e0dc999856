"""Serve a page that uploads latents and shows the frames while they are decoded.

    python examples/stream_to_browser.py --model zai-org/CogVideoX-5b     # then open http://127.0.0.1:8000

It takes files that `cogvideox-torchax encode` wrote with the same model. It listens on the loopback interface
unless --host changes it, and refuses what pages of other sites send. There are no users and no passwords:
anyone who reaches the port may use it. An upload has at most --largest MB, at most --queue videos wait, and
one is decoded at a time. A bad request is answered by one line. No file name is taken from a request.
"""

import argparse
import asyncio
import io
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import same_site
import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from PIL import Image
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from cogvideox_torchax import AutoencoderKLCogVideoX, load_latents

Chunks = Iterator[torch.Tensor]
"""Frames (1, C, t, H, W) in uint8, decoded when they are asked for."""

QUALITY = 90
"""Quality of a JPEG."""

PATIENCE = 60.0
"""Seconds that an upload is kept for somebody who does not come to see it."""

UPLOAD = 600.0
"""Seconds that an upload may take."""

SHUTDOWN = 5
"""Seconds that a server that ends waits for requests."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Decoded as you watch</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
  img { display: block; margin-top: 1rem; max-width: 100%; image-rendering: pixelated; min-width: 50% }
  output { color: #555 }
</style>
<h1>Decoded as you watch</h1>
<label>Latents, a .safetensors file: <input type="file" id="file"></label>
<output id="said"></output>
<img id="video" alt="">
<script>
  const said = document.getElementById("said"), video = document.getElementById("video");
  document.getElementById("file").addEventListener("change", async event => {
    said.textContent = "uploading";
    const answer = await fetch("/videos", { method: "POST", body: event.target.files[0] });
    const text = await answer.text();
    said.textContent = answer.ok ? "" : text;
    if (answer.ok) video.src = text.trim();
  });
</script>
</html>
"""


async def body(request: Request, largest: int) -> bytes:
    """Read an upload, no further than `largest` bytes."""
    held = bytearray()
    try:
        async with asyncio.timeout(UPLOAD):
            async for part in request.stream():
                held += part
                if len(held) > largest:
                    raise HTTPException(413, f"larger than {largest} bytes")
    except (TimeoutError, ClientDisconnect) as error:
        raise HTTPException(408, f"the upload did not come within {UPLOAD} seconds") from error
    return bytes(held)


def read(data: bytes, vae: Any) -> Chunks:
    """Return the stream of uploaded latents, not decoded yet; 400 for latents of another model."""
    try:
        latents = load_latents(data)
        latents.check_model(vae.config)
        if len(latents.tensor) != 1:
            raise ValueError(f"the upload holds {len(latents.tensor)} videos: one at a time")
        return vae.decode_stream(latents.tensor.to(vae.dtype), output_dtype=torch.uint8)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def jpegs(chunks: Chunks) -> Iterator[bytes]:
    """Yield a part of a multipart/x-mixed-replace answer for every frame."""
    for chunk in chunks:
        for frame in chunk[0].permute(1, 2, 3, 0):
            picture = io.BytesIO()
            Image.fromarray(frame.contiguous().numpy()).save(picture, "JPEG", quality=QUALITY)
            data = picture.getvalue()
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
            yield head.encode() + data + b"\r\n"
    yield b"--frame--\r\n"


def make_app(vae: Any, *, queue: int = 4, largest: int = 64_000_000, host: str = "127.0.0.1") -> FastAPI:
    """Return the page, where latents go up and frames come down.

    The event loop's thread answers all requests, and is the only one to change the table of videos.

    Args:
        vae: the decoder, ready to run.
        queue: number of videos that may wait.
        largest: bytes of an upload.
        host: the server's name in requests, besides "localhost".
    """

    async def check(request: Request) -> None:
        same_site.check(request, host)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check)])
    waiting: dict[str, tuple[float, Chunks]] = {}  # by name, with the time of the upload
    decoding = threading.Lock()

    @app.exception_handler(StarletteHTTPException)
    async def one_line(request: Request, error: StarletteHTTPException) -> Response:
        return PlainTextResponse(
            " ".join(str(error.detail).split()) + "\n", error.status_code, dict(error.headers or {})
        )

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    @app.post("/videos")
    async def upload(request: Request) -> PlainTextResponse:
        chunks, now = read(await body(request, largest), vae), time.monotonic()
        for name in [name for name, (since, _) in waiting.items() if now - since >= PATIENCE]:
            del waiting[name]
        if len(waiting) >= queue:
            raise HTTPException(429, f"{queue} videos are waiting: try again later")
        name = secrets.token_urlsafe(16)
        waiting[name] = now, chunks
        return PlainTextResponse(f"/videos/{name}\n")

    @app.get("/videos/{name}")
    async def watch(name: str) -> StreamingResponse:
        since, chunks = waiting.pop(name, (0.0, None))  # a video is handed out once
        if chunks is None or time.monotonic() - since >= PATIENCE:
            raise HTTPException(404, "no such video: upload it, and watch it once")

        def one_at_a_time() -> Iterator[bytes]:
            with decoding:
                yield from jpegs(chunks)

        return StreamingResponse(one_at_a_time(), media_type="multipart/x-mixed-replace; boundary=frame")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A page that shows a video while it is being decoded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="zai-org/CogVideoX-5b", help="a directory or a hub id")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on")
    parser.add_argument("--port", type=int, default=8000, help="to listen on")
    parser.add_argument("--queue", type=int, default=4, help="videos that may wait")
    parser.add_argument("--largest", type=int, default=64, help="MB of an upload")
    args = parser.parse_args()
    try:
        loaded = AutoencoderKLCogVideoX.from_pretrained(args.model, subfolder="vae", dtype=args.dtype)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    app = make_app(loaded.to("jax"), queue=args.queue, largest=args.largest * 1_000_000, host=args.host)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=SHUTDOWN)


if __name__ == "__main__":
    main()
