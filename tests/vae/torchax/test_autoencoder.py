"""The contract: every backend is the same function as stock diffusers."""

import copy
import gc
import operator

import jax
import numpy as np
import pytest
import torch

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae import chunks
from tests import fixtures, reference
from tests.vae.conftest import check_bfloat16, check_close, on_backends

EIGHT = "torchax over eight devices"
FLAX_ON_EIGHT = "flax over eight devices"
ONE_DEVICE = ("torch", "torchax", "flax")

COUNTS = (1, 5, 8, 9, 13, 16, 17, 29, 32, 33, 49, *(2, 3, 6, 7, 10, 12, 15))
"""Numbers of frames. To the last ones no latent frames decode; diffusers encodes them all the same."""


def latents_for(backend, frames, **options):
    """Return latents of three rows; of four on a mesh, over which the result is split by rows."""
    return reference.latents(frames, height=4 if backend.mesh else 3, **options)


@pytest.mark.parametrize(
    ("backend", "frames"),
    on_backends(
        # Numbers of latent frames. The latents are five columns wide, which fill five of eight devices.
        fixtures.BACKENDS,
        {frames: (frames,) for frames in (1, 2, 3, 4, 5, 8, 9, 13)},
        quick={"torch": (1, 2, 3, 4, 5, 8, 9, 13), "torchax": (1, 5), "flax": (3,)},
        slow={"torchax": (2, 3, 4, 13), "flax": (1, 5, 8, 9, 13), EIGHT: (1, 4, 5), FLAX_ON_EIGHT: (2,)},
    ),
    indirect=["backend"],
)
def test_decode_equals_diffusers(small_vae, backend, frames):
    z = latents_for(backend, frames)
    got = reference.run_decode(backend, z)
    want = reference.decoded(small_vae, z)
    assert want.abs().max() > 1.0, "some values are above 1: clipping would change them"
    assert got.shape[2] == sum(chunks.decoded_length(len(c)) for c in chunks.plan(frames, 2))
    check_close(got, want)


@pytest.mark.parametrize(
    ("backend", "frames"),
    on_backends(
        fixtures.BACKENDS,
        {frames: (frames,) for frames in COUNTS},
        quick={"torch": COUNTS, "torchax": (1, 9, 49), "flax": (9,)},
        slow={
            "torchax": (8, 16, 2, 6, 7),
            "flax": (1, 5, 13, 17, 33, 3, 10, 12, 15),
            EIGHT: (1, 9, 49),
            FLAX_ON_EIGHT: (16, 17, 33),
        },
    ),
    indirect=["backend"],
)
def test_encode_equals_diffusers(small_vae, backend, frames):
    x = reference.video(frames)
    check_close(reference.run_encode(backend, x), reference.encoded(small_vae, x))


# Latent frames, videos, rows and columns.
SHAPES = {"a batch of one frame": (1, 2, 3, 5), "a batch of five": (5, 2, 3, 5), "odd sizes": (3, 1, 9, 13)}


@pytest.mark.parametrize(
    ("backend", "frames", "batch", "height", "width"),
    on_backends(
        ONE_DEVICE,
        SHAPES,
        quick={"torch": SHAPES},
        slow={"torchax": ["a batch of one frame", "odd sizes"], "flax": ["a batch of five"]},
    ),
    indirect=["backend"],
)
def test_batches_and_odd_sizes_equal_diffusers(small_vae, backend, frames, batch, height, width):
    z = reference.latents(frames, batch=batch, height=height, width=width)
    x = reference.video(4 * frames - 3, batch=batch, height=8 * height, width=8 * width)
    reference.check_as_stock(backend, small_vae, z, x)


@pytest.mark.parametrize(
    ("name", "options", "channels"),
    on_backends(
        ("torchax", "flax", EIGHT, FLAX_ON_EIGHT),
        {
            # Options of a config, and its latents' channels.
            "four levels": ({**reference.FOUR_LEVELS, **reference.NARROW}, 16),
            "full depth": ({**reference.FOUR_LEVELS, "layers_per_block": 3}, 16),
            "quant convolutions": (
                {"use_quant_conv": True, "use_post_quant_conv": True, "latent_channels": 3},
                3,
            ),
        },
        quick={"torchax": ["four levels"]},
        slow={
            "torchax": ["full depth"],
            "flax": ["four levels", "quant convolutions"],
            EIGHT: ["four levels"],
        },
    ),
)
def test_other_configs_equal_diffusers(name, options, channels):
    stock, (build, _, over_mesh) = reference.small_vae(**options), name.partition(" ")
    vae = port(reference.built(build, stock), mesh=make_mesh(1, 8) if over_mesh else None)
    z, x = latents_for(vae, 3, channels=channels), reference.video(9, height=32)
    reference.check_as_stock(vae, stock, z, x)


