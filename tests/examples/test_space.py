"""The Space: its page in a browser, and what a hub reads of it and of the bundled pipeline's card."""

import re
import sys

import pytest
from huggingface_hub import ModelCard, SpaceCard

from benchmarks.pages import TINY_PIPELINE
from cogvideox_torchax import port
from cogvideox_torchax.files import video
from tests import processes, small_pipelines

SPACE = processes.ROOT / "space"

pytestmark = pytest.mark.usefixtures("torchax_off")


@pytest.fixture
def app(monkeypatch):
    monkeypatch.syspath_prepend(str(SPACE))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    import app

    return app


@pytest.fixture
def small_app(app, monkeypatch):
    """Return the page's module with a small pipeline in place of the bundled one."""
    pipes = {"jax": port(small_pipelines.one_layer()), "torch": small_pipelines.one_layer()}
    monkeypatch.setattr(app, "pipelines", lambda: pipes)
    monkeypatch.setattr(
        app, "SAMPLING", {"num_frames": 5, "num_inference_steps": 2, "height": 8, "width": 16}
    )
    return app


def test_a_prompt_becomes_two_videos_that_do_not_differ(small_app):
    *paths, said = small_app.generate("a panda")
    assert [video.probe(path).num_frames for path in paths] == [5, 5]
    assert len({*paths}) == 2
    assert float(re.search("at most (.*) of 255", said)[1]) < 0.1
    with pytest.raises(ValueError, match=r"got a prompt of \d+ tokens: the model takes \d+; shorten it"):
        small_app.generate("panda " * 500)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_browser_plays_both_videos_of_a_prompt(app, page):
    pytest.importorskip("gradio", reason="its versions of other packages are not ours: make test-space")
    blocks = app.page()
    _server, address, _share = blocks.launch(prevent_thread_lock=True, quiet=True, show_error=True)
    try:
        page.goto(address)
        page.get_by_label("Prompt").fill("x" * 100)
        page.get_by_role("button", name="Generate").click()
        page.get_by_text(re.compile("got a prompt of .* shorten it")).wait_for(timeout=60_000)
        page.get_by_label("Prompt").fill(app.PROMPTS[0])
        page.get_by_role("button", name="Generate").click()
        page.get_by_text("The two videos differ").wait_for(timeout=300_000)
        shown = "[...document.querySelectorAll('video')].map(each => [each.videoWidth, each.currentTime])"
        page.wait_for_function(f"(found => found.length == 2 && found.every(each => each[1] > 0))({shown})")
        assert [width for width, _time in page.evaluate(shown)] == [96, 96]
        assert float(re.search("at most (.*) of 255", page.inner_text("body"))[1]) < 1
    finally:
        blocks.close()


def test_the_hub_reads_the_cards():
    card, data = ModelCard.load(TINY_PIPELINE / "README.md"), SpaceCard.load(SPACE / "README.md").data
    assert (card.data.library_name, card.data.pipeline_tag) == ("diffusers", "text-to-video")
    for picture in re.findall(r"!\[.*\]\((.*)\)", card.text):
        assert (TINY_PIPELINE / picture).read_bytes() == (
            processes.ROOT / "docs/images/tiny-pipeline.png"
        ).read_bytes()
    assert (data.sdk, data.license, card.data.license) == ("gradio", "apache-2.0", "apache-2.0")
    assert (SPACE / data.app_file).is_file()
    assert len(data.short_description) <= 60, "the hub's limit"
