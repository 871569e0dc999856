"""A model on a mesh is the same function, and gathers nothing of a video's size."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.backends import backend
from cogvideox_torchax.vae.directions import DECODE, ENCODE, HWNTC, NTHWC
from cogvideox_torchax.vae.placement import Placement
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference

VIDEO, BATCH = (None, None, None, None, ("dp", "tp")), ("dp", None, None, None, "tp")


def sharded(stock, dp, tp, build="torchax"):
    return port(reference.built(build, stock), mesh=make_mesh(dp, tp))


def sharded_on_host(stock, dp, tp):
    """Return a port whose weights are in PyTorch still: enough to compile its programs."""
    return port(copy.deepcopy(stock), mesh=make_mesh(dp, tp))


def inputs(frames, batch, width, height=1):
    z = reference.latents(frames, batch=batch, height=height, width=width)
    return z, reference.video(4 * frames - 3, batch=batch, height=4 * height, width=4 * width)


def local_share(tensor):
    """Return the share of an array in its largest shard."""
    array = runtime.array_of(tensor) if isinstance(tensor, torch.Tensor) else tensor
    return max(shard.data.size for shard in array.addressable_shards) / array.size


@pytest.mark.parametrize(("width", "batch", "frames"), [(85, 1, 1), (90, 2, 5), (170, 2, 1)])
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("build", ["torchax", "flax"])
@pytest.mark.slow_cases(but=["torchax-(4, 2)-170-2-1"])  # a batch that dp does not divide
@pytest.mark.product_cases(but=["torchax-(4, 2)-*", "flax-(2, 4)-*"])
def test_a_video_over_any_mesh_is_diffusers_video(shallow_vae, build, mesh, width, batch, frames):
    vae = sharded(shallow_vae, *mesh, build=build)
    z, x = inputs(frames, batch, width, height=2)  # frames of 85 x 4 columns are split by rows
    assert local_share(vae.decode(runtime.to_jax(z)).sample) == 1 / 8
    assert local_share(vae.encode(runtime.to_jax(x)).latent_dist.parameters) == 1 / 8
    reference.check_as_stock(vae, shallow_vae, z, x)


@pytest.fixture(scope="module", params=["torchax", "flax"])
def build(request):
    return request.param


@pytest.fixture(scope="module")
def eight(shallow_vae, build):
    """One video over eight devices; shared, so that its programs are compiled once."""
    return sharded(shallow_vae, 1, 8, build=build)


@pytest.mark.slow
def test_a_backend_runs_chunks_over_the_mesh_of_its_model(shallow_vae, build, eight):
    z, _ = inputs(5 if build == "torchax" else 3, 1, 90)  # two chunks by one of the builds
    chunks = list(backend(build).of(eight).chunks(DECODE, z))
    assert runtime.is_on_jax(backend("torchax").of(port(copy.deepcopy(shallow_vae))).vae)
    assert {local_share(chunk) for chunk in chunks} == {1 / 8}
    found = torch.cat([runtime.to_torch(chunk) for chunk in chunks], 2)
    assert relative_error(found, reference.decoded(shallow_vae, z)) < FLOAT32_RELATIVE


def test_bytes_over_a_mesh_are_the_frames_that_they_stand_for(shallow_vae, eight):
    frames = torch.randint(0, 256, (1, 3, 9, 4, 4 * 45), dtype=torch.uint8)  # padded with what stands for -1
    moments = torch.cat([part.parameters for part in eight.encode_stream(frames)], 2)
    assert relative_error(moments, reference.encoded(shallow_vae, frames / 127.5 - 1)) < FLOAT32_RELATIVE


def test_chunks_and_caches_cross_the_border_in_shards_and_weights_are_copied(eight):
    program, weights = reference.program_of(eight, DECODE)
    placings = [array.sharding for array in jax.tree.leaves(weights)]
    assert {(each.is_fully_replicated, len(each.device_set)) for each in placings} == {(True, 8)}
    z, axes = inputs(3, 1, 90)[0], program.place.axes
    chunk = program.put(torch.einsum(f"NCTHW -> {axes}", z).numpy())
    assert (local_share(chunk.array), chunk.array.shape[axes.index("W")]) == (1 / 8, 96)
    result, cache = program.run(weights, chunk, None)
    caches = jax.tree.leaves(cache)
    assert result.shape[axes.index("W")] == 360
    assert {part.shape[HWNTC.index("W")] for part in caches} == {96, 192, 384}
    for part in caches:
        assert part.sharding.is_equivalent_to(program.place.cache_sharding(part.shape), part.ndim)
    for array, width in [(result, axes.index("W")), *((part, HWNTC.index("W")) for part in caches)]:
        assert {shard.data.shape[width] for shard in array.addressable_shards} == {array.shape[width] // 8}


@pytest.mark.slow_cases("flax")
def test_tiles_over_a_mesh_change_no_number_and_blend_in_shards(shallow_vae, eight):
    in_tiles, (z, _) = copy.deepcopy(shallow_vae), inputs(1, 1, 48)
    with reference.tiled(in_tiles, eight, tile_sample_min_height=48, tile_sample_min_width=4 * 30):
        want = in_tiles.decode(z).sample
        got = eight.decode(runtime.to_jax(z)).sample
        streamed = torch.cat(list(eight.decode_stream(z)), 2)
    assert local_share(got) == 1 / 8
    assert relative_error(runtime.to_torch(got), want) < FLOAT32_RELATIVE
    assert relative_error(streamed, want) < FLOAT32_RELATIVE


@pytest.fixture(scope="module")
def compiled_pair():
    """Compile the steady-state decode chunk on one device, and report it on eight, in bfloat16.

    In float32 a CPU chooses the form of a convolution by its size, so that a shard's work is not a share.

    It has enough channels for the convolutions to be most of the work: XLA's CPU backend computes the sums of
    a convolution's taps again at every use of the result, and on a mesh these have more terms.
    """
    wide = reference.small_vae(**{**reference.SHALLOW, "block_out_channels": (32, 32, 32)}).to(torch.bfloat16)
    first, steady = (((1, 16, frames, 4, 170), jnp.bfloat16) for frames in (3, 2))
    models = port(copy.deepcopy(wide)), sharded_on_host(wide, 1, 8)
    return [reference.compiled_plan(vae.program(DECODE), steady, before=first) for vae in models]


def test_each_of_eight_devices_does_an_eighth_of_the_work_in_an_eighth_of_the_memory(compiled_pair):
    alone, found = compiled_pair
    assert 8 * found.flops <= 1.12 * alone.flops
    assert found.temp_bytes <= 0.2 * alone.temp_bytes


def test_no_activation_is_gathered_and_a_norm_sends_numbers_only(compiled_pair):
    _, found = compiled_pair
    assert set(found.collectives) == {"collective-permute", "all-reduce"}
    frames = 32 * 8 * 16 * 680 * 4  # bytes of the largest activation
    assert found.collectives["all-reduce"].largest <= 8 * 4 * 4  # of a norm: 8 groups, 4 numbers of 4 bytes
    assert found.collectives["collective-permute"].largest <= 0.02 * frames
    assert reference.largest_result(found) <= 0.2 * frames


def test_a_batch_that_dp_does_not_divide_is_split_by_width_and_gathers_nothing(shallow_vae):
    # In bfloat16, whose strided convolutions of uneven widths compile only as the kernels do them on a mesh.
    vae = sharded_on_host(copy.deepcopy(shallow_vae).to(torch.bfloat16), 2, 4)
    found = reference.compiled_plan(vae.program(ENCODE), ((3, 3, 1, 8, 4 * 45), jnp.bfloat16))
    # The latents, 45 wide, leave by channels: that must not reach back into the layers before.
    assert "all-gather" not in found.collectives
    whole_activation = 3 * 8 * 8 * 180 * 2  # bytes of a first layer's result
    assert reference.largest_result(found) < 0.6 * whole_activation


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((1, 16, 2, 60, 90), VIDEO),
        ((2, 16, 2, 60, 90), BATCH),
        ((4, 16, 2, 60, 90), BATCH),
        ((3, 16, 2, 60, 90), VIDEO),
    ],
)
def test_a_batch_is_split_by_videos_and_one_video_by_width(shape, spec):
    mesh = make_mesh(2, 4)
    assert Placement(mesh).spec(shape) == PartitionSpec(*spec)
    channels_last = Placement(mesh, NTHWC).spec((*shape[:1], *shape[2:], shape[1]))
    assert channels_last == PartitionSpec(*spec[:1], *spec[2:], spec[1])


def test_a_result_whose_width_does_not_divide_is_split_by_another_axis_or_refused():
    placement = Placement(make_mesh(1, 8))
    for shape, axis in (((1, 3, 8, 480, 720), 4), ((1, 32, 2, 64, 90), 3), ((1, 32, 2, 60, 90), 1)):
        assert placement.result_spec(shape)[axis] == "tp"
    with pytest.raises(ValueError, match="multiple of 8"):
        placement.result_spec((1, 3, 2, 60, 90))


def test_a_mesh_has_the_axes_and_sizes_that_were_asked_for():
    meshes = {
        (1, 8): make_mesh(),
        (2, 4): make_mesh(2),
        (2, 3): make_mesh(2, 3),
        (8, 1): make_mesh(8, 1),
        (1, 3): make_mesh(guided=True, devices=jax.devices()[:3]),
    }
    assert [dict(mesh.shape) for mesh in meshes.values()] == [{"dp": dp, "tp": tp} for dp, tp in meshes]
    assert make_mesh(guided=True) == make_mesh(2)
    assert make_mesh().axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize(
    ("dp", "tp", "words"),
    [
        (3, None, "does not divide"),
        (2, 5, "10 devices, where there are 8: .* XLA_FLAGS=--xla_force_host_platform_device_count=10"),
        (0, 8, "at least 1"),
        (1, 0, "1"),
        ("1", 8, "got a mesh of dp='1', tp=8: both must be whole numbers"),
        (2.0, None, "dp=2.0"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(dp, tp, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(dp, tp)


@pytest.mark.parametrize(
    "mesh",
    [
        "dp=8",
        Mesh(np.array(jax.devices()), ("tp",)),
        Mesh(np.array(jax.devices()).reshape(1, 8), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2),
    ],
)
def test_port_refuses_a_mesh_that_it_cannot_place_on(shallow_vae, mesh):
    vae = copy.deepcopy(shallow_vae)
    with pytest.raises(ValueError, match="make one with make_mesh"):
        port(vae, mesh=mesh)
    assert [type(module) for module in vae.modules()] == [type(module) for module in shallow_vae.modules()]


def test_a_nan_in_a_sharded_array_is_found():
    array = np.zeros((1, 16, 2, 1, 96), np.float32)
    array[0, 3, 1, 0, 95] = np.nan
    placed = jax.device_put(array, NamedSharding(make_mesh(1, 8), PartitionSpec(*VIDEO)))
    assert runtime.first_nonfinite(runtime.tensor_of(placed)) == (0, 3, 1, 0, 95)
