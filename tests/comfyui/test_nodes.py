"""ComfyUI's nodes, loaded as ComfyUI loads a custom node, without its server; and their workflow."""

import importlib.util
import inspect
import json
import sys
import types

import pytest
import torch

from tests import reference
from tests.processes import ROOT


@pytest.fixture(scope="module")
def nodes():
    spec = importlib.util.spec_from_file_location("custom_nodes_cogvideox", ROOT / "comfyui" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bar(monkeypatch):
    """Return the list of updates of ComfyUI's progress bar: (frames done, of how many, the picture shown)."""
    seen = []

    class ProgressBar:
        def __init__(self, total):
            self.total = total

        def update_absolute(self, value, total=None, preview=None):
            seen.append((value, total, preview))

    # `from comfy.utils import ...` asks for this entry alone.
    monkeypatch.setitem(sys.modules, "comfy.utils", types.SimpleNamespace(ProgressBar=ProgressBar))
    return seen


def run(nodes, name, **given):
    """Run a node as ComfyUI does: an instance's FUNCTION method, by keywords, in inference mode."""
    kind = nodes.NODE_CLASS_MAPPINGS[f"CogVideoXTorchax{name}"]
    with torch.inference_mode():
        result = getattr(kind(), kind.FUNCTION)(**given)
    assert len(result) == len(kind.RETURN_TYPES)
    return result[0]


def test_every_node_keeps_the_contract(nodes):
    assert set(nodes.NODE_DISPLAY_NAME_MAPPINGS) == set(nodes.NODE_CLASS_MAPPINGS)
    for name, kind in nodes.NODE_CLASS_MAPPINGS.items():
        inputs = kind.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional", "hidden"}, name
        taken = [option for group in inputs.values() for option in group]
        parameters = list(inspect.signature(getattr(kind, kind.FUNCTION)).parameters)[1:]
        assert parameters == taken, f"{name} is called with {taken}"
        assert all(isinstance(type_, str) for type_ in kind.RETURN_TYPES), name
        assert kind.CATEGORY == "CogVideoX/torchax"
        for given in inputs["required"].values():
            assert isinstance(given[0], str | list)
            if len(given) == 2 and isinstance(given[0], list):
                assert given[1]["default"] in given[0]


@pytest.fixture
def stock(tmp_path):
    """Save a small VAE in the test's directory and return it."""
    vae = reference.small_vae(**reference.TWO_SHALLOW_LEVELS)
    vae.save_pretrained(tmp_path)
    return vae


@pytest.mark.usefixtures("torchax_off")
def test_images_go_to_latents_and_back_as_the_model_has_them(nodes, bar, tmp_path, stock):
    vae = run(nodes, "LoadVAE", model=str(tmp_path), dtype="float32", devices=1)
    pixels = torch.rand(9, 16, 24, 3, generator=torch.Generator().manual_seed(0))
    latents = run(nodes, "Encode", vae=vae, pixels=pixels)
    want = stock.encode(pixels.movedim(-1, 0)[None] * 2 - 1).latent_dist.mode()
    torch.testing.assert_close(latents["samples"], want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert [done for done, _, _ in bar] == list(range(1, 10))
    bar.clear()
    images = run(nodes, "Decode", vae=vae, samples=latents)
    frames = stock.decode(want).sample[0].movedim(0, -1)
    torch.testing.assert_close(images, (frames / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-4)
    *_, (done, _, (kind, picture, largest)) = bar
    assert (done, kind, picture.size, largest) == (9, "JPEG", (24, 16), 512)


@pytest.mark.usefixtures("torchax_off")
def test_tiling_leaves_the_vae_that_other_nodes_hold_whole(nodes, tmp_path, stock):
    vae = run(nodes, "LoadVAE", model=str(tmp_path), dtype="float32", devices=1)
    tiled = run(nodes, "TileVAE", vae=vae, height=16, width=24)
    assert (vae.use_tiling, tiled.use_tiling) == (False, True)
    assert tiled.tile_sample_min_width == 24 != vae.tile_sample_min_width
    assert next(tiled.parameters()) is next(vae.parameters())


def test_the_latents_of_a_picture_are_refused_by_their_shape(nodes, native_vae):
    with pytest.raises(ValueError, match=r"\(1, 16, 8, 8\): a video's are \(N, C, T, H, W\)"):
        run(nodes, "Decode", vae=native_vae, samples={"samples": torch.zeros(1, 16, 8, 8)})


def test_outside_of_comfyui_there_is_no_bar_to_move(nodes, native_vae):
    images = run(nodes, "Decode", vae=native_vae, samples={"samples": torch.zeros(2, 16, 1, 2, 3)})
    assert images.shape == (2, 8, 12, 3)


# By node of ComfyUI 0.3.64: the types of its inputs that take links, by name, and of its outputs.
COMFYUI = {
    "LoadVideo": ({}, ["VIDEO"]),
    "GetVideoComponents": ({"video": "VIDEO"}, ["IMAGE", "AUDIO", "FLOAT"]),
    "SaveLatent": ({"samples": "LATENT"}, []),
    "CreateVideo": ({"images": "IMAGE", "audio": "AUDIO"}, ["VIDEO"]),
    "SaveVideo": ({"video": "VIDEO"}, []),
}
WIDGETS = ("STRING", "INT", "FLOAT", "BOOLEAN")


def test_every_node_of_the_workflow_exists_and_every_link_joins_one_type(nodes):
    known = dict(COMFYUI)
    for name, kind in nodes.NODE_CLASS_MAPPINGS.items():
        given = {key: value[0] for key, value in kind.INPUT_TYPES()["required"].items()}
        linked = {
            key: type_ for key, type_ in given.items() if isinstance(type_, str) and type_ not in WIDGETS
        }
        known[name] = (linked, list(kind.RETURN_TYPES))
    workflow = json.loads((ROOT / "comfyui" / "workflow.json").read_text())
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for node in by_id.values():
        inputs, outputs = known[node["type"]]
        assert {each["name"]: each["type"] for each in node["inputs"]} == inputs, node["type"]
        assert [each["type"] for each in node["outputs"]] == outputs, node["type"]
        assert len({each["link"] for each in node["inputs"]}) == len(node["inputs"]), node["type"]
    for link, source, output, target, taken, type_ in workflow["links"]:
        start, end = by_id[source]["outputs"][output], by_id[target]["inputs"][taken]
        assert (start["type"], end["type"], end["link"]) == (type_, type_, link)
        assert link in start["links"]
