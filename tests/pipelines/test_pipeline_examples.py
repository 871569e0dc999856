"""Existing code of users: diffusers' own examples, torchax turned on by hand, saved pipelines."""

import importlib
import re
import textwrap

import diffusers.utils
import pytest
import torch
import torchax

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.vae.tolerances import relative_error
from tests import small_pipelines
from tests.pipelines.test_pipeline import latents

pytestmark = pytest.mark.usefixtures("torchax_off")

EXAMPLES = {
    "text": "pipeline_cogvideox",
    "image": "pipeline_cogvideox_image2video",
    "video": "pipeline_cogvideox_video2video",
    "control": "pipeline_cogvideox_fun_control",
}
"""The module of each pipeline, which carries its example."""


def example(kind: str, model: str) -> str:
    """Return diffusers' own example, for a local model and few steps, with a line added: `port(pipe)`."""
    module = importlib.import_module(f"diffusers.pipelines.cogvideo.{EXAMPLES[kind]}")
    lines = [line.strip() for line in module.EXAMPLE_DOC_STRING.splitlines()]
    code = textwrap.dedent("\n".join(line[4:] for line in lines if line.startswith((">>>", "..."))))
    code = code.replace("num_inference_steps=50", "num_inference_steps=2")
    loading = re.compile(r'from_pretrained\(.*?torch_dtype(.*?)\)(?:\.to\("cuda"\))?', re.DOTALL)
    return loading.sub(rf"from_pretrained({model!r}, torch_dtype\1)\nport(pipe)", code, count=1)


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.slow_cases("image", "video", "control")
def test_diffusers_own_example_runs_with_one_line_added(kind, saved, monkeypatch):
    written = []
    clip = [small_pipelines.picture(i) for i in range(small_pipelines.FRAMES)]
    monkeypatch.setattr(diffusers.utils, "load_image", lambda url: small_pipelines.picture())
    monkeypatch.setattr(diffusers.utils, "load_video", lambda url: clip)
    monkeypatch.setattr(diffusers.utils, "export_to_video", lambda frames, path, fps: written.append(frames))
    code = example(kind, str(saved(kind)))
    assert code.count("port(pipe)") == 1
    exec(code, {"port": port})
    (frames,) = written
    wanted = 49 if kind == "image" else small_pipelines.FRAMES  # that call has a default of its own
    assert (len(frames), frames[0].size) == (wanted, (small_pipelines.WIDTH, small_pipelines.HEIGHT))


def loaded(saved, kind="text"):
    pipe = small_pipelines.CLASSES[kind].from_pretrained(saved(kind))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_torchax_may_be_turned_on_by_the_user(saved):
    want = latents(loaded(saved))
    torchax.enable_globally()
    pipe = loaded(saved)
    assert {type(weight) for weight in pipe.transformer.parameters()} == {torch.nn.Parameter}
    assert relative_error(latents(port(pipe)), want) < 1e-4


def test_weights_that_were_moved_and_untied_by_hand_are_tied_again_and_stay_so(saved):
    pipe = loaded(saved)
    torchax.enable_globally()
    torch.nn.Module.to(pipe.text_encoder, "jax")
    for move in (
        port,
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to("jax"),
        lambda pipe: port(pipe, mesh=make_mesh(1, 2)),
    ):
        encoder = move(pipe).text_encoder
        assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
