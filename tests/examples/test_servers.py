"""The servers over HTTP and in a browser: a queue of prompts, and a video shown while it is decoded."""

import contextlib
import io
import json
import re
import socket
import threading
import time
import urllib.request
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import httpx2
import openai
import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

from cogvideox_torchax import port, save_video
from cogvideox_torchax.files import latents as latent_files, video as video_files
from cogvideox_torchax.terminal import CompileClock
from examples import serve, stream_to_browser
from tests import reference, small_pipelines


@contextlib.contextmanager
def served(app, **options):
    """Run a server for a `with` block, which gets its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **{"log_level": "error", **options}))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


SIZES = {"5x8x16": (5, 8, 16)}
"""What most servers here make: each further size is compiled, too."""

pytestmark = [
    pytest.mark.usefixtures("torchax_off"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # OpenAI has ended its own service; its client still speaks the protocol, which other servers share.
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def pipe():
    return port(small_pipelines.one_layer())


FAILURES = {"bad": ValueError("No such file: '/srv/models/bad'"), "exit": SystemExit()}


class Gated:
    """A pipeline that waits after every step of a "slow" prompt, and fails for those of `FAILURES`."""

    def __init__(self, pipe):
        self.pipe, self.steps, self.prompts, self.options = pipe, threading.Semaphore(0), [], {}

    def __getattr__(self, name):
        return getattr(self.pipe, name)

    def __call__(self, prompt, *, callback_on_step_end, **options):
        self.prompts.append(prompt)
        self.options = options
        if prompt in FAILURES:
            raise FAILURES[prompt]

        def on_step_end(*given):
            changed = callback_on_step_end(*given)
            assert prompt != "slow" or self.steps.acquire(timeout=60)
            return changed

        return self.pipe(prompt, callback_on_step_end=on_step_end, **options)

    def open(self):
        self.steps.release(1000)  # more than any test waits for


class Blank(Gated):
    """A pipeline whose videos are black."""

    def __call__(self, prompt, *, num_frames, height, width, **options):
        self.options = options
        return SimpleNamespace(frames=[torch.zeros(num_frames, 3, height, width)])


@pytest.fixture
def gated(pipe):
    return Gated(pipe)


@pytest.fixture
def app(gated, tmp_path):
    return serve.make_app(gated, SIZES, tmp_path, limit=2, fps=8)


@pytest.fixture
def client(app, gated):
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
        gated.open()


@pytest.fixture(scope="module")
def blank(pipe):
    return Blank(pipe)


@pytest.fixture(scope="module")
def shared(blank, tmp_path_factory):
    """Return a client of a server for many tests, with much room and black videos."""
    with (
        served(serve.make_app(blank, SIZES, tmp_path_factory.mktemp("shared"), limit=1000, fps=8)) as site,
        httpx2.Client(base_url=site, timeout=60) as client,
    ):
        assert client.get("/health").json() == {"status": "ready"}
        yield client


def newest(client):
    """Return the id of the last request that a server took, None for none."""
    return client.get("/v1/videos?limit=1").json()["last_id"]


def ask(client, prompt, **wanted):
    answer = client.post("/v1/videos", json={"prompt": prompt, "steps": 2, **wanted})
    assert answer.status_code == 200, answer.text
    return f"/v1/videos/{answer.json()['id']}"


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
    wait(client, first, status="in_progress", step=0, steps=3, ahead=0)
    wait(client, second, status="queued", step=0, steps=2, ahead=1)
    gated.steps.release()
    wait(client, first, status="in_progress", step=1)
    gated.open()
    wait(client, first, status="completed", step=3)
    wait(client, second, status="completed", step=2, ahead=0)
    made = pipe(
        "slow",
        num_frames=5,
        height=8,
        width=16,
        max_sequence_length=16,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
    )
    save_video(made.frames[0], tmp_path / "want.mp4", fps=8)
    assert client.get(f"{first}/content").content == (tmp_path / "want.mp4").read_bytes()


def test_no_request_compiles_anything(client):
    # Tests of other files, which run in between, clear JAX's caches.
    wait(client, ask(client, "warm", steps=2), status="completed")
    clock = CompileClock()
    wait(client, ask(client, "another prompt", steps=4, seed=1), status="completed")
    assert clock.seconds == 0


def test_a_video_that_is_cancelled_never_runs_or_stops_after_its_step(client, gated, tmp_path):
    first, second = ask(client, "slow", steps=1000), ask(client, "a panda")
    wait(client, first, status="in_progress")
    third = ask(client, "an astronaut")
    assert client.post("/v1/videos", json={"prompt": "one too many"}).status_code == 429
    for cancelled in (second, first):
        assert client.delete(cancelled).status_code == 200
        assert client.get(cancelled).status_code == 404
    assert client.get(third).json()["ahead"] == 0
    gated.steps.release()  # ends the step in which it is cancelled
    wait(client, third, status="completed")
    assert gated.prompts[len(SIZES) :] == ["slow", "an astronaut"]
    assert {path.stem for path in tmp_path.glob("*.mp4")} == {"warm", third.rpartition("/")[2]}
    client.delete(third)
    assert client.get(f"{third}/content").status_code == 404
    assert {path.stem for path in tmp_path.glob("*.mp4")} == {"warm"}


@pytest.mark.parametrize("prompt", FAILURES)
def test_a_video_that_fails_names_no_file_of_the_server_and_the_next_one_runs(client, prompt, caplog):
    error, first, second = type(FAILURES[prompt]).__name__, ask(client, prompt), ask(client, "a panda")
    wait(client, second, status="completed")
    assert client.get(first).json()["error"]["message"] == f"failed: {error}"
    assert client.get(f"{first}/content").status_code == 409
    assert error in caplog.text, "the log has it all"


def test_the_oldest_finished_videos_make_room(client, monkeypatch, tmp_path):
    monkeypatch.setattr(serve, "KEPT", 1)
    first, second = ask(client, "a panda"), ask(client, "the sea")
    wait(client, second, status="completed")
    assert [client.get(each).status_code for each in (first, second, ask(client, "an egg"))] == [
        404,
        200,
        200,
    ]
    assert not (tmp_path / f"{first.rpartition('/')[2]}.mp4").exists()


def form(*parts):
    """Return a body of multipart/form-data with parts of (headers, value)."""
    return b"".join(b"--x\r\n%s\r\n\r\n%s\r\n" % part for part in parts) + b"--x--\r\n"


PROMPT = b'Content-Disposition: form-data; name="prompt"', b"a panda"


FORM = {"Content-Type": "multipart/form-data; boundary=x"}
PANDA = b'{"prompt": "a panda"}'


@pytest.mark.parametrize(
    ("kind", "body", "seed", "steps"),
    [
        ("", PANDA, 0, 50),
        ("application/x-www-form-urlencoded", PANDA, 0, 50),  # what curl says of any body
        ("Application/JSON; Charset=UTF-8", PANDA, 0, 50),
        ("Multipart/Form-Data; Boundary=x", form(PROMPT), 0, 50),
        # In chunks, without a length.
        ("multipart/form-data; boundary=x", iter([form(PROMPT)]), 0, 50),
        # As a table writes numbers, and what is absent.
        ("", b'{"prompt": "a panda", "seed": 42.0, "steps": 3.0, "size": null, "seconds": null}', 42, 3),
        ("", b'{"prompt": "a panda", "seed": null, "steps": null, "input_reference": null}', 0, 50),
        ("", b'{"prompt": "a panda", "seed": "%d", "num_inference_steps": 2}' % (2**64 - 1), 2**64 - 1, 2),
    ],
)
def test_a_body_is_read_by_its_content_in_chunks_too(shared, blank, kind, body, seed, steps):
    answer = shared.post("/v1/videos", content=body, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 200, answer.text
    wait(shared, f"/v1/videos/{answer.json()['id']}", status="completed", steps=steps)
    assert blank.options["generator"].initial_seed() == seed
    assert blank.options["max_sequence_length"] == 16, "the model's"


PICTURE = b'Content-Disposition: form-data; name="input_reference"; filename="a.png"'


WRONG_FIELDS = (
    *({"size": "9x9x9"}, {"steps": 0}, {"prompt": ""}, {"seed": -1}, {"prompt": "x" * 4001}),
    *({"seed": 42.5}, {"seed": 2**64}, {"steps": False}, {"prompt": None}),
    {"prompt": "a panda plays a guitar in a bamboo forest by the sea"},  # more tokens than the model takes
    *({"steps": 2, "num_inference_steps": 3}, {"input_reference": "a picture"}),
)


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        *(
            ({}, json.dumps({"prompt": "a panda", **wanted}).encode(), 400, "|".join(wanted))
            for wanted in WRONG_FIELDS
        ),
        ({}, b'{"prompt": "\\ud800"}', 400, "prompt"),
        ({}, b'{"prompt": "a", "\\ud800": 1}', 400, "the body"),
        ({}, b'{"prompt": "a", "size": "\\ud800"}', 400, "size"),
        *(
            ({}, b'{"prompt": "a", "seed": %s}' % seed, 400, "seed")
            for seed in (b"NaN", b"1e999", b"-Infinity")
        ),
        ({}, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "digits"),
        ({}, b'{"prompt": "a", "num_frames": 9}', 400, "prompt, size, seconds, steps, seed, model"),
        ({}, b'{"prompt": "a", "' + b"x" * 50_000 + b'": 1}', 400, "no field"),
        *(
            ({}, body, 400, "neither an object")
            for body in (b"1", b"null", b'"a"', b"", b'{"prompt"', b"\xff", b"[" * 90_000)
        ),
        ({}, iter(2 * [b"x" * 60_000]), 413, "at most 100000 bytes"),
        ({}, b"x" * 100_001, 413, "at most 100000 bytes"),
        ({"Content-Encoding": "gzip"}, b"x", 400, "neither an object"),
        (FORM, form((PICTURE, b"p")), 400, "input_reference"),
        (FORM, form(PROMPT, (PICTURE, b"p" * 10_000_000)), 400, "input_reference"),
        (FORM, form(PROMPT)[:40], 400, ""),
        ({"Content-Type": "multipart/form-data"}, form(PROMPT), 400, "boundary"),
        ({"Content-Type": "multipart/mixed; boundary=x"}, form(PROMPT), 400, "neither an object"),
    ],
)
def test_a_body_that_is_not_taken_is_an_error_of_one_line_in_openai_s_form(
    shared, headers, body, status, words
):
    before = newest(shared)
    answer = shared.post("/v1/videos", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert re.fullmatch(f".*({words}).*", error["message"])
    assert len(error["message"]) < 300
    assert newest(shared) == before


def test_a_body_that_does_not_come_is_given_up(app, monkeypatch):
    monkeypatch.setattr(serve, "PATIENCE", 0.2)
    with served(app) as site, half_sent(site) as sent:
        assert b"408" in sent.recv(1000)


@contextlib.contextmanager
def half_sent(site, address="/v1/videos"):
    """Send a part of a request's body; the block gets the connection."""
    with socket.create_connection(("127.0.0.1", httpx2.URL(site).port), timeout=30) as sent:
        sent.sendall(f"POST {address} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 90\r\n\r\n-".encode())
        time.sleep(0.2)
        yield sent


