"""The servers over HTTP and in a browser: a queue of prompts, and a video shown while it is decoded."""

import contextlib
import functools
import io
import re
import shutil
import socket
import threading
import time
import urllib.request
from fractions import Fraction

import openai
import pytest
import requests
import torch
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

from cogvideox_torchax import port, save_video
from cogvideox_torchax.files import latents as latent_files, video as video_files
from cogvideox_torchax.runtime.clock import CompileClock
from examples import serve, stream_to_browser
from tests import small_pipelines
from tests.reference import latents as made_up_latents


@contextlib.contextmanager
def served(app):
    """Run a server for a `with` block, which gets its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def page():
    """Return a page of a browser; without Chromium the test is skipped."""
    found = [*filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))]
    if not found:
        pytest.skip("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 800, "height": 600})
        browser.close()


SIZES = {"5x8x16": (5, 8, 16), "1x8x8": (1, 8, 8)}

pytestmark = [
    pytest.mark.usefixtures("torchax_off"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # OpenAI has ended its own service; its client still speaks the protocol, which other servers share.
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def pipe():
    return port(small_pipelines.one_layer())


class Gated:
    """A pipeline that waits after every step of a "slow" prompt, and fails for the prompt "bad"."""

    def __init__(self, pipe):
        self.pipe, self.steps, self.prompts = pipe, threading.Semaphore(0), []

    def __call__(self, prompt, *, callback_on_step_end, **options):
        self.prompts.append(prompt)
        if prompt == "bad":
            raise ValueError("the prompt\nis bad")

        def on_step_end(*given):
            changed = callback_on_step_end(*given)
            if prompt == "slow":
                assert self.steps.acquire(timeout=60)
            return changed

        return self.pipe(prompt, callback_on_step_end=on_step_end, **options)

    def open(self):
        self.steps.release(1000)  # more than any test waits for


@pytest.fixture
def gated(pipe):
    return Gated(pipe)


@pytest.fixture
def app(gated, tmp_path):
    return serve.make_app(gated, SIZES, tmp_path, limit=2, fps=8)


@pytest.fixture
def client(app, gated):
    with TestClient(app) as client:
        yield client
        gated.open()


def ask(client, prompt, **wanted):
    answer = client.post("/videos", json={"prompt": prompt, "steps": 2, **wanted})
    assert answer.status_code == 201, answer.text
    return f"/videos/{answer.json()['id']}"


def wait(client, address, **wanted):
    """Ask for a video's state until it has the wanted fields; return it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = client.get(address).json()
        if wanted.items() <= found.items():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{found}, and not {wanted}")


def test_one_video_is_generated_at_a_time_and_tells_its_steps(client, gated, pipe, tmp_path):
    first, second = ask(client, "slow", steps=3, seed=7), ask(client, "a panda")
    wait(client, first, state="running", step=0, steps=3, ahead=0)
    assert client.get(second).json() == {"state": "queued", "step": 0, "steps": 2, "ahead": 1}
    gated.steps.release()
    wait(client, first, state="running", step=1)
    gated.open()
    wait(client, first, state="done", step=3)
    wait(client, second, state="done", step=2, ahead=0)
    generator = torch.Generator().manual_seed(7)
    size = {"num_frames": 5, "height": 8, "width": 16}
    made = pipe("slow", **size, num_inference_steps=3, generator=generator, output_type="np")
    save_video(made.frames[0], tmp_path / "want.mp4", fps=8)
    assert client.get(f"{first}/file").content == (tmp_path / "want.mp4").read_bytes()


def test_no_request_compiles_anything(client, tmp_path):
    for name in SIZES:  # tests of other files, which run in between, clear JAX's caches
        wait(client, ask(client, "warm", size=name, steps=2), state="done")
    clock = CompileClock()
    for name, size in SIZES.items():
        address = ask(client, "another prompt", size=name, steps=4, seed=1)
        wait(client, address, state="done")
        (tmp_path / "got.mp4").write_bytes(client.get(f"{address}/file").content)
        found = video_files.probe(str(tmp_path / "got.mp4"))
        assert (found.num_frames, found.height, found.width) == size
    assert clock.seconds == 0


