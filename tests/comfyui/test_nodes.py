"""ComfyUI's nodes, loaded as ComfyUI loads a custom node, without its server; and their workflows."""

import functools
import importlib.util
import inspect
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import processes, reference, small_pipelines


@pytest.fixture(scope="module")
def nodes():
    spec = importlib.util.spec_from_file_location(
        "custom_nodes_cogvideox", processes.ROOT / "comfyui" / "__init__.py"
    )
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Interrupted(Exception):
    """ComfyUI's exception for a run that the user has interrupted."""


class Bar(list):
    """The updates of ComfyUI's progress bar: (frames or steps done, of how many, the picture shown).

    After `limit` updates, the user interrupts the run.
    """

    limit = 1000

    def check(self):
        if len(self) >= self.limit:
            raise Interrupted


@pytest.fixture
def bar(monkeypatch):
    seen = Bar()
    progress = SimpleNamespace(update_absolute=lambda *update: seen.append(update))
    # `from comfy.utils import ...` asks for this entry alone.
    monkeypatch.setitem(sys.modules, "comfy.utils", SimpleNamespace(ProgressBar=lambda total: progress))
    management = SimpleNamespace(throw_exception_if_processing_interrupted=seen.check)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    return seen


def results(nodes, name, **given):
    """Run a node as ComfyUI does: an instance's FUNCTION method, by keywords, in inference mode."""
    kind = nodes.NODE_CLASS_MAPPINGS[f"CogVideoXTorchax{name}"]
    with torch.inference_mode():
        result = getattr(kind(), kind.FUNCTION)(**given)
    assert len(result) == len(kind.RETURN_TYPES)
    return result


def run(nodes, name, **given):
    return results(nodes, name, **given)[0]


def test_every_node_keeps_the_contract(nodes):
    assert set(nodes.NODE_DISPLAY_NAME_MAPPINGS) == set(nodes.NODE_CLASS_MAPPINGS)
    for name, kind in nodes.NODE_CLASS_MAPPINGS.items():
        inputs = kind.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional", "hidden"}, name
        _self, *parameters = inspect.signature(getattr(kind, kind.FUNCTION)).parameters
        assert parameters == [option for group in inputs.values() for option in group], name
        assert all(isinstance(type_, str) for type_ in kind.RETURN_TYPES), name
        assert kind.CATEGORY == "CogVideoX/torchax"
        defaults = [
            (given, given[-1]["default"]) for given in inputs["required"].values() if "default" in given[-1]
        ]
        assert all(accepts(*each) for each in defaults), name