@pytest.mark.parametrize(
    "headers",
    [
        *({"Origin": origin} for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example")),
        *({"Host": host} for host in ("evil.example:8000", "127.0.0.1.evil.example", "[", "")),
        {"Host": "evil.example", "Origin": "http://evil.example"},  # its name stands for this address
    ],
)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json"])
def test_a_page_of_another_site_cannot_ask_for_videos(shared, site, upload, headers, kind):
    for client, address, body in ((shared, "/v1/videos", PANDA), (site, "/videos", upload.read_bytes())):
        sent = {"Content-Type": kind, "Host": "127.0.0.1:8000", **headers}
        assert client.post(address, content=body, headers=sent).status_code == 403
        assert client.get("/", headers=sent).status_code == 403
        ours = {"Host": "localhost:9000", "Origin": "http://localhost:9000"}  # through a tunnel
        assert client.post(address, content=body, headers=ours).status_code == 200


@pytest.mark.parametrize(
    "host", ["video.example", "video.example:80", "localhost", "[::1]:8000", "127.0.0.1:8000"]
)
def test_the_names_of_this_computer_and_of_the_host_option_are_ours(pipe, native_vae, tmp_path, host):
    for app in (
        serve.make_app(pipe, SIZES, tmp_path, limit=2, fps=8, host="video.example"),
        stream_to_browser.make_app(native_vae, host="video.example"),
    ):
        assert TestClient(app, headers={"Host": host, "Origin": f"http://{host}"}).get("/").status_code == 200


def test_who_has_the_token_may_come_by_any_name(pipe, tmp_path):
    app = serve.make_app(pipe, SIZES, tmp_path, limit=2, fps=8, token="secret")
    foreign = {"Host": "a.example", "Origin": "https://b.example", "Authorization": "bearer secret"}
    assert TestClient(app, headers=foreign).get("/v1/videos").status_code == 200


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_of_videos_have_each_once_though_the_last_one_was_deleted(shared, order):
    seen, page = [], {"has_more": True, "last_id": (newest(shared) or "") if order == "asc" else ""}
    ids = [ask(shared, "a panda").rpartition("/")[2] for _ in range(7)]
    assert shared.get(f"/v1/videos?limit=0&order={order}").status_code == 400
    while page["has_more"] and len(seen) < 7:
        page = shared.get(f"/v1/videos?limit=2&order={order}&after={page['last_id']}").json()
        seen += [video["id"] for video in page["data"]]
        shared.delete(f"/v1/videos/{page['last_id']}")
    assert seen[:7] == (ids if order == "asc" else ids[::-1])


def test_each_of_several_sizes_with_equal_pixels_and_seconds_can_be_had(blank, tmp_path):
    sizes = {"5x8x16": (5, 8, 16), "9x8x16": (9, 8, 16), "1x8x8": (1, 8, 8)}
    with TestClient(serve.make_app(blank, sizes, tmp_path, limit=9, fps=8), "http://127.0.0.1") as client:
        for size, frames in (("9x8x16", 9), ("5x8x16", 5), ("16x8", 5), ("8x8", 1)):
            address = ask(client, "a panda", size=size)
            wait(client, address, status="completed")
            assert video_files.probe(client.get(f"{address}/content").content).num_frames == frames
            assert client.get(f"{address}/content?variant=thumbnail").status_code == 400
        said = client.post("/v1/videos", json={"prompt": "a panda", "size": "9x9"}).json()["error"]["message"]
        assert said.endswith(
            "makes 5x8x16 (16x8, 1 seconds), 9x8x16 (16x8, 1 seconds), 1x8x8 (8x8, 0 seconds)"
        )


def test_a_size_that_does_not_run_ends_the_server_before_it_listens(pipe, tmp_path, caplog):
    with (
        pytest.raises(RuntimeError, match="5x6x16 failed: ValueError"),
        TestClient(serve.make_app(pipe, {"5x6x16": (5, 6, 16)}, tmp_path, limit=2, fps=8)),
    ):
        pass
    assert "multiple" in caplog.text


@pytest.fixture
def openai_client(gated, tmp_path):
    """Return OpenAI's own client of a server that asks for a token."""
    with served(serve.make_app(gated, SIZES, tmp_path, limit=1, fps=8, token="secret")) as address:
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
    assert (bad.status, bad.error.message) == ("failed", "failed: ValueError")
    assert [each.id for each in videos.list(limit=1)] == [bad.id, made.id], "in two pages"
    assert videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such video"):
        videos.retrieve(made.id)


def test_who_has_no_token_is_refused_but_for_the_health_address_and_a_full_queue_is_429(openai_client):
    client = httpx2.Client(base_url=openai_client.base_url.join("/"), timeout=60)
    assert client.get("/health").json() == {"status": "ready"}
    assert client.get("/").status_code == 200, "the page asks for the token"
    for path in ("/v1/videos/x", "/v1/videos"):
        for wrong in ("", "Bearer", "Bearer other", "Basic secret", "secret"):
            answer = client.get(path, headers={"Authorization": wrong} if wrong else {})
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert client.get(path, headers={"Authorization": "bEARER secret"}).status_code != 401
    with pytest.raises(openai.RateLimitError, match="1 videos are waiting"):
        [openai_client.videos.create(prompt="slow", extra_body={"steps": 2}) for _ in range(3)]


@pytest.mark.slow
def test_a_browser_gives_the_token_follows_a_prompt_cancels_it_and_plays_the_next(gated, page, tmp_path):
    answers = iter(["wrong", "secret"])
    page.on("dialog", lambda dialog: dialog.accept(next(answers)))
    with served(serve.make_app(gated, SIZES, tmp_path, limit=2, fps=8, token="secret")) as address:
        page.goto(address)
        assert page.locator("#size option").all_text_contents() == list(SIZES)
        page.fill("#prompt", "slow")
        page.click("#start")
        gated.steps.release()
        page.wait_for_function("document.getElementById('said').textContent === 'step 1 of 50'")
        assert next(answers, None) is None
        assert page.evaluate("document.getElementById('bar').value") == 1
        page.click("#cancel")
        gated.steps.release()
        page.fill("#prompt", "a panda")
        page.fill("#steps", "2")
        page.fill("#seed", "18446744073709551615")
        page.click("#start")
        page.wait_for_function("document.getElementById('video').videoWidth === 16", timeout=60_000)
        page.evaluate("document.getElementById('video').play()")
        page.wait_for_function("document.getElementById('video').currentTime > 0")
        page.fill("#prompt", "a panda plays a guitar in a bamboo forest by the sea")
        page.click("#start")
        page.wait_for_function("document.getElementById('said').textContent.includes('shorten it')")
        gated.open()
    page.click("#start")
    page.wait_for_function("document.getElementById('said').textContent.includes('Failed to fetch')")
    assert gated.prompts[len(SIZES) :] == ["slow", "a panda"]
    assert gated.options["generator"].initial_seed() == 2**64 - 1, "more bits than JavaScript's numbers have"


@pytest.fixture
def started(monkeypatch, blank, native_vae):
    """Return a function that runs a server's `main`, and returns what its client finds."""

    def start(server, *arguments, find):
        found = []

        def run(app, *, host, port, **options):
            assert host == "127.0.0.1", "the loopback interface alone"
            with served(app, **options) as site, httpx2.Client(base_url=site, timeout=60) as client:
                found.append(find(client))

        monkeypatch.setattr(server, "SHUTDOWN", 1)
        monkeypatch.setattr("uvicorn.run", run)
        monkeypatch.setattr("sys.argv", ["server", *arguments])
        server.main()
        return found[0]

    monkeypatch.setattr(serve, "load_pipeline", lambda *_, mesh, **__: setattr(blank, "mesh", mesh) or blank)
    monkeypatch.setattr(
        stream_to_browser.AutoencoderKLCogVideoX, "from_pretrained", lambda *_, **__: native_vae
    )
    monkeypatch.setattr(native_vae, "to", lambda _: native_vae)
    return start


@pytest.mark.parametrize("bundled", [True, False])
def test_a_model_is_served_at_its_size_by_its_name_and_the_bundled_one_in_its_way(
    started, blank, saved, bundled
):
    def first(client):
        made = client.post("/v1/videos", json={"prompt": "a panda"}).json()
        found = wait(client, f"/v1/videos/{made['id']}", status="completed")
        return client.get("/").text, made["model"], made["size"], found["steps"]

    page, *made = started(serve, *(() if bundled else ("--model", f"{saved()}/")), find=first)
    assert f"<option>{'9x64x96' if bundled else '5x8x16'}</option>" in page
    assert made == (["tiny-pipeline", "96x64", 20] if bundled else [Path(saved()).name, "16x8", 50])
    assert blank.options.get("guidance_scale") == (1.5 if bundled else None)


@pytest.mark.parametrize(("scale", "mesh"), [("1", (1, 8)), ("3", (1, 1))])
def test_without_guidance_all_devices_share_a_pass(started, blank, saved, scale, mesh):
    def make(client):
        wait(client, ask(client, "a panda"), status="completed")

    started(serve, "--model", saved(), "--guidance-scale", scale, find=make)
    assert (tuple(blank.mesh.shape.values()), blank.options["guidance_scale"]) == (mesh, float(scale))


@pytest.mark.parametrize("server", [serve, stream_to_browser])
def test_a_request_that_stands_still_does_not_keep_a_server_from_ending(server, started, saved):
    with contextlib.ExitStack() as stack:

        def send(client):
            stack.enter_context(
                half_sent(str(client.base_url), "/v1/videos" if server is serve else "/videos")
            )
            return time.monotonic()

        assert time.monotonic() - started(server, "--model", saved(), find=send) < 8


@pytest.mark.parametrize(
    ("server", "arguments", "words"),
    [
        (serve, ("--sizes", "480x720"), "got a size of '480x720': give FRAMESxHEIGHTxWIDTH"),
        (serve, ("--sizes", "9x0x32"), "got a size of '9x0x32': give FRAMESxHEIGHTxWIDTH"),
        (serve, ("--model", "WRONG"), "there is no model directory WRONG: give a directory, or a hub id"),
        (serve, ("--tp", "99"), "got a mesh of dp=1 x tp=99, 99 devices, where there are 8"),
        (
            serve,
            ("--model", "1.5", "--sizes", "5x16x16"),
            "got height=16, width=16: the model has positions for at most height=8",
        ),
        (serve, ("TOKEN",), "COGVIDEOX_TORCHAX_TOKEN has characters that a header cannot have: use ASCII"),
        (stream_to_browser, ("--model", "WRONG"), "there is no model directory WRONG: give a directory"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    server, arguments, words, monkeypatch, capsys, saved, tmp_path
):
    monkeypatch.chdir(tmp_path)
    Path("1.5").symlink_to(saved("text", "1.5"))
    monkeypatch.setenv("COGVIDEOX_TORCHAX_TOKEN", "ä" * ("TOKEN" in arguments))
    monkeypatch.setattr("sys.argv", ["server", *(each for each in arguments if each != "TOKEN")])
    capsys.readouterr()  # what was said while the model was saved
    with pytest.raises(SystemExit, match="^2$"):
        server.main()
    assert re.fullmatch(f"server: {re.escape(words)}.*\n", capsys.readouterr().err)


@pytest.fixture
def go(native_vae, monkeypatch):
    """Have the VAE wait, after its first chunk, for the event that is returned."""
    go, stream = threading.Event(), type(native_vae).decode_stream

    def waiting(chunks):
        yield next(chunks)
        assert go.wait(30)
        yield from chunks

    # What is wrong with latents is said at once.
    monkeypatch.setattr(
        type(native_vae), "decode_stream", lambda *z, **options: waiting(stream(*z, **options))
    )
    return go


@pytest.fixture
def site(native_vae, go):
    """Return a client of a running server, with room for two videos of 100 kB."""
    with (
        served(stream_to_browser.make_app(native_vae, queue=2, largest=100_000)) as address,
        httpx2.Client(base_url=address, timeout=60) as client,
    ):
        yield client
        go.set()


@pytest.fixture
def write_latents(native_vae, tmp_path):
    """Return a function that writes a latent file and returns its path."""

    def write(z, **changed):
        config, path = dict(native_vae.config) | changed, tmp_path / "z.safetensors"
        latent_files.save(latent_files.Latents(z, config, "small", Fraction(8), 4 * z.shape[2] - 3), path)
        return path

    return write


@pytest.fixture
def upload(write_latents):
    """Return the path of a latent file of five latent frames, 17 frames of 8 x 12."""
    return write_latents(reference.latents(5, height=2, width=3))


def next_frame(answer):
    """Return the next JPEG of a multipart answer, None at its end."""
    if answer.readline() == b"--frame--\r\n":
        return None
    kind, length, _ = (answer.readline() for _ in range(3))
    assert kind == b"Content-Type: image/jpeg\r\n"
    picture = Image.open(io.BytesIO(answer.read(int(length.split(b":")[1]))))
    answer.readline()
    return picture


def test_a_frame_is_there_before_the_next_chunk_is_decoded(site, go, upload, native_vae):
    where = site.post("/videos", content=upload.read_bytes()).text.strip()
    with urllib.request.urlopen(str(site.base_url.join(where)), timeout=30) as answer:
        first = next_frame(answer)
        assert not go.is_set()
        go.set()
        rest = list(iter(lambda: next_frame(answer), None))
    *_, frames = native_vae.decode_stream(latent_files.load(upload).tensor, output_dtype=torch.uint8)
    assert (1 + len(rest), first.size) == (17, (12, 8))
    written, pixels = io.BytesIO(), frames[0, :, -1].permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels).save(written, "JPEG", quality=stream_to_browser.QUALITY)
    assert rest[-1].tobytes() == Image.open(written).tobytes()
    assert site.get(where).status_code == 404, "a video is watched once"


Z = reference.latents(1, height=2, width=3)


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"no latents", 400, "the file is truncated or no safetensors file"),
        (b"", 400, "the file"),
        (b"x" * 100_001, 413, "larger than 100000 bytes"),
        ((Z, {"layers_per_block": 9}), 400, "layers_per_block is 9"),
        ((Z * float("nan"), {}), 400, "NaN"),
        ((torch.cat([Z, Z]), {}), 400, "holds 2 videos"),
    ],
)
def test_a_bad_upload_is_one_line_that_names_no_file_of_the_server(site, write_latents, data, status, words):
    if isinstance(data, tuple):
        data = write_latents(data[0], **data[1]).read_bytes()
    answer = site.post("/videos", content=data)
    assert answer.status_code == status
    assert re.fullmatch(f"(?!.*/tmp).*{words}.*\n", answer.text)