def test_a_video_that_is_cancelled_in_the_queue_never_runs(client, gated):
    first, second = ask(client, "slow"), ask(client, "a panda")
    wait(client, first, state="running")
    third = ask(client, "an astronaut")
    assert client.post("/videos", json={"prompt": "one too many"}).status_code == 429
    assert client.delete(second).status_code == 204
    assert client.get(second).status_code == 404
    assert client.get(third).json()["ahead"] == 1
    fourth = ask(client, "the sea")
    gated.open()
    wait(client, fourth, state="done")
    assert gated.prompts[len(SIZES) :] == ["slow", "an astronaut", "the sea"]


def test_a_video_that_is_cancelled_stops_after_its_step_and_the_next_one_runs(client, gated, tmp_path):
    first, second = ask(client, "slow", steps=1000), ask(client, "a panda")
    wait(client, first, state="running")
    assert client.delete(first).status_code == 204
    gated.steps.release()  # ends the step in which it is cancelled
    wait(client, second, state="done")
    assert client.get(first).status_code == 404
    assert {path.stem for path in tmp_path.glob("*.mp4")} == {"warm", second.rpartition("/")[2]}
    client.delete(second)
    assert client.get(f"{second}/file").status_code == 404
    assert {path.stem for path in tmp_path.glob("*.mp4")} == {"warm"}


def test_a_video_that_fails_says_so_in_a_line_and_the_next_one_runs(client):
    first, second = ask(client, "bad"), ask(client, "a panda")
    wait(client, second, state="done")
    assert client.get(first).json()["state"] == "failed: the prompt is bad"
    assert client.get(f"{first}/file").status_code == 409


def test_the_oldest_finished_videos_make_room(client, monkeypatch, tmp_path):
    monkeypatch.setattr(serve, "KEPT", 1)
    first, second = ask(client, "a panda"), ask(client, "the sea")
    wait(client, second, state="done")
    third = ask(client, "an egg")
    assert [client.get(each).status_code for each in (first, second, third)] == [404, 200, 200]
    assert not (tmp_path / f"{first.rpartition('/')[2]}.mp4").exists()


@pytest.mark.parametrize(
    "wanted",
    [
        *({"size": "9x9x9"}, {"steps": 0}, {"prompt": ""}, {"seed": -1}, {"prompt": "x" * 4001}),
        {"num_frames": 9},  # no field of that name
    ],
)
def test_a_bad_request_is_refused_before_it_waits(client, gated, wanted):
    assert client.post("/videos", json={"prompt": "a panda", **wanted}).status_code == 422
    assert len(gated.prompts) == len(SIZES)


def test_a_size_that_does_not_run_ends_the_server_before_it_listens(pipe, tmp_path):
    app = serve.make_app(pipe, {"5x6x16": (5, 6, 16)}, tmp_path, limit=2, fps=8)
    with pytest.raises(RuntimeError, match="5x6x16 failed: .*multiple"), TestClient(app):
        pass


@pytest.fixture
def openai_client(gated, tmp_path):
    """Return OpenAI's own client of a server that asks for a token."""
    app = serve.make_app(gated, SIZES, tmp_path, limit=1, fps=8, token="secret")
    with served(app) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
        gated.open()


