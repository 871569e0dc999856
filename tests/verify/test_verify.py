"""verify passes on sound backends, and names the layer of a broken one; its PSNR and SSIM."""

import json
import re
import sys
from types import MethodType

import numpy as np
import pytest
import torch

from cogvideox_torchax import backends, cli
from cogvideox_torchax.vae.tolerances import psnr, ssim
from cogvideox_torchax.verify import compare, report
from tests import reference


@pytest.fixture(scope="module")
def verifier(small_vae):
    """Return a verifier of 13 frames: one chunk to encode, and 4 latents, two equal chunks, to decode."""
    with torch.no_grad():
        return compare.Verifier(small_vae, reference.video(13, height=16, width=24))


def failed_of(result):
    return [contract.name for contract in result.contracts if not contract.passed]


@pytest.mark.slow
def test_all_backends_pass_layer_by_layer_and_a_transposed_weight_is_named(small_vae):
    # Root-mean-square errors of two ways to round are compared: a few hundred latents are too few for that.
    verifier = compare.Verifier(small_vae, reference.video(13, height=48, width=64))
    candidates = [
        compare.make_candidate(name, dtype, small_vae)
        for dtype in (torch.float32, torch.bfloat16)
        for name in ("torch", "torchax", "flax")
    ]
    wanted = {*filter(compare.LAYER_NAME.fullmatch, dict(small_vae.named_modules()))}
    for result in verifier.verify(candidates):
        assert (result.passed, result.first_bad_layer) == (True, None), report.verdict(result)
        assert len(result.whole["decode"].psnr) == len(result.whole["decode"].ssim) == 13 + 3
        # In Flax one kernel computes the last norm and convolution, so the norm alone has no result.
        left_out = {"decoder.norm_out"} if result.backend == "flax" else set()
        assert {layer.name for layer in result.layers} == wanted - left_out
        assert result.layers[0].name == "encoder.conv_in", "in order"
        assert (result.whole["decode"].relative > 1e-4) == (result.dtype == "bfloat16")
    kernel = candidates[2].vae.flax_vae.decoder.up_blocks[1].resnets[1].conv1.conv.kernel
    kernel[...] = kernel[...].swapaxes(-1, -2)
    (result,) = verifier.verify(candidates[2:3])
    assert (result.passed, result.first_bad_layer.name) == (False, "decoder.up_blocks.1.resnets.1")


@pytest.mark.slow
def test_a_dropped_cache_fails_and_is_named_with_its_chunk(verifier, small_vae):
    candidate = compare.make_candidate("torchax", torch.float32, small_vae)
    conv = candidate.vae.decoder.mid_block.resnets[1].conv2
    conv.forward = MethodType(lambda self, x, conv_cache=None: type(self).forward(self, x), conv)
    (result,) = verifier.verify([candidate])
    bad = result.first_bad_layer
    assert (result.passed, bad.name, bad.chunk) == (False, "decoder.mid_block.resnets.1", 1)
    assert failed_of(result) == ["decode: relative error"]


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        pytest.param(lambda frames: frames, [], id="right"),
        pytest.param(
            lambda frames: frames[:, :, :5],
            ["decode: shape (1, 3, 5, 16, 24) for (1, 3, 16, 16, 24)"],
            id="too short",
        ),
        pytest.param(lambda frames: frames * float("nan"), ["decode: relative error"], id="NaN"),
    ],
)
def test_a_whole_answer_is_compared_too(verifier, small_vae, spoil, failed, monkeypatch):
    """The layers are right, and what the backend makes of them is not."""

    def spoiled(self, kind, x, run=backends.Backend.run):
        return spoil(run(self, kind, x)) if kind == "decode" else run(self, kind, x)

    monkeypatch.setattr(backends.Backend, "run", spoiled)
    (result,) = verifier.verify([backends.backend("torch").of(small_vae)])
    assert (result.first_bad_layer, failed_of(result)) == (None, failed)
    assert json.loads(json.dumps(report.as_json([result], {}), allow_nan=False))["passed"] == (not failed)


def test_psnr_of_known_values():
    assert psnr(torch.full((4,), 0.2), torch.zeros(4), 2.0) == pytest.approx(20)


SIZE = ("--frames", "5", "--height", "16", "--width", "24")


def test_the_command_writes_json_and_tables(model_directory, tmp_path, capsys, torchax_off, monkeypatch):
    make = compare.make_candidate
    monkeypatch.setattr(compare, "make_candidate", lambda _, *more: make("torch", *more))  # for Flax too
    given = ("--model", str(model_directory), "--backends", "torch", "flax", "-o", str(tmp_path / "out"))
    assert cli.main(["verify", *given, *SIZE, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (printed["format"], printed["device"]) == (report.FORMAT, "8 x cpu"), "JAX's device"
    page = (tmp_path / "out" / "verify.md").read_text()
    assert "| encoder.conv_in" in page
    assert re.search(r"\| encode: relative error +\| \S+ +\| at most \S+ +\| PASS", page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "missing/model/dir"], "there is no model directory"),
        (["--height", "20"], "multiples of 8"),
        (["--video", "missing.mp4"], "there is no file"),
        (["--crop"], "--video"),
    ],
)
def test_a_wrong_input_is_one_line(arguments, message, refused, torchax_off):
    assert message in refused("verify", "--quiet", *arguments)


def test_a_broken_weight_is_named_and_makes_the_command_exit_with_1(
    model_directory, monkeypatch, capsys, torchax_off
):
    def broken(*args, make=compare.make_candidate):
        candidate = make(*args)
        torch.nn.init.zeros_(candidate.vae.encoder.conv_in.conv.bias)
        return candidate

    monkeypatch.setattr(compare, "make_candidate", broken)
    assert cli.main(["verify", "--model", str(model_directory), "--backends", "torch", *SIZE, "--quiet"]) == 1
    assert "the first layer outside the tolerance is encoder.conv_in, from chunk 0" in capsys.readouterr().out


def test_a_backend_that_is_not_installed_says_so(monkeypatch, refused, torchax_off):
    monkeypatch.setitem(sys.modules, "cogvideox_torchax.vae.nnx.wrapper", None)
    assert "the flax backend is not installed" in refused("verify", "--backends", "flax")


def test_it_is_scikit_images():
    metrics, rng = pytest.importorskip("skimage.metrics"), np.random.default_rng(0)
    smooth = rng.uniform(0, 255, (1, 3, 2, 6, 8)).repeat(5, 3).repeat(5, 4)
    noisy = smooth + rng.normal(0, 20, smooth.shape)
    smooth, noisy = (clip.clip(0, 255).round().astype(np.uint8) for clip in (smooth, noisy))
    planes = [(smooth[0, c, t], noisy[0, c, t]) for c in range(3) for t in range(2)]
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
    wanted = [metrics.structural_similarity(*plane, **options) for plane in planes]
    assert ssim(*map(torch.from_numpy, (noisy, smooth))) == pytest.approx(np.mean(wanted), abs=1e-6)


def test_small_pictures_have_smaller_windows_and_flat_ones_the_formulas_value():
    small = torch.arange(70, dtype=torch.uint8).view(1, 1, 2, 5, 7)
    assert ssim(small, small) == pytest.approx(1)
    flat, c1 = torch.zeros(1, 1, 1, 16, 16), (0.01 * 2) ** 2
    assert ssim(flat + 0.5, flat, 2.0) == pytest.approx(c1 / (0.25 + c1))  # no variance