@pytest.mark.parametrize(
    ("name", "frames"),
    on_backends(("torchax", "flax"), {1: (1,), 3: (3,)}, quick={}, slow={"torchax": (3,), "flax": (1,)}),
)
def test_bfloat16_is_as_near_to_float32_as_pytorch(small_vae, name, frames):
    vae = reference.built(name, copy.deepcopy(small_vae).bfloat16())
    check_bfloat16(vae, "decode", reference.latents(frames, height=6, width=8), small_vae)
    check_bfloat16(vae, "encode", reference.video(4 * frames, height=48, width=64), small_vae)


TILINGS = {
    "one row": (
        (1, 4, 9),
        {"tile_sample_min_height": 48, "tile_sample_min_width": 48, "tile_overlap_factor_width": 1 / 2},
    ),
    "columns in several chunks": (
        (4, 4, 6),
        {"tile_overlap_factor_height": 1 / 4, "tile_overlap_factor_width": 1 / 2},
    ),
    "rows and columns with a narrow last tile": (
        (1, 5, 7),
        {"tile_overlap_factor_height": 1 / 4, "tile_overlap_factor_width": 1 / 4},
    ),
}
"""Latent frames, rows and columns, and the options of tiles."""


@pytest.mark.parametrize(
    ("backend", "shape", "options"),
    on_backends(
        ONE_DEVICE,
        TILINGS,
        quick={"torch": TILINGS},
        slow={
            "torchax": ["columns in several chunks"],
            "flax": ["one row", "rows and columns with a narrow last tile"],
        },
    ),
    indirect=["backend"],
)
def test_tiled_equals_diffusers(small_vae, backend, shape, options):
    frames, height, width = shape
    z = reference.latents(frames, height=height, width=width)
    x = reference.video(4 * frames - 3, height=8 * height, width=8 * width)
    stock = copy.deepcopy(small_vae)
    with reference.tiled(
        stock, backend, **{"tile_sample_min_height": 32, "tile_sample_min_width": 32, **options}
    ):
        reference.check_as_stock(backend, stock, z, x)
        exact = (reference.decoded(stock, z) / 2 + 0.5).clamp(0, 1) * 255
        as_bytes = torch.cat(list(backend.decode_stream(z, output_dtype=torch.uint8)), 2)
    assert (as_bytes - exact).abs().max() <= 0.501


def test_return_types_are_diffusers(small_vae, backend):
    x, z = reference.video(1), reference.latents(1)
    for kind, given in {"encode": x, "decode": z}.items():
        call, want = getattr(backend, kind), getattr(small_vae, kind)(given)
        placed = reference.beside(backend, given)
        assert [type(call(placed)), type(call(placed, return_dict=False))] == [type(want), tuple]


@pytest.mark.parametrize(
    "backend",
    [*ONE_DEVICE, *(pytest.param(name, marks=pytest.mark.product) for name in (EIGHT, FLAX_ON_EIGHT))],
    indirect=True,
)
def test_a_stream_of_a_video_of_frames_or_of_pieces_equals_the_whole(small_vae, backend):
    x = reference.video(17)
    want = reference.encoded(small_vae, x)
    for given in (x, iter(x.unbind(2)), iter(reference.beside(backend, x).split(5, dim=2))):
        parts = [runtime.to_torch(posterior.parameters) for posterior in backend.encode_stream(given, 17)]
        check_close(torch.cat(parts, 2), want)


