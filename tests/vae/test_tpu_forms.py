"""Models with the forms and kernels that a TPU runs: a first frame by itself, large frames, switches."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jax_kernels
from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.vae.nnx.autoencoder import compiled
from jax_kernels.common import frames as over_frames, tiles
from jax_kernels.conv3d import xla as conv3d_xla
from jax_kernels.resample import op as resample_op
from tests import reference
from tests.vae.conftest import RUNS, check_bfloat16, check_close, shallow_latents


@pytest.fixture
def splits_first_frame():
    """Have each kernel that is asked split the first frame off; return the mock that it asks."""
    answer = mock.Mock(return_value=True)
    with reference.traced_anew() as patch:
        patch.setattr(over_frames, "splits_first_frame", answer)
        yield answer


@pytest.mark.parametrize("build", ["torchax", "flax"])
@pytest.mark.parametrize(
    ("kind", "x", "mesh"),
    [
        pytest.param("decode", reference.latents(1, batch=2), None, id="decode 1"),
        pytest.param("decode", reference.latents(5, batch=2), None, id="decode 5"),
        pytest.param(
            *("decode", reference.latents(5, width=12), (1, 8)),
            id="decode 5 over a mesh whose shards are padded",
        ),
        *(
            pytest.param("encode", reference.video(n, height=12, width=20), None, id=f"encode {n}")
            for n in (10, 13, 17)
        ),
    ],
)
@pytest.mark.slow_cases(but=["decode 5-torchax", "encode 13-flax"])
@pytest.mark.product_cases(
    "decode 1-flax", "decode 5-flax", "*mesh*-torchax", "encode 1[03]-torchax", "*17-flax"
)
def test_a_chunk_is_that_of_stock_diffusers(build, kind, x, mesh, shallow_vae, splits_first_frame):
    vae = port(reference.built(build, shallow_vae), mesh=mesh and make_mesh(*mesh))
    run, of_stock = RUNS[kind]
    check_close(run(vae, x), of_stock(shallow_vae, x))
    assert splits_first_frame.called


@pytest.mark.parametrize(("build", "mode"), [("torchax", "direct"), ("flax", "off")])
def test_a_model_has_a_program_for_each_choice_of_kernels(build, mode, stock, monkeypatch):
    vae, kernel = reference.built(build, stock), mock.Mock(wraps=jax_kernels.upsample)
    monkeypatch.setattr(jax_kernels, "upsample", kernel)
    compiled.cache_clear()  # programs of equal Flax models, which an earlier test may have made

    def is_traced_anew(choice):
        monkeypatch.setenv(tiles.SWITCH, choice)
        kernel.reset_mock()
        list(vae.decode_stream(shallow_latents()))
        return kernel.called

    assert [*map(is_traced_anew, ("on", "on", mode, "on"))] == [True, False, True, False]


# A first chunk of 1, 2 or 3 latent frames, or of 1 or 8 to 15 frames, is a program of its own, and so is a
# later chunk: 1 and 5 latent frames, and 1, 10 and 16 frames, have all of them.
# A still of 8 x 24 has too few latents for two errors to compare: 1.13 times, less when larger.
@pytest.mark.parametrize(
    ("build", "kind", "frames", "height", "width", "devices"),
    [
        # A build, what it does, frames, height and width of its input, and devices.
        pytest.param("torchax", "decode", 5, 2, 6, 1, id="torchax decodes two chunks"),
        pytest.param("flax", "decode", 1, 2, 6, 1, id="flax decodes a still"),
        pytest.param("flax", "decode", 1, 2, 6, 4, id="flax decodes a still over a mesh"),
        pytest.param("torchax", "encode", 1, 24, 72, 1, id="torchax encodes a still"),
        pytest.param("flax", "encode", 16, 8, 24, 1, id="flax encodes two chunks"),
        pytest.param("torchax", "encode", 10, 8, 24, 4, id="torchax encodes ten frames over a mesh"),
    ],
)
@pytest.mark.slow
def test_every_kind_of_length_has_the_error_of_pytorch(
    build, kind, frames, height, width, devices, small_vae, shallow_vae
):
    stock, draw = (shallow_vae, reference.latents) if kind == "decode" else (small_vae, reference.video)
    mesh = make_mesh(1, devices, devices=jax.devices()[:devices]) if devices > 1 else None
    vae = port(reference.built(build, stock).bfloat16(), mesh=mesh)
    # These forms are a TPU's while this block is open. It is not a fixture of the module: other tests of the
    # module would get them too.
    with reference.interpreted_kernels(lanes=8, large=8 * 24, on_mesh=True) as traced:
        check_bfloat16(vae, kind, draw(frames, height=height, width=width), stock)
    assert {"norm_conv3d", "upsampled"} & {*traced} == {"norm_conv3d", *["upsampled"] * (kind == "decode")}


@pytest.mark.slow
def test_a_gpu_convolves_bfloat16_without_float32_and_rounds_as_pytorch_does(small_vae):
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 8, 16, 24, 32), (3, 3, 3, 32, 32))]
    for convolve in (
        lambda x, kernel: jax_kernels.conv3d(x, kernel)[0],
        lambda x, kernel: jax_kernels.upsample(x, kernel[0], None, expand_time=True),
        lambda x, kernel: jax_kernels.downsample(x, kernel[0], None, compress_time=True),
    ):
        traced = jax.jit(convolve).trace(*structs)
        for platform, dtypes in (("cuda", {"bf16"}), ("cpu", {"f32"})):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert set(re.findall(r"stablehlo\.convolution.* -> tensor<[\dx]*(\w+)>", text)) == dtypes
    with reference.traced_anew() as patch:  # what the GPU computes, on this CPU
        for module in (conv3d_xla, resample_op):
            patch.setattr(module, "on_platform", lambda plain, **forms: forms.get("cuda", plain))
        vae = reference.built("torchax", small_vae).bfloat16()
        check_bfloat16(vae, "decode", reference.latents(5, height=6, width=8), small_vae)
        check_bfloat16(vae, "encode", reference.video(17, height=48, width=64), small_vae)
