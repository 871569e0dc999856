"""A latent file that is broken is refused, by the field that is."""

import json
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cogvideox_torchax.files import latents

pytestmark = pytest.mark.usefixtures("torchax_off")

CONFIG = {"scaling_factor": 0.7, "shift_factor": None, "invert_scale_latents": False, "latent_channels": 16}


def saved(path, **config):
    made = latents.Latents(torch.zeros(1, 16, 2, 3, 5), {**CONFIG, **config}, "vae", Fraction(30000, 1001), 8)
    latents.save(made, path)
    return path


def edited(path, **fields):
    """The file with other metadata; None takes a field out."""
    with safe_open(path, "pt") as file:
        metadata, tensor = file.metadata() | fields, file.get_tensor(latents.TENSOR)
    metadata = {name: value for name, value in metadata.items() if value is not None}
    save_file({latents.TENSOR: tensor}, path, metadata=metadata)
    return path


def with_config(path, **config):
    """The file with another config and the fields beside it that repeat it."""
    shaping = {**CONFIG, **config}
    repeated = {name: json.dumps(value) for name, value in config.items()}
    return edited(path, config=json.dumps(shaping), **repeated)


@pytest.mark.parametrize("shift", [None, 0.0, -0.25])
@pytest.mark.parametrize("scale", [0.7, 1, -2.5])
def test_what_is_saved_is_loaded(tmp_path, scale, shift):
    path = saved(
        tmp_path / "z.safetensors", scaling_factor=scale, shift_factor=shift, invert_scale_latents=True
    )
    loaded = latents.load(path)
    assert loaded.config["scaling_factor"] == scale
    assert loaded.config["shift_factor"] == shift
    assert loaded.config["invert_scale_latents"] is True
    assert (loaded.model, loaded.fps, loaded.num_frames) == ("vae", Fraction(30000, 1001), 8)


NUMBERS = {
    "text": '"0.7"',
    "no JSON": "0.7x",
    "nothing": "",
    "not a number": "NaN",
    "infinite": "Infinity",
    "minus infinite": "-Infinity",
    "a flag": "true",
    "a list": "[0.7]",
    "missing": None,
}
BROKEN = {
    **{f"scaling_factor, {name}": ("scaling_factor", value) for name, value in NUMBERS.items()},
    "scaling_factor, null": ("scaling_factor", "null"),
    "scaling_factor, zero": ("scaling_factor", "0.0"),
    **{f"shift_factor, {name}": ("shift_factor", value) for name, value in NUMBERS.items()},
    "invert_scale_latents, null": ("invert_scale_latents", "null"),
    "invert_scale_latents, a number": ("invert_scale_latents", "0"),
    "invert_scale_latents, text": ("invert_scale_latents", '"false"'),
    "invert_scale_latents, missing": ("invert_scale_latents", None),
    "config, a list": ("config", "[1]"),
    "config, no JSON": ("config", "{"),
    "config, missing": ("config", None),
    "model, missing": ("model", None),
    "fps, zero": ("fps", "0"),
    "fps, below zero": ("fps", "-8"),
    "fps, no fraction": ("fps", "8/0"),
    "num_frames, text": ("num_frames", "many"),
    "num_frames, zero": ("num_frames", "0"),
}


@pytest.mark.parametrize(("field", "value"), BROKEN.values(), ids=BROKEN)
def test_a_broken_field_is_named(tmp_path, field, value):
    path = edited(saved(tmp_path / "z.safetensors"), **{field: value})
    with pytest.raises(latents.LatentsError, match=f"z.safetensors is broken: its {field} is .* is wanted"):
        latents.load(path)


@pytest.mark.parametrize(
    ("field", "value"), [("scaling_factor", None), ("scaling_factor", "0.7"), ("invert_scale_latents", 0)]
)
def test_a_field_that_is_broken_in_the_config_as_well_is_named(tmp_path, field, value):
    path = with_config(saved(tmp_path / "z.safetensors"), **{field: value})
    with pytest.raises(latents.LatentsError, match=f"its {field} is .* is wanted"):
        latents.load(path)


@pytest.mark.parametrize(
    ("field", "value"), [("scaling_factor", "1.5"), ("shift_factor", "0.5"), ("invert_scale_latents", "true")]
)
def test_a_field_that_contradicts_the_config_is_named(tmp_path, field, value):
    path = edited(saved(tmp_path / "z.safetensors"), **{field: value})
    with pytest.raises(latents.LatentsError, match=f"its {field} is {value.title()}, its config's is "):
        latents.load(path)
