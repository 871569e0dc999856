"""Latent files: what is saved is loaded; a broken field is named."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cogvideox_torchax.files import latents

pytestmark = pytest.mark.usefixtures("torchax_off")

CONFIG = {"scaling_factor": 0.7, "shift_factor": None, "invert_scale_latents": False, "latent_channels": 16}
MADE = latents.Latents(torch.zeros(1, 16, 2, 3, 5), CONFIG, "vae", Fraction(30000, 1001), 8)
FIELDS = json.loads(MADE.metadata()[latents.KEY])


def written(path, metadata):
    save_file({latents.TENSOR: MADE.tensor}, path, metadata=metadata)
    return path


def with_fields(**changes):
    """Return the metadata with other fields, some of them of the config; `MISSING` ones are left out."""
    fields = {**FIELDS, "config": {**FIELDS["config"]}}
    for name, value in changes.items():
        owner = fields["config"] if name in latents.FACTORS else fields
        owner[name] = value
        if value is MISSING:
            del owner[name]
    return {latents.KEY: json.dumps(fields)}


MISSING = object()


def test_a_file_that_is_replaced_meanwhile_is_read_in_one_version(tmp_path, monkeypatch):
    latents.save(MADE, tmp_path / "z.safetensors")

    def opened(*args, **options):
        file = safe_open(*args, **options)
        latents.save(replace(MADE, tensor=MADE.tensor + 1, num_frames=5), tmp_path / "z.safetensors")
        return file

    monkeypatch.setattr("cogvideox_torchax.files.tensors.safe_open", opened)
    found = latents.load(tmp_path / "z.safetensors")
    assert (found.num_frames, found.tensor.max()) == (8, 0)


@pytest.mark.parametrize("shift", [None, 0.0, -0.25])
@pytest.mark.parametrize("scale", [0.7, 1, -2.5])
def test_what_is_saved_is_loaded(tmp_path, scale, shift):
    config = {"scaling_factor": scale, "shift_factor": shift, "invert_scale_latents": True}
    about = {"caption": "ünï — ✓ \x7f \n", "size": [24, 40]}
    tensors = torch.rand(2, 1, 16, 2, 3, 5)
    made = latents.Latents(tensors[0], config, "vae", Fraction(30000, 1001), 8, tensors[1], about=about)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in files:
        latents.save(made, path)
    loaded = latents.load(files[0])
    assert torch.equal(loaded.tensor, made.tensor)
    assert (loaded.config | config, loaded.model, loaded.fps) == (loaded.config, "vae", Fraction(30000, 1001))
    assert (loaded.num_frames, loaded.about, latents.about(files[0])) == (8, about, about)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert torch.equal(latents.loads(files[0].read_bytes(), "a").logvar, tensors[1])
    with safe_open(files[0], "pt") as file:
        assert list(file.metadata()) == [latents.KEY]


NUMBERS = ["0.7", math.nan, math.inf, -math.inf, True, [0.7], MISSING, 10**400, 1e39]
BROKEN = {
    "scaling_factor": [*NUMBERS, None, 0.0],
    "shift_factor": [value for value in NUMBERS if value is not MISSING],
    "invert_scale_latents": [None, 0, "false", MISSING],
    "config": [[1], MISSING],
    "model": [3, MISSING],
    "fps": ["0", "-8", "8/0", 8, "nan", "1e99999999", "1/10000000000", "1e-9", "1e400", "9" * 500, MISSING],
    "num_frames": ["8", 0, 8.0, True, 2**63, MISSING],
    "about": [[], None, MISSING],
}
CASES = [
    *((with_fields(**{field: value}), f"broken: its {field} is .* is wanted")
      for field, values in BROKEN.items() for value in values),
    *(({latents.KEY: text}, "broken: its metadata is no JSON")
      for text in ("{", "[" * 10**5, '{"a":' * 10**5, "9" * 5000)),
    *((metadata, "no latent file of this program")
      for metadata in (None, {"format": "pt"}, {latents.KEY: "[2]"}, {latents.KEY: '{"format": 3}'})),
    ({latents.KEY: '{"format": 2, "clips": {}}'}, "a shard of a data set: decode its directory"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "words"), CASES, ids=[str(case)[-60:] for case in CASES])
def test_metadata_that_is_broken_or_another_programs_is_refused_by_name(tmp_path, metadata, words):
    path = written(tmp_path / "z.safetensors", metadata)
    for read in (latents.load, latents.about, lambda path: latents.loads(path.read_bytes(), path)):
        with pytest.raises(latents.LatentsError, match=f"z.safetensors is {words}"):
            read(path)
