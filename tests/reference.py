"""Builds small diffusers references and their inputs."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic.primitives import pack_elementwise_p
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.plan import hlo, programs
from cogvideox_torchax import port, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae import directions, tolerances
from cogvideox_torchax.vae.nnx.autoencoder import compiled
from cogvideox_torchax.vae.torchax.networks import chunk_network
from jax_kernels.common import dispatch, tiles

SMALL = {
    "block_out_channels": (8, 8, 16),
    "down_block_types": ("CogVideoXDownBlock3D",) * 3,
    "up_block_types": ("CogVideoXUpBlock3D",) * 3,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "sample_height": 64,
    "sample_width": 96,
}
"""The fewest levels that compress time by four, so the quickest to compile; four pixels to a latent one."""

FOUR_LEVELS = {
    "block_out_channels": (16, 32, 32, 64),
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    "norm_num_groups": 8,
}
"""The published models' levels, one of which resamples space alone; eight pixels to a latent one."""

TWO_LEVELS = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
    "temporal_compression_ratio": 2,
    "norm_num_groups": 4,
}
"""The fewest levels that have every kind of block: half the frames, and half the pixels along each side."""

NARROW = {"layers_per_block": 0, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
"""The same as `SHALLOW`, of four levels."""

SHALLOW = {"layers_per_block": 0, "block_out_channels": (8, 8, 8)}
"""Quick to compile: one ResNet block in a level of the decoder and none in one of the encoder.

Without one, a level of the encoder has to keep the number of channels.
"""

TWO_SHALLOW_LEVELS = {**TWO_LEVELS, **SHALLOW, "block_out_channels": (8, 8)}


def cases(values, *, quick=(), product=()):
    """Return pytest's parameters of each case, whose values `values` has by the case's name.

    `make test` runs the cases that `quick` names, and `make test-product` those of `product`. The others are
    slow: `make test-all` runs them.
    """
    assert {*quick, *product} <= values.keys()
    return [
        pytest.param(
            *each,
            id=name,
            marks=() if name in quick else pytest.mark.product if name in product else pytest.mark.slow,
        )
        for name, each in values.items()
    ]


def small_vae(seed: int = 0, **overrides) -> AutoencoderKLCogVideoX:
    """Return stock diffusers with random weights, biases and affine parameters too: none can be lost."""
    torch.manual_seed(seed)
    return randomized(AutoencoderKLCogVideoX(**{**SMALL, **overrides}))


def randomized(module):
    """Draw a module's biases and affine parameters, so that none can be lost."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter.data, mean=center, std=0.2)
    return module.eval()


def on_jax(vae):
    """Port the model, and move it to JAX."""
    return port(vae).to("jax")


def built(name, stock):
    """Return a build of the VAE, "torchax" or "flax", with stock diffusers' weights, on JAX."""
    return FlaxVAEForPipelines.from_diffusers(stock) if name == "flax" else on_jax(copy.deepcopy(stock))


def program_of(vae, kind):
    """Return a chunk program, and its weights, of either build."""
    kind = directions.Direction(kind)
    if isinstance(vae, FlaxVAEForPipelines):
        network, weights = vae.flax_vae.network(kind)
        return compiled(network, vae.flax_vae.placement(kind)), weights
    program = vae.program(kind)
    return program, program.weights(chunk_network(vae, kind))


@contextlib.contextmanager
def tiled(*models, **options):
    """Have models work in tiles in a `with` block."""
    for model in models:
        model.enable_tiling(**options)
    try:
        yield
    finally:
        for model in models:
            model.disable_tiling()


_answers: dict[tuple, tuple[object, torch.Tensor]] = {}


def decoded(stock: AutoencoderKLCogVideoX, z: torch.Tensor) -> torch.Tensor:
    """Return stock diffusers' frames, computed once for all tests of a process that ask."""
    return _answer("decode", stock, z, lambda: stock.decode(z).sample)


def encoded(stock: AutoencoderKLCogVideoX, x: torch.Tensor) -> torch.Tensor:
    """Return stock diffusers' moments, computed once for all tests of a process that ask."""
    return _answer("encode", stock, x, lambda: stock.encode(x).latent_dist.parameters)


def _answer(kind, stock, given, compute):
    key = kind, id(stock), tuple(given.shape), given.dtype, given.float().numpy().tobytes()
    if key not in _answers:
        _answers[key] = stock, torch.no_grad()(compute)()  # the model is kept, so that no other has its id
    return _answers[key][1].clone()


def beside(vae, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor where the model's weights are."""
    return runtime.to_jax(x) if vae.device.type == "jax" else x


def run_decode(vae, z: torch.Tensor) -> torch.Tensor:
    """Return the frames of any build, on the host."""
    return runtime.to_torch(vae.decode(beside(vae, z)).sample)


def run_encode(vae, x: torch.Tensor) -> torch.Tensor:
    """Return the moments of any build, on the host."""
    return runtime.to_torch(vae.encode(beside(vae, x)).latent_dist.parameters)


def check_as_stock(vae, stock: AutoencoderKLCogVideoX, z: torch.Tensor, x: torch.Tensor) -> None:
    """Check that a build decodes and encodes as stock diffusers does, whole and streamed."""
    streamed = torch.cat(list(vae.decode_stream(z)), 2)
    moments = torch.cat([posterior.parameters for posterior in vae.encode_stream(x)], 2)
    for results, want in (
        ((run_decode(vae, z), streamed), decoded(stock, z)),
        ((run_encode(vae, x), moments), encoded(stock, x)),
    ):
        assert all(largest_error(got, want) < tolerances.FLOAT32_RELATIVE for got in results)


def latents(
    frames: int, *, batch: int = 1, height: int = 3, width: int = 5, channels: int = 16, seed: int = 1
):
    return torch.randn(batch, channels, frames, height, width, generator=torch.Generator().manual_seed(seed))


def video(frames: int, *, batch: int = 1, height: int = 24, width: int = 40, seed: int = 2):
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def products_of(text: str) -> list[str]:
    """Return the lines of a lowered program that multiply."""
    return [line for line in text.splitlines() if re.search(r"\.(dot_general|convolution)\b", line)]


def largest_error(got, want) -> float:
    """Return the largest difference of two arrays, relative to the largest absolute value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


def live_bytes() -> int:
    """Return the bytes of all arrays that JAX holds."""
    return sum(array.nbytes for array in jax.live_arrays())


@contextlib.contextmanager
def compilations(part="", entry=lambda name: name):
    """Yield a list that gets an entry, its name, for each program compiled by JAX whose name has a part."""
    compiled = []

    def listen(event, duration_secs, **about):
        if event == "/jax/core/compile/backend_compile_duration" and part in str(about.get("fun_name")):
            compiled.append(entry(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


_times_anew = itertools.count()


@contextlib.contextmanager
def traced_anew():
    """Trace ops and models anew, and for this context alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tiles.SWITCH, f"on, for the {next(_times_anew)}th time")  # each value is another program
        yield patch


@contextlib.contextmanager
def as_on_a_tpu():
    """Run ops in the forms that they have for a TPU."""

    def for_tpu(*operands, default, **forms):
        return forms.get("tpu", default)(*operands)

    with traced_anew() as patch:
        patch.setattr(dispatch, "platform_dependent", for_tpu)
        yield patch


CORES = 1
"""Cores of the TPU that `tpu_interpreter` interprets; slow tests of kernels have two."""


@contextlib.contextmanager
def tpu_interpreter():
    """Interpret Pallas kernels with a TPU's memory; no core may race with another.

    Steps along parallel axes come in a random order, and `CORES` cores share them.
    """
    module, states = sys.modules[pltpu.reset_tpu_interpret_mode_state.__module__], []
    make_state = module.RaceDetectionState
    cores = {"num_cores_or_threads": CORES} if CORES > 1 else {}
    # This seed reverses axes of two steps and of three, and mixes longer ones.
    options = pltpu.InterpretParams(detect_races=True, random_seed=64, **cores)
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode(options):
        # Each kernel has a state of its own.
        patch.setattr(
            module, "RaceDetectionState", lambda **given: states.append(make_state(**given)) or states[-1]
        )
        try:
            yield
            jax.effects_barrier()  # kernels run in the background
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # which a kernel that failed leaves behind
    assert not any(state.races_found for state in states), "a race: see what was printed"


@contextlib.contextmanager
def interpreted_kernels(*, lanes=16, large=1, on_mesh=False):
    """Run ops as on a TPU, their Pallas kernels interpreted; yield the names of the traced kernels.

    The name of a kernel whose result reuses an operand's memory is followed by the same with " in place".
    Kernels then support frames of `large` pixels and multiples of `lanes` channels. The interpreter that
    knows a TPU's memory has devices wait for each other, for which a machine of few cores has too few
    threads. On a mesh the plain one runs it. Both cannot run blocks that reach beyond an array whose memory a
    result reuses, so there the result has memory of its own.
    """
    traced, pallas_call = [], pl.pallas_call
    plain = {"interpret": True} if on_mesh else {}

    def traced_call(*args, name, input_output_aliases=(), **options):
        def call(*operands):
            aliases = {}
            for source, result in dict(input_output_aliases).items():
                read, written = options["in_specs"][source], options["out_specs"][result]
                check_in_place(options["grid"], read, written)
                if not np.mod(operands[source].shape, read.block_shape).any():
                    aliases[source] = result
                    traced.append(f"{name} in place")
            return pallas_call(*args, name=name, input_output_aliases=aliases, **options, **plain)(*operands)

        traced.append(name)
        return call

    _let_a_cpu_pack()
    interpreter = contextlib.nullcontext() if on_mesh else tpu_interpreter()
    with as_on_a_tpu() as patch, interpreter:
        patch.setattr(pl, "pallas_call", traced_call)
        patch.setattr(tiles, "LANES", lanes)
        patch.setattr(tiles, "SMALLEST_FRAME", large)
        yield traced


def check_in_place(grid, read, written):
    """Check that no block of an array is fetched once a block that overlaps it may have been overwritten.

    `read` and `written` are the specs of an operand and of the result that has its memory. A block is fetched
    during the step before the first one that reads it, and written back from the end of its last step on.
    """
    steps, sizes = np.indices(grid).reshape(len(grid), -1), (read.block_shape, written.block_shape)
    with jax.ensure_compile_time_eval():  # also while a program is traced
        fetched, stored = (
            np.stack(jax.vmap(spec.index_map)(*steps), 1) * spec.block_shape for spec in (read, written)
        )
    is_fetched = np.insert(np.diff(fetched, axis=0).any(1), 0, True)  # in a step; else it is there already
    is_stored = np.append(np.diff(stored, axis=0).any(1), True)
    distance = fetched[:, None] - stored  # of the block that a step reads from the one that a step writes
    overlap = ((distance < sizes[1]) & (-distance < sizes[0])).all(2) & is_fetched[:, None] & is_stored
    assert not np.tril(overlap, -1).any(), "a step reads what a step before it has overwritten"


def rounded_bits(x):
    """Return words whose upper half is a number of float32 as `pack_elementwise` rounds it to bfloat16."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)


def _let_a_cpu_pack():
    """JAX's interpreters know no `pack_elementwise`, what a TPU has to round pairs of float32 into words."""

    def packed(low, high, *, packed_dtype):
        assert packed_dtype == jnp.bfloat16
        return (rounded_bits(low) >> 16) | rounded_bits(high)

    mlir.register_lowering(pack_elementwise_p, mlir.lower_fun(packed, multiple_results=False), platform="cpu")


def inexact(primitive, error, *, of_operands=False):
    """Have a CPU compute a primitive's float32 results, or read its operands, with a relative error.

    The error's sign is the last bit of each number.
    """
    rules = mlir._platform_specific_lowerings["cpu"]
    entry = rules.get(primitive) or mlir._lowerings[primitive]

    def scaled(x):
        last_bit = jax.lax.bitcast_convert_type(x, jnp.int32) & 1
        return x * jnp.where(last_bit == 1, np.float32(1 + error), np.float32(1 - error))

    def lowered(ctx, avals, values):
        """Return values with the error, but those that are not float32 as they are."""
        lower = mlir.lower_fun(scaled, multiple_results=False)
        return [
            lower(ctx.replace(primitive=None, avals_in=[aval], avals_out=[aval]), value)[0]
            if aval.dtype == jnp.float32
            else value
            for aval, value in zip(avals, values, strict=True)
        ]

    def rule(ctx, *operands, **params):
        if of_operands:
            return entry.rule(ctx, *lowered(ctx, ctx.avals_in, operands), **params)
        return lowered(ctx, ctx.avals_out, entry.rule(ctx, *operands, **params))

    return mock.patch.dict(rules, {primitive: dataclasses.replace(entry, rule=rule)})


def compiled_plan(program, inputs, *, before=None):
    """Return the compiler's figures for a program; `inputs` and `before` are those of `Program.structs`."""
    structs = functools.partial(program.structs, inputs, before=before)
    work = programs.Work("program", 0, program.lower, structs)
    return programs.read_program(work, program.lower(*structs()).compile(), 0.0)


def largest_result(plan):
    """Return the bytes of the largest array that a compiled program computes on a device."""
    passed_on = "parameter", "tuple", "get-tuple"
    return max(each.bytes for each in hlo.instructions(plan.text) if not each.op.startswith(passed_on))