def test_openai_s_client_makes_lists_downloads_and_deletes_videos(openai_client, gated):
    videos, more = openai_client.videos, {"steps": 2, "seed": 7}
    made = videos.create(prompt="slow", size="16x8", seconds="1", extra_body=more)
    assert (made.object, made.size, made.seconds, made.prompt) == ("video", "16x8", "1", "slow")
    assert videos.retrieve(made.id).status in ("queued", "in_progress")
    with pytest.raises(openai.ConflictError, match="no file: the video is"):
        videos.download_content(made.id)
    gated.open()
    done = videos.poll(made.id, poll_interval_ms=20)
    assert (done.status, done.progress) == ("completed", 100)
    found = video_files.probe(videos.download_content(made.id).read())
    assert (found.num_frames, found.height, found.width) == SIZES["5x8x16"]
    bad = videos.create_and_poll(prompt="bad", extra_body=more, poll_interval_ms=20)
    assert (bad.status, bad.error.message) == ("failed", "failed: the prompt is bad")
    assert [each.id for each in videos.list(limit=1)] == [bad.id, made.id], "in two pages"
    assert videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such video"):
        videos.retrieve(made.id)


@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        ({"size": "9x9"}, 400, "this server makes size 16x8 with seconds 1, size 8x8 with seconds 0"),
        ({"prompt": "x" * 4001}, 400, "at most 4000 characters"),
        ({"prompt": "x" * 200_000}, 413, "at most 100000 bytes"),
        ({"extra_body": {"seed": -1}}, 400, "greater than or equal to 0"),
        ({"input_reference": b"a picture"}, 400, "input_reference"),
    ],
)
def test_openai_s_client_gets_what_is_wrong_in_its_shape(openai_client, gated, wanted, status, words):
    with pytest.raises(openai.APIStatusError, match=words) as refused:
        openai_client.videos.create(**{"prompt": "a", **wanted})
    assert (refused.value.status_code, refused.value.type) == (status, "invalid_request_error")
    assert len(gated.prompts) == len(SIZES)


def test_who_has_no_token_is_refused_but_for_the_health_address_and_a_full_queue_is_429(openai_client):
    site = str(openai_client.base_url).removesuffix("/v1/")
    assert requests.get(f"{site}/health").json() == {"status": "ready"}
    for path in ("/", "/videos/x", "/v1/videos"):
        assert requests.get(site + path).status_code == 401
        assert requests.get(site + path, headers={"Authorization": "Bearer other"}).status_code == 401
    make = functools.partial(openai_client.videos.create, prompt="slow", extra_body={"steps": 2})
    with pytest.raises(openai.RateLimitError, match="1 videos are waiting"):
        [make() for _ in range(3)]


@pytest.mark.slow
def test_a_browser_follows_a_prompt_cancels_it_and_plays_the_next(app, gated, page):
    with served(app) as address:
        page.goto(address)
        assert page.locator("#size option").all_text_contents() == list(SIZES)
        page.fill("#prompt", "slow")
        page.click("#start")
        gated.steps.release()
        page.wait_for_function("document.getElementById('said').textContent === 'step 1 of 50'")
        assert page.evaluate("document.getElementById('bar').value") == 1
        page.click("#cancel")
        gated.steps.release()
        page.fill("#prompt", "a panda")
        page.fill("#steps", "2")
        page.click("#start")
        page.wait_for_function("document.getElementById('video').videoWidth === 16", timeout=60_000)
        page.evaluate("document.getElementById('video').play()")
        page.wait_for_function("document.getElementById('video').currentTime > 0")
        gated.open()
    assert gated.prompts[len(SIZES) :] == ["slow", "a panda"]


