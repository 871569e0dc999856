"""Support of long work: a profile, programs compiled beforehand, completion, JSON for a program."""

import json
import re
from pathlib import Path
from types import MappingProxyType

import jax
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache

from cogvideox_torchax import cli, runtime
from cogvideox_torchax.cli import common, compile
from cogvideox_torchax.runtime import COMPILE_CACHE_VARIABLE
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from tests import small_pipelines
from tests.cli.test_cli import report
from tests.files.test_video import write

pytestmark = pytest.mark.usefixtures("torchax_off", "in_an_empty_directory")


@pytest.fixture
def clip():
    write("clip.mp4", torch.zeros(1, 3, 5, 16, 24, dtype=torch.uint8))
    return "clip.mp4"


@pytest.fixture
def fresh_cache(tmp_path, restored_cache):
    """Return an empty compile cache that keeps every compiled program."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_profile_names_what_ran_after_the_models_layers(clip, fresh_cache):
    assert cli.main(["encode", clip, "-o", "z.safetensors", "--quiet", "--profile", "profile"]) == 0
    (trace,) = Path("profile/plugins/profile").rglob("*.xplane.pb")
    assert b"encoder.down_blocks.0.resnets.0.conv1" in trace.read_bytes()
    assert not jax.config.jax_compilation_cache_include_metadata_in_key


@pytest.mark.slow
def test_what_compile_has_compiled_no_later_process_compiles(clip, fresh_cache, capsys):
    assert cli.main(["compile", "5x16x24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # one line without `--quiet` too
    kinds = [(program["kind"], program["size"]) for program in found["programs"]]
    assert kinds == [("decode", "5x16x24"), ("encode", "5x16x24")]
    assert found["compile_cache"] == str(fresh_cache)
    before = programs_in(fresh_cache)
    assert len(before) == 4, "five frames are one chunk in each direction, of bytes and of floats"
    jax.clear_caches()  # as in another process
    assert cli.main(["reconstruct", clip, "-o", "again.mp4", "--quiet"]) == 0
    vae = common.load_vae(str(common.DEMO_MODEL), "torchax", "float32")
    z = vae.encode(runtime.to_jax(torch.zeros(1, 3, 5, 16, 24))).latent_dist.mode()
    vae.decode(z)
    assert programs_in(fresh_cache) == before


@pytest.mark.slow
def test_two_steps_compile_what_any_number_of_steps_runs(fresh_cache):
    pipe = small_pipelines.one_layer("text")
    runtime.without_torchax(pipe.save_pretrained, "model")
    cat = ["--prompt", "panda", "--frames", "5", "--height", "8", "--width", "16", "-o", "cat.mp4"]
    asked = ["generate", "--model", "model", *cat, "--quiet"]
    jax.clear_caches()  # what earlier tests compiled is in no cache on disk
    assert cli.main([*asked, "--num-inference-steps", "2"]) == 0
    before = {path.name for path in fresh_cache.iterdir()}
    assert before
    jax.clear_caches()  # as in another process
    assert cli.main([*asked, "--num-inference-steps", "5"]) == 0
    assert {path.name for path in fresh_cache.iterdir()} == before


def programs_in(cache: Path) -> set[str]:
    """Return the programs of chunks in a cache; operations on single arrays are left out."""
    return {path.name for path in cache.iterdir() if re.match(r"jit_\w+Chunk-", path.name)}


def test_a_longer_video_has_a_second_program_and_no_third():
    asked = []

    class Vae:
        config = MappingProxyType({"in_channels": 3, "latent_channels": 16, "temporal_compression_ratio": 4})
        num_sample_frames_batch_size, num_latent_frames_batch_size = 8, 2
        spatial_compression_ratio, dtype = 8, torch.float32

        def encode_stream(self, frames):
            asked.append(("encode", frames.dtype, *frames.shape))
            return iter(())

        def decode_stream(self, z, output_dtype):
            asked.append(("decode", output_dtype, z.dtype, *z.shape))
            return iter(())

    for direction in (ENCODE, DECODE):
        compile._run_all(Vae(), direction, 49, 16, 24)
    # Of 49 frames the first chunk holds 9 and each later one 8; of 13 latent frames it is 3 and 2. The
    # command line reads and writes bytes, `vae.encode` and `vae.decode` floats.
    assert asked == [
        *(("encode", dtype, 1, 3, 17, 16, 24) for dtype in (torch.uint8, torch.float32)),
        *(("decode", dtype, torch.float32, 1, 16, 5, 2, 3) for dtype in (torch.uint8, None)),
    ]


def test_compiling_for_nothing_is_refused(restored_cache, monkeypatch, capsys, refused):
    monkeypatch.setenv(COMPILE_CACHE_VARIABLE, "off")
    jax.config.update("jax_compilation_cache_dir", None)
    assert "--backend torch has no compile cache" in refused("compile", "5x16x24", "--backend", "torch")
    assert f"the compile cache is off: set {COMPILE_CACHE_VARIABLE}" in refused("compile", "5x16x24")
    assert report(capsys, "doctor")["compile cache"] == "off"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command in script


def test_every_option_has_help_and_json_is_a_switch():
    for name, command in cli.parser()._subparsers._group_actions[0].choices.items():
        for action in command._actions:
            assert action.help, f"{name} {action.dest}"
            assert "--json" not in action.option_strings or action.nargs == 0, f"{name} --json takes a value"
