"""Norm, SiLU and convolution in one Pallas kernel equal the three in a row, and Mosaic compiles it."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.plan import chips
from jax_kernels import NormParams, norm_conv3d
from jax_kernels.common import columns, tiles
from jax_kernels.norm_conv3d import reference, sizes, tpu
from tests.jax_kernels.devices import (
    A_UNIT,
    answer,
    check_rounding,
    compiled_for,
    drawn,
    on_mesh,
    pixels_first,
    struct,
)
from tests.reference import cases, interpreted_kernels, largest_error, traced_anew

GROUPS = 4


def inputs(shape, outputs, *, cell=None, cached=True):
    """x, norm, kernel, bias and cache; latents that are `cell` times smaller in space, or none."""
    videos, frames, height, width, channels = shape
    vector, matrix = (channels,), (4, channels)
    zq = cell and (videos, max(1, frames // 4), height // cell, width // cell, 4)
    of_norm = vector, vector, *((zq, matrix, vector, matrix, vector) if cell else ())
    of_cache = (videos, 2, height, width, channels) if cached else None
    x, kernel, bias, cache, *norm = drawn(shape, (3, 3, 3, channels, outputs), (outputs,), of_cache, *of_norm)
    return x, NormParams(*norm), kernel / 16, bias, cache


def check(results, operands, residual):
    """Check that results are the reference's, with zeros in padding columns."""
    (y, latest, columns), (_, frames, _, real, _) = results, operands[0].shape
    # Results that Winograd's filtering gives together; frames of less than four columns do without.
    tile = frames // 2 if frames in (4, 8) and real >= 4 else 0
    want, want_latest, _ = reference.norm_conv3d(*operands, num_groups=GROUPS, residual=residual, tile=tile)
    # An activated value next to a rounding's edge may fall on its other side. The sums that it is in then
    # move by less than their last place, which rounds few of them otherwise.
    for mine, plain in ((y, want), (latest, want_latest)):
        check_rounding(mine[:, :, :, :real], plain)
        assert not jnp.any(mine[:, :, :, real:])
    pixels = np.asarray(y, np.float64)
    assert largest_error(columns.mean, pixels.mean(2)) < 1e-5
    assert largest_error(columns.m2, pixels.var(2) * pixels.shape[2]) < 1e-5


def given(shape, outputs, cell, cached, added):
    """Return a case's operands, and its options: the residual among them."""
    residual = jnp.ones((*shape[:4], outputs), jnp.bfloat16) / 3 if added else None
    options = {"num_groups": GROUPS, "residual": residual, "first_frame_alone": shape[1] % 2 == 1}
    return inputs(shape, outputs, cell=cell, cached=cached), options


@pytest.mark.parametrize(
    ("shape", "outputs", "cell", "cached", "added"),
    cases(
        {
            "eight frames, a ragged row": ((1, 8, 4, 26, 16), 16, 2, True, True),
            "eight frames, two chunks": ((1, 8, 4, 88, 16), 16, 2, True, True),
            "eight frames, one tile to two, two chunks": ((1, 8, 4, 80, 16), 32, 2, True, True),
            "two frames, blocks filled": ((1, 2, 4, 96, 16), 16, None, True, False),
            "four frames, blocks filled": ((1, 4, 4, 48, 16), 16, 2, True, True),
            "two videos, two tiles of channels to one": ((2, 8, 2, 24, 32), 16, 2, True, False),
            "four frames, one tile to two": ((1, 4, 4, 52, 16), 32, 2, True, True),
            "two frames of a plain norm": ((1, 2, 2, 40, 32), 32, None, True, False),
            "four frames, two tiles to four, in two shares": ((1, 4, 2, 52, 32), 64, 2, True, True),
            "four frames to three channels": ((1, 4, 4, 52, 16), 3, 2, True, True),
            "a first frame to three channels": ((1, 1, 4, 104, 16), 3, 2, False, False),
            "two frames to three tiles": ((1, 2, 2, 40, 16), 48, None, True, False),
            "the start of a video, latents of its size": ((1, 2, 2, 9, 16), 16, 1, False, True),
            "the start of a video, eight frames": ((1, 8, 2, 24, 32), 16, 2, False, False),
            "a first frame": ((1, 1, 8, 104, 16), 16, 8, False, True),
            "two first frames, two tiles of channels, a ragged row": ((2, 1, 4, 20, 32), 32, 2, False, False),
            "a first frame of a plain norm": ((1, 1, 2, 96, 16), 32, None, False, True),
            "fewer columns than a unit": ((1, 2, 4, 6, 16), 16, None, True, False),
            "fewer columns than a register of sums": ((1, 4, 4, 3, 16), 16, None, True, True),
        },
        quick=["two frames, blocks filled"],
        product=[
            "eight frames, two chunks",
            "four frames, one tile to two",
            "a first frame to three channels",
            "the start of a video, eight frames",
            "a first frame of a plain norm",
        ],
    ),
)
def test_the_kernel_equals_norm_activation_and_convolution(shape, outputs, cell, cached, added, interpreted):
    operands, options = given(shape, outputs, cell, cached, added)
    results = norm_conv3d(*operands, **options)
    assert "norm_conv3d" in interpreted
    # Blocks of these widths are filled.
    assert ("norm_conv3d in place" in interpreted) == (cached and shape[3] in (48, 80, 96))
    check(results, operands, options["residual"])