def test_a_size_beyond_the_models_positions_is_refused_before_anything_is_loaded(saved, monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("sys.argv", ["server", "--model", str(saved("text", "1.5")), "--sizes", "5x16x16"])
    with pytest.raises(SystemExit):
        serve.main()
    assert capsys.readouterr().err.endswith("at most height=8, width=16; try height=8, width=8\n")


@pytest.mark.parametrize(
    ("server", "arguments", "words"),
    [
        (serve, ("--sizes", "480x720"), "got a size of '480x720': give FRAMESxHEIGHTxWIDTH"),
        (serve, ("--sizes", "9x0x32"), "got a size of '9x0x32': give FRAMESxHEIGHTxWIDTH"),
        (serve, ("--model", "WRONG"), "there is no model directory WRONG: give a directory, or a hub id"),
        (serve, ("--tp", "99"), "got a mesh of dp=1 x tp=99, 99 devices, where there are 8"),
        (stream_to_browser, ("--model", "WRONG"), "there is no model directory WRONG: give a directory"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(server, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["server", *arguments])
    with pytest.raises(SystemExit) as left:
        server.main()
    said = capsys.readouterr().err
    assert (left.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"server: {words}")


class GatedVAE:
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
def gated_vae(native_vae):
    return GatedVAE(native_vae)


@pytest.fixture
def site(gated_vae):
    """Return the address of a running server, with room for two videos of 100 kB."""
    with served(stream_to_browser.make_app(gated_vae, queue=2, largest=100_000)) as address:
        yield address
        gated_vae.go.set()


@pytest.fixture
def upload(native_vae, tmp_path):
    """Write a latent file of five latent frames, 17 frames of 8 x 12; return it and its path."""
    z = made_up_latents(5, height=2, width=3)
    path = tmp_path / "z.safetensors"
    latent_files.save(latent_files.Latents(z, dict(native_vae.config), "small", Fraction(8), 17), path)
    return path


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


def test_a_frame_is_there_before_the_next_chunk_is_decoded(site, gated_vae, upload, native_vae):
    where = site + requests.post(f"{site}/videos", data=upload.read_bytes()).text.strip()
    with urllib.request.urlopen(where, timeout=30) as answer:
        first = next_frame(answer)
        assert not gated_vae.go.is_set()
        gated_vae.go.set()
        rest = list(iter(lambda: next_frame(answer), None))
    z = latent_files.load(upload).tensor
    frames = torch.cat(list(native_vae.decode_stream(z, output_dtype=torch.uint8)), dim=2)
    assert (1 + len(rest), first.size) == (17, (12, 8))
    assert rest[-1].tobytes() == as_jpeg(frames[0, :, -1]).tobytes()
    assert requests.get(where).status_code == 404, "a video is watched once"


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"no latents", 400, "the upload is truncated or no safetensors file"),
        (b"", 400, "the upload"),
        (b"x" * 100_001, 413, "larger than 100000 bytes"),
    ],
)
def test_a_bad_upload_is_one_line_that_names_no_file_of_the_server(site, data, status, words):
    answer = requests.post(f"{site}/videos", data=data)
    assert answer.status_code == status
    assert re.fullmatch(f".*{words}.*\n", answer.text)
    assert "/tmp" not in answer.text


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
        answer = requests.post(f"{site}/videos", data=path.read_bytes())
        assert answer.status_code == 400
        assert re.fullmatch(f".*{words}.*\n", answer.text)


def test_no_more_videos_wait_than_the_queue_holds(site, upload, monkeypatch):
    def sent():
        return requests.post(f"{site}/videos", data=upload.read_bytes())

    assert [sent().status_code for _ in range(3)] == [200, 200, 429]
    monkeypatch.setattr(stream_to_browser, "PATIENCE", 0.0)
    late = sent()
    assert late.status_code == 200, "what nobody came for makes room"
    assert requests.get(site + late.text.strip()).status_code == 404, "nor is it handed out any more"


def test_a_browser_shows_the_first_chunk_while_the_second_is_not_decoded(site, gated_vae, upload, page):
    page.goto(site)
    page.set_input_files("#file", upload)
    page.wait_for_function("document.getElementById('video').naturalWidth === 12", timeout=30_000)
    before = page.locator("#video").screenshot()
    assert not gated_vae.go.is_set()
    gated_vae.go.set()
    deadline = time.monotonic() + 30
    while page.locator("#video").screenshot() == before and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert page.locator("#video").screenshot() != before, "later frames take the place of the first"


def test_a_server_that_ends_stops_the_running_video(app, gated):
    with TestClient(app) as client:
        wait(client, ask(client, "slow", steps=1000), state="running")
        threading.Timer(0.5, gated.steps.release).start()
    assert gated.prompts[len(SIZES) :] == ["slow"]