@pytest.mark.usefixtures("torchax_off")
def test_images_go_to_latents_and_back_as_the_model_has_them(nodes, bar, shallow_vae, shallow_directory):
    vae = run(nodes, "LoadVAE", model=shallow_directory, dtype="float32", devices=1)
    pixels = torch.rand(9, 16, 24, 3, generator=torch.Generator().manual_seed(0))
    latents = run(nodes, "Encode", vae=vae, pixels=pixels)
    want = shallow_vae.encode(pixels.movedim(-1, 0)[None] * 2 - 1).latent_dist.mode()
    torch.testing.assert_close(latents["samples"], want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert [done for done, _, _ in bar] == list(range(1, 10))
    bar.clear()
    images = run(nodes, "Decode", vae=vae, samples=latents)
    frames = (shallow_vae.decode(want).sample[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(images, frames, rtol=0, atol=1e-4)
    *_, (done, _, (kind, picture, largest)) = bar
    assert (done, kind, picture.size, largest) == (9, "JPEG", (24, 16), 512)


@pytest.mark.usefixtures("torchax_off")
def test_tiling_leaves_the_vae_that_other_nodes_hold_whole(nodes, native_vae):
    tiled = run(nodes, "TileVAE", vae=native_vae, height=16, width=24)
    assert (native_vae.use_tiling, tiled.use_tiling) == (False, True)
    assert tiled.tile_sample_min_width == 24 != native_vae.tile_sample_min_width
    assert next(tiled.parameters()) is next(native_vae.parameters())


IMAGE = torch.from_numpy(np.array(small_pipelines.picture()))[None] / 255


@pytest.fixture(scope="module")
def loaded(nodes, saved):
    """Return a function that loads a small pipeline as ComfyUI does, once: the pipeline and its VAE."""
    given = {"dtype": "float32", "dp": 1, "tp": 1}
    return functools.cache(lambda *kind: results(nodes, "LoadPipeline", model=saved(*kind), **given))


def sample(nodes, pipeline, **given):
    """Run the sampler; return its latents (N, C, T, H, W)."""
    options = {
        "num_frames": small_pipelines.FRAMES,
        "height": small_pipelines.HEIGHT,
        "width": small_pipelines.WIDTH,
        "prompt": "a panda plays a guitar",
        "negative_prompt": "the sea",
        "steps": 4,
        "cfg": 6.0,
        "scheduler": "of the model",
        "seed": 0,
    }
    return run(nodes, "Sample", pipeline=pipeline, **(options | given))["samples"]


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(("kind", "version"), [("text", "5b"), ("image", "1.5")])
@pytest.mark.slow_cases("image-1.5")
def test_a_prompt_becomes_the_frames_that_diffusers_makes_of_it(nodes, bar, loaded, kind, version):
    pipeline, vae = loaded(kind, version)
    # As a node that resizes may leave an image: some values are outside of [0, 1].
    image = {"image": torch.where(IMAGE == 0, -0.1, IMAGE)} if kind == "image" else {}
    latents = sample(nodes, pipeline, **image)
    assert latents.dtype == torch.float32
    assert [(done, total) for done, total, _ in bar] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    images = run(nodes, "Decode", vae=vae, samples={"samples": latents})
    stock = small_pipelines.one_layer(kind, version)
    want = stock(**small_pipelines.inputs(kind, negative_prompt="the sea")).frames[0]
    torch.testing.assert_close(images, want.movedim(1, -1), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("torchax_off")
def test_another_prompt_and_seed_of_the_same_size_compile_nothing(nodes, loaded):
    pipeline, vae = loaded()
    for other in {}, {"prompt": "the sea is calm", "seed": 2**64 - 1, "steps": 3, "cfg": 4.0}:
        with reference.compilations() as counted:
            run(nodes, "Decode", vae=vae, samples={"samples": sample(nodes, pipeline, **other)})
    assert counted == []


@pytest.mark.usefixtures("torchax_off")
def test_an_interrupt_stops_after_its_step_and_the_next_run_is_whole(nodes, bar, loaded):
    pipeline, _ = loaded()
    own, whole = pipeline.scheduler, sample(nodes, pipeline)
    bar.limit = len(bar) + 2
    with pytest.raises(Interrupted):
        sample(nodes, pipeline, scheduler="CogVideoXDPMScheduler")
    assert [done for done, _, _ in bar] == [1, 2, 3, 4, 1, 2]
    assert pipeline.scheduler is own
    bar.limit = 1000
    assert torch.equal(sample(nodes, pipeline), whole)


@pytest.mark.usefixtures("torchax_off")
def test_the_scheduler_of_the_menu_samples_as_in_diffusers(nodes, loaded):
    from diffusers import CogVideoXDPMScheduler

    pipeline, vae = loaded()
    chosen = sample(nodes, pipeline, scheduler="CogVideoXDPMScheduler")
    stock = small_pipelines.one_layer(scheduler=small_pipelines.scheduler(CogVideoXDPMScheduler))
    given = small_pipelines.inputs("text", negative_prompt="the sea", output_type="latent")
    want = stock(**given).frames.movedim(2, 1) / vae.config["scaling_factor"]
    torch.testing.assert_close(chosen, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(
    ("kind", "version", "given", "message"),
    [
        ("text", "5b", {"num_frames": 6}, "got num_frames=6: the model generates 5 or 9 of them"),
        ("text", "5b", {"height": 10}, "got height=10, width=16: both must be multiples of .*try height=8"),
        ("text", "1.5", {"height": 16}, "for at most height=8, width=16; try height=8, width=8"),
        ("text", "5b", {"image": IMAGE}, "got an image: a CogVideoXPipeline takes none"),
        ("image", "5b-I2V", {}, "got no image: a CogVideoXImageToVideoPipeline starts from one"),
        ("image", "5b-I2V", {"image": IMAGE.repeat(3, 1, 1, 1)}, "got 3 images: a video starts from one"),
        (
            "image",
            "5b-I2V",
            {"image": IMAGE, "height": 16},
            "got height=16, width=16: the model has learned .* height=8, width=16 alone",
        ),
        ("control", "5b", {}, "got a CogVideoXFunControlPipeline: the node samples from a prompt"),
    ],
    ids=["frames", "patches", "positions", "image", "no image", "three images", "learned", "control video"],
)
def test_what_a_model_cannot_sample_is_refused_in_one_line(nodes, loaded, kind, version, given, message):
    pipeline, _ = loaded(kind, version)
    with reference.compilations() as counted, pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        sample(nodes, pipeline, **given)
    assert counted == []


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(("dp", "tp", "mesh"), [(2, 4, (2, 4)), (1, 0, (1, 8))])
def test_the_pipeline_and_its_vae_are_split_over_dp_and_tp(nodes, saved, dp, tp, mesh):
    pipeline, vae = results(nodes, "LoadPipeline", model=saved(), dtype="bfloat16", dp=dp, tp=tp)
    assert vae is pipeline.vae
    assert {(*part.mesh.shape.values(), part.dtype) for part in (pipeline.transformer, vae)} == {
        (*mesh, torch.bfloat16)
    }


@pytest.mark.parametrize("padding", [0, 1])
def test_latents_of_cogvideoxwrappers_sampler_decode_as_those_of_ours(nodes, native_vae, padding):
    latents = torch.randn(2, 16, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    want = run(nodes, "Decode", vae=native_vae, samples={"samples": latents})
    assert want.shape == (2 * 8, 8, 12, 3), "the frames of both videos"
    scaled = latents.movedim(2, 1) * native_vae.config["scaling_factor"]
    padded = torch.cat([torch.full_like(scaled[:, :padding], 9.0), scaled], dim=1)
    images = run(nodes, "Decode", vae=native_vae, samples={"samples": padded, "additional_frames": padding})
    torch.testing.assert_close(images, want, rtol=0, atol=1e-5)


def test_the_latents_of_a_picture_are_refused_by_their_shape(nodes, native_vae):
    with pytest.raises(ValueError, match=r"\(1, 16, 8, 8\): a video's are \(N, C, T, H, W\)"):
        run(nodes, "Decode", vae=native_vae, samples={"samples": torch.zeros(1, 16, 8, 8)})


# By node of ComfyUI 0.3.64: the types of its inputs that take links, by name, and of its outputs.
COMFYUI = {
    "LoadVideo": ({}, ["VIDEO"]),
    "GetVideoComponents": ({"video": "VIDEO"}, ["IMAGE", "AUDIO", "FLOAT"]),
    "SaveLatent": ({"samples": "LATENT"}, []),
    "CreateVideo": ({"images": "IMAGE", "audio": "AUDIO"}, ["VIDEO"]),
    "SaveVideo": ({"video": "VIDEO"}, []),
}
WIDGETS = {"STRING": str, "INT": int, "FLOAT": float, "BOOLEAN": bool}


def accepts(given, value):
    """Return whether a widget, of a menu or of a type and its options, can have a value."""
    kind, *options = given
    if isinstance(kind, list):
        return value in kind
    return isinstance(value, WIDGETS[kind]) and (
        kind in ("STRING", "BOOLEAN") or options[0]["min"] <= value <= options[0]["max"]
    )


@pytest.mark.parametrize("name", ["encode_and_decode", "prompt_to_video"])
def test_every_node_of_a_workflow_exists_and_every_link_joins_one_type(nodes, name):
    known, widgets = dict(COMFYUI), {}
    for key, kind in nodes.NODE_CLASS_MAPPINGS.items():
        given = {name: value for group in kind.INPUT_TYPES().values() for name, value in group.items()}
        widgets[key] = [
            value for value in given.values() if isinstance(value[0], list) or value[0] in WIDGETS
        ]
        linked = {name: value[0] for name, value in given.items() if value not in widgets[key]}
        known[key] = (linked, list(kind.RETURN_TYPES))
    workflow = json.loads((processes.ROOT / "comfyui" / "example_workflows" / f"{name}.json").read_text())
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for node in by_id.values():
        inputs, outputs = known[node["type"]]
        assert {each["name"]: each["type"] for each in node["inputs"]} == inputs, node["type"]
        assert [each["type"] for each in node["outputs"]] == outputs, node["type"]
        values = iter(node["widgets_values"] if node["type"] in widgets else [])
        for given in widgets.get(node["type"], ()):
            assert accepts(given, next(values)), f"{node['type']}: {given}"
            if given[0] == "INT" and given[1].get("control_after_generate"):
                assert next(values) in ("fixed", "increment", "decrement", "randomize")
        assert [*values] == [], node["type"]
    for link, source, output, target, taken, type_ in workflow["links"]:
        start, end = by_id[source]["outputs"][output], by_id[target]["inputs"][taken]
        assert (start["type"], end["type"], end["link"]) == (type_, type_, link)
        assert link in start["links"]
