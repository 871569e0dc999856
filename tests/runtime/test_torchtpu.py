"""The bridge by TorchTPU: in its place a stand-in of its `jax_op`, with its refusals, computes on the CPU."""

import collections.abc
import copy
import inspect
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.debugging import aot_eager

from cogvideox_torchax import port, runtime, upstream
from cogvideox_torchax.runtime import bridge, host, torchtpu
from cogvideox_torchax.vae.directions import DECODE, HWNTC
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from cogvideox_torchax.vae.torchax.networks import chunk_network
from jax_kernels.common.columns import WHOLE
from jax_kernels.norm_conv3d import op
from tests import reference

TAKEN = (jax.Array, jax.Array | None, collections.abc.Sequence[jax.Array], int, float, bool, str)
RETURNED = (jax.Array, list[jax.Array])


def jax_op(name, function):
    """Stand in for `torch.tpu.pallas.jax_op`: the same annotations are refused, and symbolic sizes."""
    signature = inspect.signature(inspect.unwrap(function), eval_str=True)
    annotations = [parameter.annotation for parameter in signature.parameters.values()]
    if not all(each in TAKEN for each in annotations) or signature.return_annotation not in RETURNED:
        raise ValueError(f"Invalid signature for JAX function: {signature}")
    compiled = jax.jit(function)

    def run(tensors: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = compiled([jnp.array(host.host_array(tensor)) for tensor in tensors])
        return [host.plain_tensor(np.array(array)) for array in arrays]

    def fake(tensors):
        if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
            raise RuntimeError("Symbolic dimensions are not supported")
        shapes = [jax.ShapeDtypeStruct(*shape) for shape in torchtpu.shapes_of(tensors)]
        return [
            torch.empty(struct.shape, dtype=getattr(torch, struct.dtype.name))
            for struct in jax.eval_shape(function, shapes)
        ]

    operation = torch.library.custom_op(name, run, mutates_args=())
    operation.register_fake(fake)
    return operation


@pytest.fixture
def on_cpu(monkeypatch, torchax_off):
    """Have the CPU be TorchTPU's device, and torch's own backend that traces be its compiler."""
    torchtpu._operation.cache_clear()
    monkeypatch.setattr(torchtpu, "jax_op", jax_op)
    monkeypatch.setattr(bridge, "TPU", "cpu")
    monkeypatch.setattr(upstream, "added_device", lambda: "cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # torchax's, in this process
    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "cpu", None)
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "cpu", aot_eager)
    yield
    torchtpu._operation.cache_clear()
    torch._dynamo.reset()


def pieces(pair, scale, *, offset=None, halves=1, split=WHOLE):
    """Return a tree of results whose structure depends on shapes: one of a tuple's two items may be None."""
    a, b = pair
    total = a + b * scale if offset is None else a + b * scale + offset
    rest = {"half": total / halves} if a.shape[0] > 2 else None
    return (total, rest), a.sum()


def is_exact(weight, other):
    return jnp.asarray(jax.config.jax_default_matmul_precision == "highest")


@pytest.mark.parametrize(
    ("weight", "other", "exact"), [("bfloat16", "float32", False), ("float32", "float32", True)]
)
def test_an_operation_on_sixteen_bits_with_moments_in_float32_keeps_the_default_precision(
    on_cpu, weight, other, exact
):
    tensors = (torch.ones(2, 2, dtype=getattr(torch, dtype)) for dtype in (weight, other))
    assert runtime.torch_view(is_exact)(*tensors) == exact


@pytest.mark.parametrize("offset", [None, 3.0], ids=["without", "with"])
def test_trees_constants_and_tensors_that_may_be_absent_reach_the_function(on_cpu, offset):
    call = runtime.torch_view(pieces)
    given = offset if offset is None else torch.full((3,), offset)
    for size, scale in ((2, 2), (3, 2), (2, 2), (3, 4)):
        a, b = torch.rand(size, 3), torch.rand(size, 3)
        (total, rest), first = call((a, b), scale, offset=given, halves=2, split=WHOLE)
        want = a + b * scale + (offset or 0)
        assert torch.allclose(total, want)
        assert torch.allclose(first, a.sum())
        assert rest is None if size == 2 else torch.allclose(rest["half"], want / 2)


def test_an_operation_is_made_once_for_its_constants_and_named_alike_in_every_process(on_cpu, monkeypatch):
    names = []
    monkeypatch.setattr(torchtpu, "jax_op", lambda name, flat: names.append(name) or jax_op(name, flat))
    for scale in (2, 2, 3):
        runtime.torch_view(pieces)((torch.ones(2, 2), torch.ones(2, 2)), scale)
    assert len(names) == 2
    assert names[0] == "cogvideox_torchax::pieces_1302618b28719a0a"


@pytest.fixture(scope="module")
def stock():
    return reference.small_vae(0, **reference.TWO_SHALLOW_LEVELS)


@pytest.mark.parametrize("stance", ["force_eager", "default"])
@pytest.mark.slow_cases("force_eager")
def test_a_vae_decodes_and_encodes_whole_streamed_and_in_tiles(on_cpu, stock, stance, monkeypatch):
    kernel = mock.Mock(wraps=op.dispatch)
    monkeypatch.setattr(op, "dispatch", kernel)
    z, x = reference.latents(5, height=4, width=6), reference.video(17, height=8, width=12)
    vae = port(copy.deepcopy(stock))
    with torch.no_grad(), torch.compiler.set_stance(stance):
        reference.check_as_stock(vae, stock, z, x)
        sides = {"tile_sample_min_height": 8, "tile_sample_min_width": 8}
        overlaps = {"tile_overlap_factor_height": 1 / 4, "tile_overlap_factor_width": 1 / 4}
        with reference.tiled(vae, in_tiles := copy.deepcopy(stock), **sides, **overlaps):
            frames = vae.decode(z).sample
            assert relative_error(frames, in_tiles.decode(z).sample) < FLOAT32_RELATIVE
        program = vae.program(DECODE)
        _, cache = program.step(program.weights(chunk_network(vae, DECODE)))(z[:, :, :3], None)
        videos = {part.shape[HWNTC.index("N")] for part in jax.tree.leaves(cache)}
        assert videos == {1}, "a cache has the order of axes that a TPU computes in"
    assert torchtpu._operation.cache_info().currsize > 8, "kernels ran"
    # No cache is donated, so no kernel may write into one.
    assert {call.kwargs["in_place"] for call in kernel.call_args_list} == {False}


@torch.enable_grad()
def test_a_backward_pass_is_an_error_that_says_what_to_do(on_cpu, stock):
    vae = port(copy.deepcopy(stock)).requires_grad_()
    frames = vae.decode(reference.latents(1, height=2, width=4)).sample
    with pytest.raises(ValueError, match="have no derivative: train the model by torchax"):
        frames.sum().backward()
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match="have no derivative"):
        runtime.torch_view(jnp.sin)(x).sum().backward()
