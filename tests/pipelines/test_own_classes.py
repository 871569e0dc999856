"""Code of diffusers and of its users: own classes, examples, torchax turned on by hand, saved pipelines."""

import contextlib
import copy
import inspect
import itertools
import re
import textwrap
from unittest import mock

import jax
import numpy as np
import pytest
import torch
import torchax
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.cli.common import TINY_PIPELINE
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE
from examples.train_pipeline import scenes
from tests import small_pipelines
from tests.pipelines.test_pipeline import TOLERANCE, frames, latents
from tests.reference import largest_error

pytestmark = pytest.mark.usefixtures("torchax_off")

KINDS = {
    "text, 5b": ("text", "5b", None),
    "text, 2b": ("text", "2b", None),
    "image, 5b": ("image", "5b-I2V", None),
    "image, 1.5": ("image", "1.5", None),
    "video": ("video", "5b", None),
    "control": ("control", "5b", None),
    "text on a mesh": ("text", "2b", (2, 2)),
    "image on a mesh": ("image", "5b-I2V", (2, 2)),
    "video on a mesh": ("video", "5b", (2, 2)),
}
CASES = [
    case
    for case in itertools.product(KINDS, (CogVideoXDDIMScheduler, CogVideoXDPMScheduler))
    if case != ("control", CogVideoXDPMScheduler)  # a TypeError in PyTorch too
]


OPTIONS = (
    {"output_type": "np"},
    {"output_type": "np", "callback_on_step_end": lambda *given: {"latents": given[-1]["latents"] * 0.5}},
)


@pytest.mark.parametrize(("name", "scheduler"), CASES)
@pytest.mark.slow_cases(
    but=[
        "text, 5b-CogVideoXDDIMScheduler",
        "image, 1.5-CogVideoXDPMScheduler",
        "video on a mesh-CogVideoXDDIMScheduler",
    ]
)
def test_a_pipeline_of_diffusers_makes_what_it_makes_in_pytorch(name, scheduler):
    kind, version, shape = KINDS[name]
    stock = small_pipelines.build(kind, version, scheduler=small_pipelines.scheduler(scheduler, version))
    ported = port(copy.deepcopy(stock), mesh=shape and make_mesh(*shape, devices=jax.devices()[:4]))
    own = type(stock)(**{**ported.components, "scheduler": copy.deepcopy(stock.scheduler)})

    for options in OPTIONS:
        want = frames(stock, kind, **options)
        for enabled, pipe in itertools.product((False, True), (ported, own)):
            with torchax.default_env() if enabled else contextlib.nullcontext():
                assert largest_error(frames(pipe, kind, **options), want) < FLOAT32_RELATIVE
    assert type(ported.scheduler) is type(own.scheduler) is scheduler


def example(kind: str, model: str) -> str:
    """Return diffusers' own example, for a local model and few steps, with a line added: `port(pipe)`."""
    text = inspect.getmodule(small_pipelines.CLASSES[kind]).EXAMPLE_DOC_STRING
    lines = [line[4:] for line in map(str.strip, text.splitlines()) if line.startswith((">>>", "..."))]
    code = textwrap.dedent("\n".join(lines)).replace("num_inference_steps=50", "num_inference_steps=2")
    loading = r'(?s)from_pretrained\(.*?torch_dtype(.*?)\)(?:\.to\("cuda"\))?'
    return re.sub(loading, rf"from_pretrained({model!r}, torch_dtype\1)\nport(pipe)", code, count=1)


@pytest.mark.parametrize("kind", small_pipelines.CLASSES)
@pytest.mark.slow_cases("image", "video", "control")
def test_diffusers_own_example_runs_with_one_line_added(kind, saved):
    code, export = example(kind, saved(kind)), mock.Mock()
    assert code.count("port(pipe)") == 1
    picture, count = small_pipelines.picture, small_pipelines.FRAMES
    loaders = {"load_image": lambda url: picture(), "load_video": lambda url: [*map(picture, range(count))]}
    with mock.patch.multiple("diffusers.utils", export_to_video=export, **loaders):
        exec(code, {"port": port})
    export.assert_called_once()
    written = export.call_args.args[0]
    wanted = 49 if kind == "image" else count  # that call has a default of its own
    assert (len(written), written[0].size) == (wanted, (small_pipelines.WIDTH, small_pipelines.HEIGHT))


def loaded(directory):
    return small_pipelines.CLASSES["text"].from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("moved", [False, True])
def test_torchax_may_be_on_and_weights_that_were_moved_and_untied_by_hand_are_tied_again_and_stay_so(
    saved, moved
):
    want, before = latents(loaded(saved())), loaded(saved())
    torchax.enable_globally()
    pipe = before if moved else loaded(saved())
    assert {type(weight) for weight in pipe.transformer.parameters()} == {torch.nn.Parameter}
    if moved:
        torch.nn.Module.to(pipe.text_encoder, "jax")
    for move in (
        port,
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to("jax"),
        lambda pipe: port(pipe, mesh=make_mesh(1, 2)),
    ):
        encoder = move(pipe).text_encoder
        assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
        assert largest_error(latents(pipe), want) < TOLERANCE


# The bundled pipeline shows what prompts say, by the judge of the example that trained it.

PLACES = {
    "PyTorch": lambda pipe: pipe,
    "one device": port,
    "mesh": lambda pipe: port(pipe, mesh=make_mesh(2, 4)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.slow_cases(but=["one device"])
def test_videos_of_the_bundled_pipeline_show_what_prompts_say(place):
    pipe = place(loaded(TINY_PIPELINE))
    chosen = [scene for name in scenes.GROUPS[:2] for scene in scenes.drawn(name, 4)]
    shares = scenes.shares(chosen, scenes.sample(pipe, chosen, 0, steps=10, batch=8))
    assert shares["all"] >= 0.75, "the least share of right videos, of few, that a working pipeline makes"


def test_the_judge_reads_rendered_clips_right_and_reversed_ones_wrong():
    rng = np.random.default_rng(0)
    for scene in (scenes.SCENES[i] for i in rng.integers(len(scenes.SCENES), size=40)):
        clip = scenes.render(scene, rng)
        assert [scenes.judge(clip) == scene, scenes.judge(clip[::-1]) == scene] == [
            True,
            scene.motion == "still",
        ]
