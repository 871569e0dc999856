"""Latent files: what is saved is loaded; whatever else is in a file ends in a result or in one line."""

import contextlib
import json
from fractions import Fraction
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from cogvideox_torchax.files import latents
from tests.broken import DEEP, JUNK, near

pytestmark = pytest.mark.usefixtures("torchax_off")

CONFIG = {"scaling_factor": 0.7, "shift_factor": None, "invert_scale_latents": False, "latent_channels": 16}
MADE = latents.Latents(torch.zeros(1, 16, 2, 3, 5), CONFIG, "vae", Fraction(30000, 1001), 8)


MISSING = object()


@pytest.mark.parametrize("shift", [None, 0.0, -0.25])
@pytest.mark.parametrize("scale", [0.7, 1, -2.5])
def test_what_is_saved_is_loaded(tmp_path, scale, shift):
    config = {"scaling_factor": scale, "shift_factor": shift, "invert_scale_latents": True}
    about = {"caption": "ünï — ✓ \x7f \n", "size": [24, 40]}
    tensors = torch.rand(2, 1, 16, 2, 3, 5)
    made = latents.Latents(tensors[0], config, "vae", Fraction(30000, 1001), 8, tensors[1], about=about)
    path = tmp_path / "a.safetensors"
    latents.save(made, path)
    loaded = latents.load(path)
    assert torch.equal(loaded.tensor, made.tensor)
    assert (loaded.config | config, loaded.model, loaded.fps) == (loaded.config, "vae", Fraction(30000, 1001))
    assert (loaded.num_frames, loaded.about, latents.about(path)) == (8, about, about)
    assert torch.equal(latents.load(path.read_bytes()).logvar, tensors[1])
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == [latents.KEY]


BROKEN = {
    "config": [[1], None, MISSING],
    "model": [MISSING],
    "fps": ["0", "-8", "8/0", 8, "nan", "1e99999999", "1/10000000000", "1e-9", "9" * 500, MISSING],
    "num_frames": ["eight", None, MISSING],
    "about": [3, None, MISSING],
}
CASES = [
    *(
        {latents.KEY: json.dumps({key: kept for key, kept in fields.items() if kept is not MISSING})}
        for fields in (MADE.fields | {field: value} for field, values in BROKEN.items() for value in values)
    ),
    *(
        {latents.KEY: text}
        for text in ("{", "[" * 10**5, '{"a":' * 10**5, "9" * 5000, "[2]", '{"format": 3}')
    ),
    *(None, {"format": "pt"}),
]


@pytest.mark.parametrize(
    "read",
    [latents.load, latents.about, lambda path: latents.load(path.read_bytes())],
    ids=["", "about", "bytes"],
)
@pytest.mark.parametrize("metadata", CASES, ids=[str(case)[-60:] for case in CASES])
def test_metadata_that_is_broken_or_another_programs_is_refused(tmp_path, metadata, read):
    path = tmp_path / "z.safetensors"
    save_file({latents.TENSOR: MADE.tensor}, path, metadata=metadata)
    with pytest.raises(latents.LatentsError, match="(z.safetensors|the file) is broken, or no latent"):
        read(path)


TEXTS = (
    *(near(MADE.fields).map(json.dumps), JUNK.map(json.dumps)),
    *(st.text(max_size=9), st.sampled_from([DEEP, '{"a":' * 10**5, "9" * 5000])),
)


@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_a_broken_file_is_one_line(tmp_path, refused, monkeypatch, examples):
    monkeypatch.setattr(
        "cogvideox_torchax.cli.common.load_vae", Mock(side_effect=ValueError("these latents can be decoded"))
    )

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(TEXTS))
    def check(text):
        data = save({latents.TENSOR: torch.ones(1, 16, 1, 2, 3)}, {latents.KEY: text})
        (tmp_path / "z.safetensors").write_bytes(data)
        assert "Error:" not in refused(
            "decode", f"{tmp_path}/z.safetensors", "-o", f"{tmp_path}/a.mp4", "--quiet"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["z.safetensors"]
        with contextlib.suppress(latents.LatentsError):
            latents.load(data)

    check()
