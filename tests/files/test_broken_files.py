"""Files that nobody here wrote end in a result or in one line and exit code 2, whatever is in them."""

import contextlib
import json
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save

from cogvideox_torchax.cli import common
from cogvideox_torchax.files import latents
from cogvideox_torchax.pipelines import stages
from tests.broken import DEEP, JUNK, near
from tests.files.test_latents import FIELDS

pytestmark = pytest.mark.usefixtures("torchax_off")

TEXTS = JUNK.map(json.dumps) | st.text(max_size=9) | st.sampled_from([DEEP, '{"a":' * 10**5, "9" * 5000])
DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4", "I64", "I8", "U16", "BOOL", "C64", "none"]
SIZES = st.sampled_from([0, 1, 2, 3, 2**31, 2**63, 2**70, -1])


def edited(fields):
    """Return a strategy for the same fields of text, some of them missing or changed."""
    changed = st.dictionaries(st.sampled_from(sorted(fields)), TEXTS, max_size=2)
    left_out = st.sets(st.sampled_from(sorted(fields)), max_size=1)
    return st.builds(
        lambda new, out: {name: text for name, text in (fields | new).items() if name not in out},
        *(changed, left_out),
    )


METADATA = near(FIELDS).map(lambda fields: {latents.KEY: json.dumps(fields)}) | TEXTS.map(
    lambda text: {latents.KEY: text}
)
REQUEST = {
    **{"prompt": "a cat", "negative_prompt": "", "image": None, "video": None, "frames": 9, "height": 16},
    **{
        "width": 24,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "strength": 0.8,
        "seed": 0,
        "dtype": "float32",
    },
}
STAGE = {
    "format": stages.FORMAT,
    "stage": "text",
    "request": json.dumps(REQUEST),
    "model": "abc",
}
STAGES = near(REQUEST).map(lambda values: STAGE | {"request": json.dumps(values)}) | edited(STAGE)


@st.composite
def broken(draw, metadata):
    """Draw the bytes of a safetensors file: cut, with bytes changed, or with a header that lies."""
    data = save({latents.TENSOR: torch.ones(1, 16, 1, 2, 3)}, metadata)
    kind = draw(st.sampled_from(["cut", "bytes", "header"]))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    if kind == "bytes":
        for place in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)):
            data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
        return data
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = near(header[latents.TENSOR]) | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(DTYPES),
            "shape": st.lists(SIZES, max_size=6),
            "data_offsets": st.lists(SIZES | st.just(384), min_size=2, max_size=2),
        }
    )
    header[latents.TENSOR] = draw(about)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["metadata", "latents", "stages", "stages' files"])
def test_a_broken_file_is_one_line(tmp_path, refused, monkeypatch, kind, examples):
    monkeypatch.setattr(common, "load_vae", Mock(side_effect=ValueError("these latents can be decoded")))
    contents = {
        "metadata": METADATA.map(lambda fields: save({latents.TENSOR: torch.ones(1, 16, 1, 2, 3)}, fields)),
        "latents": broken({latents.KEY: json.dumps(FIELDS)}),
        "stages": STAGES.map(lambda fields: save({"prompt_embeds": torch.ones(1, 2, 3)}, fields)),
        "stages' files": broken(STAGE),
    }
    file = str(tmp_path / "text.safetensors")
    command = ["decode", file, "-o", str(tmp_path / "new.mp4")]
    if kind.startswith("stages"):
        command = ["generate", "--model", str(tmp_path / "no model"), "-o", str(tmp_path / "new.mp4")]
        command += ["--save-stages", str(tmp_path), "--from-stage", "text"]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(contents[kind])
    def check(data):
        (tmp_path / "text.safetensors").write_bytes(data)
        assert "Error:" not in refused(*command, "--quiet")
        assert [path.name for path in tmp_path.iterdir()] == ["text.safetensors"]
        if kind in ("metadata", "latents"):
            with contextlib.suppress(latents.LatentsError):
                latents.loads(data, "z")

    check()
