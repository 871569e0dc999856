"""Upsampling in one Pallas kernel equals doubling before a convolution; halving of images and over shards."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import downsample, upsample
from jax_kernels.common.dispatch import Target
from jax_kernels.resample import op, reference, upsampled
from tests.jax_kernels.devices import (
    answer,
    check_rounded_once,
    check_rounding,
    compiled_for,
    drawn,
    on_mesh,
    pixels_first,
    struct,
)
from tests.reference import largest_error


def inputs(shape, outputs):
    x, kernel, bias = drawn(shape, (3, 3, shape[-1], outputs), (outputs,))
    return x, kernel / 8, bias


@pytest.mark.parametrize(
    ("shape", "outputs", "expand_time"),
    [
        pytest.param((1, 8, 3, 41, 16), 16, False, id="eight frames, a ragged row"),
        pytest.param((2, 8, 2, 9, 32), 16, False, id="two videos, two tiles of channels to one"),
        pytest.param((1, 4, 2, 50, 16), 32, True, id="four frames become eight, one tile to two"),
        pytest.param((1, 4, 3, 7, 16), 16, False, id="four frames"),
        pytest.param((1, 2, 2, 73, 16), 16, True, id="two frames become four, a ragged row"),
        pytest.param((1, 8, 1, 161, 16), 16, False, id="eight frames, a column left over"),
        pytest.param((2, 2, 1, 5, 16), 16, False, id="two frames"),
        pytest.param((1, 8, 2, 1, 16), 16, False, id="one column"),
        pytest.param((1, 5, 2, 8, 16), 16, True, id="five frames, the first alone"),
        *(
            pytest.param((2, 1, rows, 9, 16), 32, True, id=f"an image in bands, {rows} rows")
            for rows in (16, 12, 10, 9)
        ),
    ],
)
@pytest.mark.slow_cases(
    *("*16 rows", "*12 rows", "*9 rows", "two videos*", "*left over", "eight frames, a ragged*"),
    *("two frames", "four frames"),
)
def test_the_kernel_equals_doubling_and_a_convolution(shape, outputs, expand_time, interpreted):
    operands, frames = inputs(shape, outputs), shape[1]
    options = {"expand_time": expand_time, "first_frame_alone": frames % 2 == 1}
    got = upsample(*operands, **options)
    assert interpreted == ["upsampled"] * (2 if frames == 5 else 1)
    check_rounding(got, reference.upsample(*operands, **options), share=0.01)


@pytest.mark.parametrize(
    ("shape", "expand_time", "width", "mesh"),
    [
        pytest.param((1, 1, 4, 20, 16), False, (5, 8), (1, 4), id="an image"),
        pytest.param((1, 8, 3, 20, 16), False, (1, 1), (1, 4), id="four shards"),
        pytest.param((2, 4, 2, 28, 16), True, (7, 8), (2, 4), id="two videos, the last shard padded"),
        pytest.param((1, 2, 2, 20, 16), True, (5, 8), (1, 4), id="a shard of padding alone"),
        pytest.param((1, 8, 2, 70, 16), False, (7, 8), (1, 1), id="one shard of several products, padded"),
    ],
)
@pytest.mark.slow_cases("four shards", "one shard*")
def test_shards_give_what_one_device_gives(shape, expand_time, width, mesh, interpreted_on_mesh):
    operands = inputs(shape, 16)
    got = on_mesh(functools.partial(upsample, expand_time=expand_time), *width, *mesh)(*operands)
    assert interpreted_on_mesh
    real = 2 * shape[3]
    check_rounding(got[:, :, :, :real], reference.upsample(*operands, expand_time=expand_time), share=0.01)
    assert not jnp.any(got[:, :, :, real:])


@pytest.mark.slow
def test_shards_have_the_gradients_of_one_device(interpreted_on_mesh):
    operands, alone = inputs((1, 2, 2, 20, 16), 16), functools.partial(upsample, expand_time=True)

    def loss(operands, run):
        y = run(*operands)[:, :, :, :40].astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    want, found = (jax.grad(loss)(operands, run) for run in (alone, on_mesh(alone, 5, 8, 1, 4)))
    for got, wanted in zip(found, want, strict=True):
        assert largest_error(got, wanted) < 0.02


@pytest.mark.parametrize(("width", "bands"), [(360, 8), (1200, 4), (2400, 2), (3200, None)])
def test_an_image_is_cut_into_as_many_bands_as_fit_into_vmem(width, bands):
    def bands_of(x, kernel):
        form = op._kernel_for(Target("tpu"), x, kernel, False, False)
        return form and form.keywords["bands"]

    assert answer(bands_of, struct(1, 1, 16, width, 512), struct(3, 3, 512, 512)) == bands


@pytest.mark.parametrize(
    ("topology", "frames", "expand_time", "channels", "outputs", "width", "of_shard"),
    [
        ("v6e:1x1", 8, False, 256, 256, 45, False),
        ("v6e:1x1", 8, False, 128, 128, 161, True),
        ("v6e:1x1", 4, True, 256, 128, 45, True),
        ("v5e:1x1", 2, False, 128, 128, 45, True),
        ("v5p:2x2x1", 8, False, 256, 256, 680, True),  # as much VMEM as there is
    ],
)
@pytest.mark.slow_cases("v5p*")
def test_mosaic_compiles_it_and_frames_of_eight_stay_as_they_lie(
    topology, frames, expand_time, channels, outputs, width, of_shard
):
    def run(x, kernel, bias, *beside):
        x, *beside = map(pixels_first, (x, *beside))
        shard = (tuple(beside), jnp.int32(2 * width - 3)) if of_shard else (None, None)
        return pixels_first(upsampled.upsampled(x, kernel, bias, *shard, expand_time))

    beside = [struct(4, 1, 1, frames, channels)] * 2 * of_shard
    operands = struct(4, width, 1, frames, channels), struct(3, 3, channels, outputs), struct(outputs)
    compiled = compiled_for(topology, run, *operands, *beside)
    assert "upsampled" in compiled.as_text()
    if frames == 8 and not of_shard:  # tiles of fewer are laid anew
        assert compiled.memory_analysis().temp_size_in_bytes == 0


# Downsampling


def sums_of(operands):
    return reference.downsample(*(part.astype(jnp.float32) for part in operands), compress_time=False)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 6), (4, 7), (2, 2), (3, 9)])
@pytest.mark.parametrize("most", [0, op.MOST_IN_PATCHES])
def test_an_image_is_halved_as_a_tpu_compiles_fast(height, width, most, monkeypatch, on_tpu):
    monkeypatch.setattr(op, "MOST_IN_PATCHES", most)
    operands = inputs((1, 1, height, width, 4), 5)
    halve = functools.partial(downsample, compress_time=True, first_frame_alone=True)
    assert ("conv_general_dilated" in str(jax.make_jaxpr(halve)(*operands))) == (most == 0)
    check_rounded_once(halve(*operands), sums_of(operands))


@pytest.mark.parametrize(("frames", "width", "real", "padded"), [(1, 24, 1, 1), (2, 180, 45, 48)])
def test_shards_are_halved_with_their_neighbours_columns(frames, width, real, padded, interpreted_on_mesh):
    operands = inputs((1, frames, 4, width, 4), 5)
    got = on_mesh(functools.partial(downsample, compress_time=False), real, padded, 1, 4)(*operands)
    check_rounded_once(got[:, :, :, : width // 2], sums_of(operands))