@pytest.mark.parametrize(
    ("frames", "channels", "outputs", "cell"),
    [
        # Frames, channels, outputs and columns of a latent in the published models' layers.
        # The decoder's, whose norms latents modulate.
        *((frames, 512, 512, 2) for frames in (1, 2)),
        *((frames, channels, 256, 2) for frames in (1, 4) for channels in (512, 256)),
        *((8, *channels, 2) for channels in ((256, 256), (256, 128), (128, 128), (128, 3))),
        *((1, *channels, 2) for channels in ((256, 128), (128, 128), (128, 3))),
        # The encoder's.
        *((frames, 128, 128, None) for frames in (1, 8)),
        *((frames, channels, 256, None) for frames in (1, 4) for channels in (128, 256)),
        *((frames, channels, 512, None) for frames in (1, 2) for channels in (256, 512)),
        (2, 256, 256, None),
    ],
)
@pytest.mark.slow
def test_a_published_layer_in_128_lanes_is_the_reference(frames, channels, outputs, cell):
    operands, options = given((1, frames, 4, 24, channels), outputs, cell, frames > 1, channels == outputs)
    with interpreted_kernels(lanes=128) as traced:
        found = norm_conv3d(*operands, **options)
    assert "norm_conv3d" in traced
    check(found, operands, options["residual"])


@pytest.mark.parametrize(
    ("shape", "outputs", "cell", "cached", "added", "strips"),
    cases(
        {
            "eight frames in two": ((1, 8, 4, 96, 16), 16, 2, True, True, 2),
            "two videos in three, ragged": ((2, 4, 2, 188, 32), 16, 2, True, False, 3),
            "the start of a plain norm in four": ((1, 2, 2, 384, 32), 32, None, False, True, 4),
            "three frames, the first whole": ((1, 3, 2, 288, 16), 16, None, False, True, 3),
            "four frames to three channels in two": ((1, 4, 2, 96, 16), 3, 2, True, False, 2),
        },
        product=["eight frames in two", "two videos in three, ragged", "three frames, the first whole"],
    ),
)
def test_strips_are_norm_activation_and_convolution_of_the_whole_picture(
    shape, outputs, cell, cached, added, strips, interpreted
):
    operands, options = given(shape, outputs, cell, cached, added)
    with cut_into(strips) as found:
        results = norm_conv3d(*operands, **options)
    assert {size.strips for size in found} == {strips, *[1] * (shape[1] % 2)}
    check(results, operands, options["residual"])