@pytest.mark.parametrize(
    "backend", ["torch", "torchax", pytest.param("flax", marks=pytest.mark.slow)], indirect=True
)
def test_bytes_in_and_bytes_out(small_vae, backend):
    z = reference.latents(3) * 3
    x = torch.randint(
        0, 256, (1, 3, 9, 24, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    exact = (reference.decoded(small_vae, z) / 2 + 0.5).clamp(0, 1) * 255
    frames = torch.cat(list(backend.decode_stream(z, output_dtype=torch.uint8)), 2)
    assert frames.dtype == torch.uint8
    assert (frames - exact).abs().max() <= 0.501  # a pixel that lies between two bytes may round either way
    moments = torch.cat([part.parameters for part in backend.encode_stream(x)], 2)
    check_close(moments, reference.encoded(small_vae, x / 127.5 - 1))


@pytest.mark.parametrize("backend", ["torchax", "flax"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "draw", "lengths"),
    [("decode", reference.latents, (5, 3, 7)), ("encode", reference.video, (17, 9, 25))],
)
def test_any_length_compiles_the_same_two_programs(backend, kind, draw, lengths):
    counts = []
    for frames in lengths:
        list(getattr(backend, f"{kind}_stream")(draw(frames)))
        counts.append(reference.program_of(backend, kind)[0].compilations)
    assert 2 <= counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("backend", ["torchax", "flax"], indirect=True)
def test_weights_are_arguments_and_caches_are_donated(backend):
    program, weights = reference.program_of(backend, "decode")
    axes = {"jax": "NCTHW", "cpu": "NTHWC"}[backend.device.type]  # the Flax build's tensors are on the host
    first, later = (
        program.put(torch.einsum(f"NCTHW -> {axes}", reference.latents(frames)).numpy()) for frames in (3, 2)
    )
    lowered = program.lower(weights, first)
    arrays = jax.tree.leaves(weights)
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= sum(w.nbytes for w in arrays)
    assert len(lowered.as_text()) < 5e6  # constants would be written out in the text
    _, cache = program.run(weights, first)
    program.run(weights, later, cache)
    assert all(array.is_deleted() for array in jax.tree.leaves(cache))
    assert not any(array.is_deleted() for array in arrays)


def test_memory_of_a_stream_does_not_grow(jax_vae):
    def peak(frames):
        gc.collect()
        before, stream = reference.live_bytes(), jax_vae.decode_stream(reference.latents(frames))
        return max(reference.live_bytes() for _ in stream) - before

    assert peak(17) <= peak(9)


def test_encode_stream_reads_no_more_than_two_chunks_ahead(jax_vae):
    frames = iter(reference.video(65).unbind(2))
    ahead, held, done = [], [], 0
    for posterior in jax_vae.encode_stream(frames, 65):
        ahead.append(65 - operator.length_hint(frames) - done)  # of those taken
        held.append(reference.live_bytes())
        done += 9 if done == 0 else 8
        del posterior
    assert max(ahead) <= 9 + 8
    assert max(held[3:]) <= max(held[:3])


def test_a_tensor_on_the_other_backend_is_named(native_vae, jax_vae):
    z = reference.latents(1)
    with pytest.raises(ValueError, match="weights on jax: move the tensor"):
        jax_vae.decode(z)
    with pytest.raises(ValueError, match=r"got latents on jax for weights on cpu: .*, vae.to\(.jax"):
        native_vae.decode(runtime.to_jax(z))


BAD = {
    "rank of latents": (lambda z: z[0], r"rank 4, shape \(16, 5, 3, 5\): it takes \(N, C, T, H, W\)"),
    "channels of latents": (lambda z: z[:, :4], r"4 channels.*the model takes 16"),
    "empty latents": (lambda z: z[:, :, :0], "empty latents"),
    "dtype of latents": (
        lambda z: z.bfloat16(),
        r"bfloat16 for weights of torch.float32: pass them .to\(torch.float32\)",
    ),
    "nan in latents": (
        lambda z: z.index_fill(2, torch.tensor([1]), float("nan")),
        "NaN or Inf in the latents: video 0, frame 1, channel 0",
    ),
    "inf in latents": (lambda z: z.index_fill(1, torch.tensor([3]), float("inf")), "frame 0, channel 3"),
    "size of a video": (lambda x: x[..., :22, :], "22 x 40 pixels.*multiples of 4; crop it to 20 x 40"),
    "rank of a video": (lambda x: x[:, :, 0], "rank 4"),
    "channels of a video": (lambda x: x[:, :1], "1 channels"),
    "dtype of a video": (
        lambda x: x.to(torch.int32),
        r"video of torch.int32: convert 0 to 255 .*pixels.from_uint8.*encode_stream takes uint8",
    ),
    "integers as latents": (lambda z: z.to(torch.uint8), "latents of torch.uint8: pass floats"),
    "nan in a video": (
        lambda x: x.index_fill(2, torch.tensor([2]), float("nan")),
        "NaN or Inf in the video: video 0, frame 2",
    ),
    "an array": (np.asarray, "got ndarray .*: pass torch.from_numpy"),
    "an array of JAX": (lambda x: jax.numpy.asarray(x.numpy()), "JAX array to Flax"),
}


@pytest.mark.parametrize(("name", "change", "words"), [(k, *v) for k, v in BAD.items()], ids=BAD)
def test_bad_input_is_named_by_the_call_itself(backend, name, change, words):
    kind, draw = ("decode", reference.latents) if name.endswith("latents") else ("encode", reference.video)
    given = change(draw(5))
    placed = reference.beside(backend, given) if isinstance(given, torch.Tensor) else given
    for call, x in ((getattr(backend, kind), placed), (getattr(backend, f"{kind}_stream"), given)):
        with pytest.raises(ValueError, match=words):
            call(x)  # and no `next` of a stream


def test_bytes_go_into_a_stream_alone(backend):
    with pytest.raises(
        ValueError, match="video of torch.uint8: convert 0 to 255 .* encode_stream takes uint8"
    ):
        reference.run_encode(backend, reference.video(5).to(torch.uint8))


def test_a_video_of_bytes_as_floats_is_warned_of(backend):
    """Noise around [-1, 1] is not, and the result is what the model makes of the values."""
    video = reference.video(1)
    reference.run_encode(backend, video * 3)
    with pytest.warns(UserWarning, match=r"beyond 10, where the model takes \[-1, 1\]: .*pixels.from_uint8"):
        reference.run_encode(backend, video.abs() * 255)
