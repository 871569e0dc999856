"""Models found: in directories, below "~", and in a cached snapshot of the hub, with no network."""

import shutil

import pytest
import torch

from benchmarks.plan import videos
from cogvideox_torchax import AutoencoderKLCogVideoX, backends
from cogvideox_torchax.files.models import ModelError, locate
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.checkpoint import locate_vae
from tests import reference

BARE, PIPELINE = "someone/cogvideox-vae-finetuned", "someone/my-own-video"

pytestmark = pytest.mark.usefixtures("torchax_off")


def snapshot(cache, repository):
    """Return the place of a snapshot of a repository, as huggingface_hub keeps one."""
    kept = cache / f"models--{repository.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    return kept / "snapshots" / ("0" * 40)


@pytest.fixture
def home(shallow_directory, tmp_path, monkeypatch):
    """Make a home directory with a VAE, and a hub cache with a bare VAE and a pipeline around one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.copytree(shallow_directory, tmp_path / "vae")
    shutil.copytree(shallow_directory, snapshot(tmp_path / "cache", BARE))
    pipeline = snapshot(tmp_path / "cache", PIPELINE)
    shutil.copytree(shallow_directory, pipeline / "vae")
    (pipeline / "model_index.json").write_text('{"_class_name": "CogVideoXPipeline"}')
    return tmp_path


@pytest.mark.parametrize("name", [BARE, PIPELINE, "~/vae", "~/vae/config.json"])
def test_a_vae_is_found_by_what_is_there_not_by_its_name(home, name):
    assert videos.weightless_vae(name, torch.float32).spatial_compression_ratio == 4
    assert (locate_vae(name) / "config.json").is_file()


@pytest.mark.parametrize("build", [AutoencoderKLCogVideoX, FlaxVAEForPipelines])
@pytest.mark.parametrize(
    ("name", "options"), [(BARE, {}), (PIPELINE, {"subfolder": "vae"}), (PIPELINE, None), ("~/vae", {})]
)
def test_either_build_loads_what_the_other_does(home, build, name, options):
    """Load by its class, and without options by its backend, which takes a pipeline's name alone."""
    load = backends.backend("flax" if build is FlaxVAEForPipelines else "torch").load
    vae = load(name, torch.float32).vae if options is None else build.from_pretrained(name, **options)
    assert tuple(vae.config["block_out_channels"]) == reference.SHALLOW["block_out_channels"]


@pytest.mark.parametrize("build", [AutoencoderKLCogVideoX, FlaxVAEForPipelines])
def test_two_names_of_a_dtype_are_refused(shallow_directory, build):
    with pytest.raises(ValueError, match="both dtype and torch_dtype"):
        build.from_pretrained(shallow_directory, dtype=torch.float32, torch_dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("./none", None, "there is no model directory none"),
        ("~/none/vae", None, "none/vae"),
        (__file__, "vae", "test_models.py is no file of a model: give the model's directory"),
        ("none", None, "give a directory, or a hub id, which is OWNER/NAME"),
        (
            "someone/not-cached",
            "vae",
            "cannot load someone/not-cached from the hub, nor from its cache .* give a local directory",
        ),
    ],
)
def test_what_is_not_there_is_named(home, name, part, words):
    with pytest.raises(ModelError, match=words):
        locate(name, part)


def test_a_part_lies_within_a_pipeline_and_a_model_alone_is_its_own(home):
    (home / "model_index.json").write_text("{}")
    assert locate(home, "vae") == locate("~", "vae") == home / "vae"
    assert locate(home / "vae", "vae") == home / "vae"
    assert locate(home, "transformer") == home / "transformer", "which is not there, as its reader says"