def test_no_more_videos_wait_than_the_queue_holds(site, upload, monkeypatch):
    def sent():
        return site.post("/videos", content=upload.read_bytes())

    assert [sent().status_code for _ in range(3)] == [200, 200, 429]
    monkeypatch.setattr(stream_to_browser, "PATIENCE", 0.0)
    late = sent()
    assert late.status_code == 200, "what nobody came for makes room"
    assert site.get(late.text.strip()).status_code == 404, "nor is it handed out any more"


def test_a_server_that_ends_stops_the_running_video(app, gated):
    with TestClient(app, "http://127.0.0.1") as client:
        wait(client, ask(client, "slow", steps=1000), status="in_progress")
        threading.Timer(0.5, gated.steps.release).start()
    assert gated.prompts[len(SIZES) :] == ["slow"]


def test_a_browser_shows_the_first_chunk_while_the_second_is_not_decoded(site, go, upload, page):
    page.goto(str(site.base_url))
    page.set_input_files("#file", upload)
    page.wait_for_function("document.getElementById('video').naturalWidth === 12", timeout=30_000)
    before = page.locator("#video").screenshot()
    assert not go.is_set()
    go.set()
    deadline = time.monotonic() + 30
    while page.locator("#video").screenshot() == before and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert page.locator("#video").screenshot() != before, "later frames take the place of the first"