@contextlib.contextmanager
def cut_into(strips):
    """Make the kernel take so many strips, a first frame fewer; yield a list of the sizes it then finds."""
    found, sizes_of = [], sizes.sizes_of

    def in_strips(x, *rest):
        whole = sizes_of(x, *rest)
        chunks = -(-whole.chunks // (1 if x.shape[1] == 1 else strips))
        found.append(whole._replace(strips=-(-whole.chunks // chunks), chunks=chunks))
        return found[-1]

    with traced_anew() as patch:
        for module in (sizes, tpu):
            patch.setattr(module, "sizes_of", in_strips)
        yield found


@pytest.mark.parametrize("frames", [1, 2])
def test_strips_of_few_frames_have_blocks_that_a_tpu_takes(frames, monkeypatch):
    monkeypatch.setattr(sizes, "vmem_limit", lambda: 63 * 2**20)
    x, vector, kernel = struct(1, frames, 8, 512, 512), struct(512), struct(3, 3, 3, 512, 512)
    assert sizes.sizes_of(x, 1, 1, 512, False).strips > 1
    traced = jax.jit(functools.partial(norm_conv3d, num_groups=32, first_frame_alone=frames == 1)).trace(
        x, NormParams(vector, vector), kernel, vector
    )
    assert "norm_conv3d" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("frames", "columns", "outputs", "mode", "tile", "chunk"),
    [
        pytest.param(8, 720, 128, "on", 4, 80, id="eight frames"),
        pytest.param(8, 720, 3, "on", 4, 80, id="eight frames to three channels"),
        pytest.param(8, 360, 256, "on", 4, 40, id="eight frames to 256 channels"),
        pytest.param(4, 180, 512, "on", 2, 48, id="four frames"),
        pytest.param(8, 12, 128, "on", 4, 48, id="eight frames of few columns"),
        pytest.param(2, 90, 512, "on", 0, 96, id="two frames"),
        pytest.param(1, 720, 128, "on", 0, 96, id="a first frame"),
        pytest.param(8, 720, 128, "direct", 0, 24, id="eight frames where filtering is off"),
    ],
)
def test_four_and_eight_frames_are_filtered_by_winograd(
    frames, columns, outputs, mode, tile, chunk, monkeypatch
):
    monkeypatch.setenv(tiles.SWITCH, mode)
    found = sizes.sizes_of(struct(1, frames, 128, columns, 256), 1, 1, outputs, True)
    assert (found.tile, found.chunk_columns, tile and found.units % found.shares) == (tile, chunk, 0)


@pytest.mark.parametrize(
    ("shape", "outputs", "cell", "cached", "added", "width", "mesh"),
    cases(
        {
            "eight frames, four shards": ((1, 8, 4, 32, 16), 16, 2, True, True, (1, 1), (1, 4)),
            "two videos, the last shard padded": ((2, 8, 2, 28, 32), 16, 2, True, True, (7, 8), (2, 4)),
            "a shard of padding alone": ((1, 4, 4, 20, 16), 32, 2, False, False, (5, 8), (1, 4)),
            "a plain norm, padded": ((1, 2, 2, 14, 16), 16, None, True, True, (7, 8), (1, 4)),
            "a first frame, padded": ((1, 1, 4, 28, 16), 16, 2, False, True, (7, 8), (1, 4)),
            "three channels, padded": ((1, 4, 4, 28, 16), 3, 2, True, False, (7, 8), (1, 4)),
            "one shard, padded": ((1, 8, 2, 14, 16), 16, 2, True, False, (7, 8), (1, 1)),
        },
        quick=["a plain norm, padded"],
        product=[
            "eight frames, four shards",
            "two videos, the last shard padded",
            "a first frame, padded",
            "one shard, padded",
        ],
    ),
)
def test_shards_give_what_one_device_gives(
    shape, outputs, cell, cached, added, width, mesh, interpreted_on_mesh
):
    operands, options = given(shape, outputs, cell, cached, added)
    residual = options.pop("residual")
    check(
        on_mesh(functools.partial(norm_conv3d, **options), *width, *mesh)(*operands, residual=residual),
        operands,
        residual,
    )
    assert interpreted_on_mesh


@pytest.mark.parametrize("outputs", [16, 3])
@pytest.mark.slow
def test_the_derivatives_of_a_padded_shard_with_neighbours_are_those_of_the_plain_form(outputs, interpreted):
    x, _, kernel, bias, cache = inputs((1, 2, 2, 32, 16), outputs)
    ones = jnp.ones((1, 1, 1, 8, 16))
    edge = jnp.arange(2 * 2 * outputs, dtype=jnp.float32).reshape(1, 2, 2, 1, outputs) / outputs
    floats = x, ones * 0.7, ones * 0.1, cache, x[..., :outputs] + 1, kernel, bias, (edge, -edge)
    tangents = *jax.tree.map(lambda x: jnp.full_like(x, 0.5), floats), np.zeros((), jax.dtypes.float0)
    primals = *floats, jnp.int32(31)
    (y, *_), (tangent, *_) = jax.jvp(tpu.convolved, primals, tangents)
    assert interpreted
    (want, *_), (want_tangent, *_) = jax.jvp(tpu._xla_form, primals, tangents)
    assert largest_error(y, want) <= A_UNIT
    np.testing.assert_array_equal(tangent, want_tangent)
    assert float(jnp.max(jnp.abs(tangent.astype(jnp.float32)))) > 0


LARGE = (1, 8, 128, 256, 128)
BFLOAT16 = jnp.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype", "grid", "window", "outputs", "taken"),
    [
        pytest.param((1, 1, 128, 256, 128), BFLOAT16, (1, 16, 32), (3, 3, 3), 128, True, id="a first frame"),
        pytest.param(LARGE, BFLOAT16, (2, 16, 32), (3, 3, 3), 128, True, id="eight frames"),
        pytest.param(LARGE, BFLOAT16, (1, 1, 1), (3, 3, 3), 256, True, id="a plain norm to two tiles"),
        pytest.param((1, 4, 128, 256, 128), BFLOAT16, (2, 64, 128), (3, 3, 3), 128, True, id="four frames"),
        pytest.param(
            *(LARGE, jnp.float32, (2, 16, 32), (3, 3, 3), 128, False),
            id="float32, whose products are not the unit's own",
        ),
        pytest.param(
            (1, 9, 128, 256, 128),
            BFLOAT16,
            (1, 1, 1),
            (3, 3, 3),
            128,
            False,
            id="nine frames, no words of two",
        ),
        pytest.param(
            (1, 8, 127, 256, 128), BFLOAT16, (8, 127, 32), (3, 3, 3), 128, False, id="a row left over"
        ),
        pytest.param(
            (1, 8, 128, 256, 64), BFLOAT16, (1, 1, 1), (3, 3, 3), 128, False, id="half a tile of channels"
        ),
        pytest.param(LARGE, BFLOAT16, (1, 1, 1), (3, 3, 3), 3, True, id="three channels as the result"),
        pytest.param(LARGE, BFLOAT16, (1, 1, 1), (3, 3, 3), 192, False, id="a tile and a half as the result"),
        pytest.param(LARGE, BFLOAT16, (1, 1, 1), (1, 1, 1), 128, False, id="a window of one pixel"),
        pytest.param(LARGE, BFLOAT16, (8, 128, 256), (3, 3, 3), 128, True, id="latents of the frame's size"),
        pytest.param(
            LARGE, BFLOAT16, (8, 16, 16), (3, 3, 3), 128, False, id="more columns of a latent than a unit"
        ),
        pytest.param(
            (1, 8, 132, 256, 128), BFLOAT16, (8, 44, 32), (3, 3, 3), 128, False, id="steps across latents"
        ),
        pytest.param((1, 8, 32, 64, 128), BFLOAT16, (1, 1, 1), (3, 3, 3), 128, False, id="a small frame"),
        pytest.param(
            (1, 8, 16, 4096, 256), BFLOAT16, (1, 1, 1), (3, 3, 3), 256, True, id="a wide frame, in strips"
        ),
        pytest.param(
            (1, 8, 16, 8192, 256), BFLOAT16, (1, 1, 1), (3, 3, 3), 256, False, id="a frame too wide for VMEM"
        ),
    ],
)
def test_what_the_kernel_takes(shape, dtype, grid, window, outputs, taken):
    def takes(x, kernel):
        return sizes.is_supported(x, grid, kernel, residual=True, at_start=True, pixels=shape[2] * shape[3])

    kernel = struct(*window, shape[-1], outputs, dtype=dtype)
    assert answer(takes, struct(*shape, dtype=dtype), kernel) == taken


@pytest.mark.parametrize(
    ("topology", "frames", "beyond", "channels", "outputs"),
    cases(
        {
            "v6e, eight frames, a part of a product": ("v6e:1x1", 8, 4, 128, 128),
            "v5e, eight frames to two tiles": ("v5e:1x1", 8, 0, 128, 256),
            "v6e, two frames to four tiles": ("v6e:1x1", 2, 0, 128, 512),
            "v6e, four frames to three channels": ("v6e:1x1", 4, 0, 128, 3),
        },
        quick=["v6e, eight frames, a part of a product"],
    ),
)
def test_mosaic_compiles_it_in_place(topology, frames, beyond, channels, outputs):
    height, width = 8, 192 // frames + beyond  # columns of a product, and a part of one

    def run(x, cache, residual, multiplier, offset, kernel, bias):
        x, cache, residual = map(pixels_first, (x, cache, residual))
        y, latest, moments = tpu.convolved(x, multiplier, offset, cache, residual, kernel, bias)
        return pixels_first(y), pixels_first(latest), moments

    operands = (
        *(struct(height, width, 1, *of_pixel) for of_pixel in ((frames, channels), (2, channels))),
        struct(height, width, 1, frames, outputs),
        *[struct(1, height // 4, width // 4, 8, channels, dtype=jnp.float32)] * 2,
        struct(3, 3, 3, channels, outputs),
        struct(outputs),
    )
    text = compiled_for(topology, run, *operands, donate=1).as_text()
    x = struct(1, frames, height, width, channels)
    weights = len(sizes.sizes_of(x, height // 4, width // 4, outputs, True).products)
    assert f"output_to_operand_aliasing={{{{1}}: ({weights + 1}, {{}})}}" in text


def convolved_in_place(x, cache, norm, kernel, bias, **options):
    """Run `norm_conv3d` on frames and a cache that lie, and stay, in the order that a TPU keeps them in."""
    y, latest, _ = norm_conv3d(
        pixels_first(x), norm, kernel, bias, pixels_first(cache), num_groups=32, **options
    )
    return pixels_first(y), pixels_first(latest)


def copied_sizes(compiled):
    """Return the number of values of each array in bfloat16 that a program copies or computes anew."""
    return [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"= bf16\[([\d,]*)\]\S* (?:copy|fusion)\(", compiled.as_text())
    ]


def spatial(width, channels, rows=1):
    """Return a spatial norm by two frames of latents of so many rows, a kernel and a bias, as structs."""
    vector, matrix = struct(channels), struct(16, channels)
    norm = NormParams(vector, vector, struct(1, 2, rows, width // 8, 16), matrix, vector, matrix, vector)
    return norm, struct(3, 3, 3, channels, channels), vector


@pytest.mark.slow
def test_a_shard_copies_neither_its_frames_nor_its_cache_for_its_neighbours():
    height, width, channels = 64, 8 * 88, 128
    mesh = Mesh(np.array(chips.topology_devices("v6e:2x4")), ("tp",), axis_types=(AxisType.Auto,))

    def placed(x, columns=None):
        spec = [None if axis != columns else "tp" for axis in range(len(x.shape))]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    norm, kernel, bias = jax.tree.map(placed, spatial(width, channels, rows=8))
    norm = norm._replace(zq=placed(norm.zq, 3))
    x, cache = (placed(struct(height, width, 1, length, channels), 1) for length in (8, 2))
    run = functools.partial(convolved_in_place, split=columns.Split(85, 88, columns=("tp",)))
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(run, donate_argnums=1).lower(x, cache, norm, kernel, bias).compile()
    own, sizes = math.prod(x.shape) // 8, copied_sizes(compiled)
    assert "norm_conv3d" in compiled.as_text()
    sizes.remove(7 * 9 * channels**2)  # the transformed taps
    assert max(sizes) < own / 8
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * own * 2 // 8


@pytest.mark.slow
def test_strips_of_a_wide_picture_copy_neither_its_frames_nor_its_cache():
    height, width, channels = 8, 1600, 128
    x, cache = (struct(height, width, 1, length, channels) for length in (8, 2))
    compiled = compiled_for("v5p:2x2x1", convolved_in_place, x, cache, *spatial(width, channels), donate=1)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1  # for all strips
    assert max(copied_sizes(compiled)) < math.prod(cache.shape)
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * math.prod(cache.shape)
