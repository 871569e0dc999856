"""The server of prompts: its queue, progress and cancelling over HTTP, and its page in a browser."""

import shutil
import socket
import threading
import time

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient

from cogvideox_torchax import port, save_video
from cogvideox_torchax.files import video as video_files
from cogvideox_torchax.runtime.clock import CompileClock
from examples import serve, small_pipeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = {"9x32x48": (9, 32, 48), "1x32x32": (1, 32, 32)}

pytestmark = [pytest.mark.usefixtures("torchax_off"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def pipe():
    made = small_pipeline.pipeline(num_layers=1)
    made.set_progress_bar_config(disable=True)
    port(made)
    return made


class Gated:
    """A pipeline that waits after every step of a "slow" prompt, and fails for the prompt "bad"."""

    def __init__(self, pipe):
        self.pipe, self.steps, self.prompts, self.closed = pipe, threading.Semaphore(0), [], False

    def __call__(self, prompt, *, callback_on_step_end, **options):
        self.prompts.append(prompt)
        if prompt == "bad":
            raise ValueError("the prompt\nis bad")

        def on_step_end(*given):
            changed = callback_on_step_end(*given)
            if prompt == "slow" and not self.closed:
                assert self.steps.acquire(timeout=60)
            return changed

        return self.pipe(prompt, callback_on_step_end=on_step_end, **options)

    def open(self):
        self.closed = True
        self.steps.release(1000)


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
    assert client.get(f"{first}/file").status_code == 409
    gated.steps.release()
    wait(client, first, state="running", step=1)
    gated.open()
    wait(client, first, state="done", step=3)
    wait(client, second, state="done", step=2, ahead=0)
    generator = torch.Generator().manual_seed(7)
    size = {"num_frames": 9, "height": 32, "width": 48}
    made = pipe("slow", **size, num_inference_steps=3, generator=generator, output_type="np")
    save_video(made.frames[0], tmp_path / "want.mp4", fps=8)
    answer = client.get(f"{first}/file")
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.content == (tmp_path / "want.mp4").read_bytes()


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
    "wanted", [{"size": "9x9x9"}, {"steps": 0}, {"prompt": ""}, {"seed": -1}, {"prompt": "x" * 4001}]
)
def test_a_bad_request_is_refused_before_it_waits(client, gated, wanted):
    assert client.post("/videos", json={"prompt": "a panda", **wanted}).status_code == 422
    assert len(gated.prompts) == len(SIZES)


def test_a_size_that_does_not_run_ends_the_server_before_it_listens(pipe, tmp_path):
    app = serve.make_app(pipe, {"9x20x48": (9, 20, 48)}, tmp_path, limit=2, fps=8)
    with pytest.raises(RuntimeError, match="9x20x48 failed: .*multiple"), TestClient(app):
        pass


def test_a_server_that_ends_stops_the_running_video(app, gated):
    with TestClient(app) as client:
        address = ask(client, "slow", steps=1000)
        wait(client, address, state="running")
        threading.Timer(0.5, gated.steps.release).start()
    assert gated.prompts[len(SIZES) :] == ["slow"]


def test_it_listens_on_the_loopback_interface_unless_told_otherwise(monkeypatch, pipe):
    seen = {}
    monkeypatch.setattr(serve, "load_pipeline", lambda model, mesh: pipe)
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: seen.update(options))
    monkeypatch.setattr("sys.argv", ["serve"])
    serve.main()
    assert seen["host"] == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_follows_a_prompt_cancels_it_and_plays_the_next(app, gated):
    from playwright.sync_api import sync_playwright

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}")
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
            page.wait_for_function("document.getElementById('video').videoWidth === 48", timeout=60_000)
            page.evaluate("document.getElementById('video').play()")
            page.wait_for_function("document.getElementById('video').currentTime > 0")
            browser.close()
    finally:
        gated.open()
        server.should_exit = True
        thread.join()
    assert gated.prompts[len(SIZES) :] == ["slow", "a panda"]


@pytest.mark.parametrize("size", ["480x720", "9x0x32", "9xax32"])
def test_a_size_of_another_form_is_refused_in_one_line(size, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serve", "--sizes", size])
    with pytest.raises(SystemExit):
        serve.main()
    assert f"got size {size}: it takes FRAMESxHEIGHTxWIDTH" in capsys.readouterr().err
