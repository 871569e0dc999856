"""The page that shows a video while it is being decoded: over HTTP, and in a browser where there is one."""

import io
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from fractions import Fraction

import pytest
import torch
import uvicorn
from PIL import Image

from cogvideox_torchax.files import latents as latent_files
from examples import stream_to_browser
from tests.reference import latents as made_up_latents

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Gated:
    """A VAE that waits, after its first chunk, until it is let on."""

    def __init__(self, vae):
        self.vae, self.config, self.dtype, self.go = vae, vae.config, vae.dtype, threading.Event()

    def decode_stream(self, z, **options):
        chunks = self.vae.decode_stream(z, **options)  # what is wrong with z is said at once

        def gated():
            yield next(chunks)
            assert self.go.wait(30)
            yield from chunks

        return gated()


@pytest.fixture
def gated(native_vae):
    return Gated(native_vae)


@pytest.fixture
def site(gated):
    """Return the address of a running server, with room for two videos of 100 kB."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = stream_to_browser.make_app(gated, queue=2, largest=100_000)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    gated.go.set()
    server.should_exit = True
    thread.join()


@pytest.fixture
def upload(native_vae, tmp_path):
    """Write a latent file of five latent frames, 17 frames of 8 x 12; return it and its path."""
    z = made_up_latents(5, height=2, width=3)
    path = tmp_path / "z.safetensors"
    latent_files.save(latent_files.Latents(z, dict(native_vae.config), "small", Fraction(8), 17), path)
    return path


def asked(address, data=None):
    """Status and text of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=data), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def next_frame(answer):
    """Return the next JPEG of a multipart answer, None at its end."""
    if answer.readline() == b"--frame--\r\n":
        return None
    kind, length, _ = (answer.readline() for _ in range(3))
    assert kind == b"Content-Type: image/jpeg\r\n"
    picture = Image.open(io.BytesIO(answer.read(int(length.split(b":")[1]))))
    answer.readline()
    return picture


def as_jpeg(frame_CHW):
    """Return a frame after a JPEG round trip."""
    written = io.BytesIO()
    picture = Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy())
    picture.save(written, "JPEG", quality=stream_to_browser.QUALITY)
    return Image.open(written)


def test_a_frame_is_there_before_the_next_chunk_is_decoded(site, gated, upload, native_vae):
    status, where = asked(f"{site}/videos", upload.read_bytes())
    assert status == 200
    with urllib.request.urlopen(site + where.strip(), timeout=30) as answer:
        first = next_frame(answer)
        assert not gated.go.is_set()
        gated.go.set()
        rest = list(iter(lambda: next_frame(answer), None))
    z = latent_files.load(upload).tensor
    frames = torch.cat(list(native_vae.decode_stream(z, output_dtype=torch.uint8)), dim=2)
    assert (1 + len(rest), first.size) == (17, (12, 8))
    assert rest[-1].tobytes() == as_jpeg(frames[0, :, -1]).tobytes()
    assert asked(site + where.strip())[0] == 404, "a video is watched once"


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"no latents", 400, "the upload is truncated or no safetensors file"),
        (b"", 400, "the upload"),
        (b"x" * 100_001, 413, "larger than 100000 bytes"),
    ],
)
def test_a_bad_upload_is_one_line_that_names_no_file_of_the_server(site, data, status, words):
    found, text = asked(f"{site}/videos", data)
    assert found == status
    assert re.fullmatch(f".*{words}.*\n", text)
    assert "/tmp" not in text


def test_latents_of_another_model_or_with_nan_are_refused_when_they_come(site, native_vae, tmp_path):
    z, config, path = (
        made_up_latents(1, height=2, width=3),
        dict(native_vae.config),
        tmp_path / "bad.safetensors",
    )
    for tensor, changed, words in (
        (z, {"layers_per_block": 9}, "layers_per_block is 9"),
        (z * float("nan"), {}, "NaN"),
        (torch.cat([z, z]), {}, "holds 2 videos"),
    ):
        latent_files.save(latent_files.Latents(tensor, config | changed, "other", Fraction(8), 1), path)
        status, text = asked(f"{site}/videos", path.read_bytes())
        assert status == 400
        assert re.fullmatch(f".*{words}.*\n", text)


def test_no_more_videos_wait_than_the_queue_holds(site, upload, monkeypatch):
    data = upload.read_bytes()
    assert [asked(f"{site}/videos", data)[0] for _ in range(3)] == [200, 200, 429]
    monkeypatch.setattr(stream_to_browser, "PATIENCE", 0.0)
    status, late = asked(f"{site}/videos", data)
    assert status == 200, "what nobody came for makes room"
    assert asked(site + late.strip())[0] == 404, "nor is it handed out any more"


@pytest.mark.parametrize("path", ["/videos/..%2f..%2fetc%2fpasswd", "/videos/none", "/etc/passwd", "/docs"])
def test_a_name_from_a_request_is_no_file(site, path):
    status, text = asked(site + path)
    assert (status, text.count("\n")) == (404, 1)
    assert "root:" not in text


def test_it_listens_on_the_loopback_interface_unless_told_otherwise(monkeypatch, model_directory):
    seen = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: seen.update(options))
    monkeypatch.setattr("sys.argv", ["stream", "--model", str(model_directory)])
    stream_to_browser.main()
    assert seen["host"] == "127.0.0.1"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_shows_the_first_chunk_while_the_second_is_not_decoded(site, gated, upload, tmp_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 800, "height": 600})
        page.goto(site)
        page.set_input_files("#file", upload)
        page.wait_for_function("document.getElementById('video').naturalWidth === 12", timeout=30_000)
        before = page.locator("#video").screenshot()
        assert not gated.go.is_set()
        gated.go.set()
        deadline = time.monotonic() + 30
        while page.locator("#video").screenshot() == before and time.monotonic() < deadline:
            page.wait_for_timeout(100)
        assert page.locator("#video").screenshot() != before, "later frames take the place of the first"
        browser.close()
