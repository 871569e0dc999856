"""The workflow of `comfyui/`: its nodes exist, and each link joins an output and an input of one type."""

import json

from tests.comfyui.test_nodes import nodes  # noqa: F401
from tests.processes import ROOT

# By node of ComfyUI 0.3.64: the types of its inputs that take links, by name, and of its outputs.
COMFYUI = {
    "LoadVideo": ({}, ["VIDEO"]),
    "GetVideoComponents": ({"video": "VIDEO"}, ["IMAGE", "AUDIO", "FLOAT"]),
    "SaveLatent": ({"samples": "LATENT"}, []),
    "CreateVideo": ({"images": "IMAGE", "audio": "AUDIO"}, ["VIDEO"]),
    "SaveVideo": ({"video": "VIDEO"}, []),
}
WIDGETS = ("STRING", "INT", "FLOAT", "BOOLEAN")


def test_every_node_of_the_workflow_exists_and_every_link_joins_one_type(nodes):  # noqa: F811
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
