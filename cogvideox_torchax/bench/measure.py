"""Work of a process of `bench device`: describe the devices, check and measure a job one way, or plan it.

Letters of the kernels' shapes: T frames, H rows, W columns, S tokens, A heads, C channels of all heads.
"""

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cogvideox_torchax import backends, runtime
from cogvideox_torchax.bench import ladder, worker
from cogvideox_torchax.bench.ladder import Size
from cogvideox_torchax.pipelines.networks import port_network, prompt_tensors, step_tensors
from cogvideox_torchax.plan import chips, jobs, models, networks, training
from cogvideox_torchax.plan.programs import Work, compile_program
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae import tolerances
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.streaming import frames_of_chunks
from cogvideox_torchax.vae.torchax.autoencoder import port_vae
from cogvideox_torchax.vae.torchax.networks import chunk_network, stock_of

WARMUPS, RUNS, SECONDS, FEWEST = 2, 20, 5.0, 3
"""Runs that do not count; then so many, or as many as so many seconds hold, but at least a few."""
GRADIENT_RELATIVE = 1e-4
"""Largest difference of float32 gradients, which sum what many pixels contribute."""
LATENT_FRAMES, LATENT_SIDE = 4, 8
"""Frames, and pixels along each side, of which a latent one is made."""


@dataclass(frozen=True)
class DeviceTask:
    """Request to a process.

    Attributes:
        job, way: of `ladder`.
        size, checked: to be measured at, and to be compared at with the reference.
        dtype: of weights and activations.
        dp, tp: the mesh; one device where both are None.
        small: the directory of the small VAE.
        data: the VAE's inputs and the reference's answers; see `worker.make_reference`.
        torch_rms: PyTorch's own error there, by direction.
        topology: to plan for.
    """

    job: str = ""
    way: str = ""
    size: Any = None
    checked: Any = None
    dtype: str = "float32"
    dp: int | None = None
    tp: int | None = None
    small: str = ""
    data: str = ""
    torch_rms: Any = None
    topology: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def backend(self) -> str:
        return self.way.partition(",")[0]

    @property
    def in_torch(self) -> bool:
        return self.backend in ("torch", "torch-compile")

    @property
    def kind(self) -> Direction:
        return ENCODE if self.job == "encode" else DECODE

    def video(self, size: Size) -> jobs.Job:
        frames = 1 if self.job == "still" else size.frames
        return jobs.Job(self.kind, frames, size.height, size.width)

    def vae(self, size: Size) -> str:
        return self.small if size.model == "small" else size.model

    def mesh(self, devices: Any = None) -> Any:
        several = self.dp or self.tp
        return make_mesh(self.dp or 1, self.tp if several else 1, devices=devices)


def probe(request: DeviceTask) -> dict[str, Any]:
    """Describe the devices, and PyTorch's beside them; `ValueError` for a mesh that does not fit."""
    import jax

    used = request.mesh().devices.reshape(-1).tolist()
    platform = used[0].platform
    beside = {"gpu": "cuda" if torch.cuda.is_available() else None, "cpu": "cpu"}
    return {
        "status": "ok",
        "platform": platform,
        "kind": used[0].device_kind,
        "count": len(jax.devices()),
        "used": len(used),
        "coordinates": [list(getattr(device, "coords", None) or (0, 0, 0)) for device in used],
        "torch": beside.get(platform),
    }


@torch.no_grad()
def measure(request: DeviceTask) -> dict[str, Any]:
    """Compare a job with the reference, then measure it where it is right."""
    checked, size = Size(**request.checked), Size(**request.size)
    verdict = _judge(request)(request, checked)
    if not verdict["passed"]:
        return {"status": "wrong", "check": verdict}
    parts = _torch_parts(request, size) if request.in_torch else _jax_parts(request, size)
    return {"status": "ok", "check": verdict, "parts": list(parts)}


def estimate(request: DeviceTask) -> dict[str, Any]:
    """Return the seconds that `plan` estimates for each part of a job, on a machine without the device."""
    size, dtype = Size(**request.size), request.torch_dtype
    devices = chips.topology_devices(request.topology)
    chip = chips.CHIPS[request.topology.partition(":")[0]]
    mesh = request.mesh(devices)
    if request.job in ("step", "prompt"):
        if size.model == "small":
            raise chips.PlanError("plan has the published shapes alone")
        options = {"dp": mesh.shape["dp"], "tp": mesh.shape["tp"]}
        if request.job == "step":
            plan = networks.plan_step(size.model, dtype, devices, chip, **_latents(size), **options)
        else:
            plan = networks.plan_prompt(dtype, devices, chip, tokens=226, **options)
        collectives = plan.program.collective_seconds
        seconds = {request.job: plan.seconds and plan.seconds + sum((collectives or {}).values())}
    else:
        plans = [compile_program(work, mesh, chip) for work in _works(request, size, mesh)]
        seconds = {plan.name: plan.seconds_with_collectives for plan in plans}
    return {"status": "ok", "seconds": seconds}


def _latents(size: Size) -> dict[str, int]:
    frames = (size.frames - 1) // LATENT_FRAMES + 1
    return {"frames": frames, "height": size.height // LATENT_SIDE, "width": size.width // LATENT_SIDE}


# Timed


def _timed(once: Callable[[], Any], renew: Callable[[Any], None] = lambda result: None) -> dict[str, Any]:
    """Return the median and the spread of what `once` takes, which waits for its result.

    `renew` takes each result and prepares the next run, which is not timed.
    """
    for _ in range(WARMUPS):
        renew(once())
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(seconds) < FEWEST or (len(seconds) < RUNS and time.perf_counter() < end):
        start = time.perf_counter()
        result = once()
        seconds.append(time.perf_counter() - start)
        renew(result)
    return {
        "median_s": float(np.median(seconds)),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "runs": len(seconds),
    }


def _jax_parts(request: DeviceTask, size: Size) -> Iterator[dict[str, Any]]:
    import jax

    for work in _works(request, size, request.mesh()):
        start = time.perf_counter()
        structs = work.structs()
        lowered = work.lower(*structs)
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        compiled_at = time.perf_counter()
        given = list(_arrays(structs))
        cache = structs[2] if len(structs) == 3 else None

        def once(compiled: Any = compiled, given: list[Any] = given) -> Any:
            return jax.block_until_ready(compiled(*given))

        def renew(result: Any, given: list[Any] = given, cache: Any = cache) -> None:
            if cache is not None:  # the given one was donated; diffusers' own may return one of other shapes
                given[2] = result[1] if _same_shapes(result[1], cache) else _arrays(cache)

        run = _timed(once, renew)
        yield {
            "part": work.name,
            "lower_s": lowered_at - start,
            "compile_s": compiled_at - lowered_at,
            **run,
            "peak_bytes": worker.device_peak_bytes(),
        }
        del given, once, renew


def _same_shapes(arrays: Any, structs: Any) -> bool:
    import jax

    return [each.shape for each in jax.tree.leaves(arrays)] == [
        each.shape for each in jax.tree.leaves(structs)
    ]


def _arrays(structs: Any) -> Any:
    """Return arrays of small random numbers for structs; integers are zeros."""
    import jax

    pool = np.random.default_rng(0).normal(0, 0.02, 1_000_003)

    def array(struct: Any) -> Any:
        return jax.device_put(np.resize(pool.astype(struct.dtype), struct.shape), struct.sharding)

    return jax.tree.map(array, structs)


def _torch_parts(request: DeviceTask, size: Size) -> Iterator[dict[str, Any]]:
    device = _torch_device()
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for name, run in _torch_runs(request, size, device):
        start = time.perf_counter()
        run()
        synchronize()
        first = time.perf_counter() - start

        def once(run: Callable[[], Any] = run) -> None:
            run()
            synchronize()

        yield {
            "part": name,
            "compile_s": first if request.way == "torch-compile" else None,
            **_timed(once),
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        }


def _torch_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _torch_runs(request: DeviceTask, size: Size, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what PyTorch runs of each part of a job."""
    dtype = request.torch_dtype
    wrapped: Any = torch.compile if request.way == "torch-compile" else lambda network: network
    if request.job in ("step", "prompt"):
        model, tensors = _network(request, size, device)
        inputs = {name: _cast(each, None, device) for name, each in _tensors(tensors, stock=True).items()}
        yield request.job, functools.partial(wrapped(Stock(model)), inputs, None)
        return
    vae = stock_of(models.weightless_vae(request.vae(size), dtype, device))
    halves = tuple(Direction) if request.job == "train" else (request.kind,)
    for kind in halves:
        job = jobs.Job(kind, request.video(size).frames, size.height, size.width)
        pieces, (channels, *sides) = job.chunk_shapes(port_vae(copy.deepcopy(vae)))
        network = wrapped(chunk_network(vae, kind))
        if request.job == "train":
            x = torch.randn((1, channels, pieces[-1].stop, *sides), device=device, dtype=dtype)
            yield f"train {kind}", functools.partial(_torch_gradients, vae, network, kind, x)
            continue
        cache = None
        for name, piece in zip(("first", "later"), pieces, strict=False):
            x = torch.randn((1, channels, piece.length, *sides), device=device, dtype=dtype)
            yield name, functools.partial(network, x, cache)
            cache = network(x, cache)[1]


def _torch_gradients(vae: Any, network: nn.Module, kind: Direction, x: torch.Tensor) -> dict[str, Any]:
    """Return the gradients of half the sum of the squares of a whole result."""
    network.zero_grad()
    with torch.enable_grad():
        run = runtime.carried(network)
        result = torch.cat([run(chunk) for chunk in frames_of_chunks(vae, kind, x)], dim=2)
        (result.square().sum() / 2).backward()
    return {name: weight.grad for name, weight in network.named_parameters()}


# The programs


def _works(request: DeviceTask, size: Size, mesh: Any) -> list[Work]:
    """Return the programs of a job, for a size and a mesh of real devices or of a topology."""
    if request.job.startswith("kernels "):
        return [_kernel_work(request, size, mesh)]
    if request.job in ("step", "prompt"):
        return [_network_work(request, size, mesh)]
    vae = models.weightless_vae(request.vae(size), request.torch_dtype)
    if request.job == "train":
        return list(training.gradient_works(vae, request.video(size), mesh))
    return list(jobs.chunk_works(vae, request.video(size), mesh, request.backend))


class Stock(nn.Module):
    """A transformer or a text encoder as it is, as a network that a program is compiled of."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        return self.model(**tensors, return_dict=False)[0], cache


def _network(request: DeviceTask, size: Size, device: str = "meta") -> tuple[Any, dict[str, Any]]:
    """Return the transformer or the text encoder, unported, and what it takes."""
    dtype, small = request.torch_dtype, size.model == "small"
    torch.manual_seed(0)
    if request.job == "prompt":
        config = ladder.SMALL_TEXT_ENCODER if small else networks.TEXT_ENCODER
        return networks.text_encoder(config, dtype, device), prompt_tensors(batch=1, text=226)
    config = ladder.SMALL_TRANSFORMER if small else networks.TRANSFORMERS[size.model]
    described = networks.transformer(config, dtype)
    port_network(described)
    tensors = step_tensors(described, batch=2, **_latents(size))
    return networks.transformer(config, dtype, device), tensors


def _network_work(request: DeviceTask, size: Size, mesh: Any) -> Work:
    model, tensors = _network(request, size)
    runtime.enable()
    program = _network_program(request, model, mesh)
    if request.way == "torchax-stock":
        tensors.pop("positions", None)
    return Work(request.job, size.frames, program.lower, functools.partial(program.structs, tensors), program)


def _network_program(request: DeviceTask, model: Any, mesh: Any) -> runtime.Program:
    if request.way == "torchax-stock":
        return runtime.Program(Stock(model), runtime.Place(mesh.devices.item()))
    port_network(model)
    if mesh.size > 1:
        model.place_on(mesh)
        return model.build_program()
    program = model.build_program()
    program.place = runtime.Place(mesh.devices.item())
    return program


def _tensors(described: dict[str, Any], stock: bool) -> dict[str, Any]:
    """Return tensors of described shapes and dtypes, always the same."""
    generator = torch.Generator().manual_seed(1)

    def tensor(of: Any) -> Any:
        shape, dtype = of
        if isinstance(dtype, tuple):
            return tuple(map(tensor, of))
        if "int" in np.dtype(dtype).name:
            return torch.full(shape, 7, dtype=torch.int32)
        return torch.randn(shape, generator=generator).to(getattr(torch, np.dtype(dtype).name))

    return {name: tensor(of) for name, of in described.items() if not (stock and name == "positions")}


# The kernels


def _kernel(name: str, size: Size) -> tuple[Any, dict[str, Any]]:
    """Return the shapes of what an op takes, `int` for a number, and its options, at a size."""
    from jax_kernels import NormParams

    T, H, W = min(size.frames, 8), size.height, size.width
    A = 4 if size.model == "small" else networks.TRANSFORMERS[size.model]["num_attention_heads"]
    S = 226 + ((size.frames - 1) // LATENT_FRAMES + 1) * (H // 16) * (W // 16)
    C, wide = 64 * A, (128,)
    x, z = (1, T, H, W, 128), (1, max(T // 4, 1), H // 8, W // 8, 16)
    modulation = ((16, 128), wide, (16, 128), wide)
    halves = (1, max(T // 2, 1), H // 2, W // 2, 128)
    tokens, inner, kinds = (2, S, C), (2, S, 4 * C), (2, 2, C)
    norm = NormParams(wide, wide, z, *modulation)
    groups = {"num_groups": 32}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "norm_conv3d": ((x, norm, (3, 3, 3, 128, 128), wide, (1, 2, H, W, 128)), groups),
        "upsample": ((halves, (3, 3, 128, 128), wide), {"expand_time": True}),
        "group_norm": ((x, wide, wide), {**groups, "channel_axis": -1, "activation": "silu"}),
        "spatial_norm": ((x, z, wide, wide, *modulation), {**groups, "activation": "silu"}),
        "attention": (((2, S, A, 64),) * 3, {}),
        "qk_norm_rope": ((tokens, (64,), (64,), (S, 64), (S, 64)), {"heads": A}),
        "adaptive_layer_norm": ((tokens, (C,), (C,), kinds, kinds, int), {}),
        "linear_gelu": ((tokens, (4 * C, C), (4 * C,)), {}),
        "gated_linear": ((inner, (C, 4 * C), (C,), tokens, kinds, int), {}),
    }
    return cases[name]


def _is_shape(value: Any) -> bool:
    return value is int or (type(value) is tuple and all(isinstance(side, int) for side in value))


def _kernel_work(request: DeviceTask, size: Size, mesh: Any) -> Work:
    import jax

    import jax_kernels

    name = request.job.removeprefix("kernels ")
    shapes, options = _kernel(name, size)
    dtype = runtime.jax_dtype(request.torch_dtype)
    one = jax.sharding.SingleDeviceSharding(mesh.devices.reshape(-1)[0])

    def struct(shape: Any) -> Any:
        if shape is int:
            return jax.ShapeDtypeStruct((), np.int32, sharding=one)
        angles = name == "qk_norm_rope" and shape in shapes[3:]
        return jax.ShapeDtypeStruct(shape, np.float32 if angles else dtype, sharding=one)

    structs = jax.tree.map(struct, shapes, is_leaf=_is_shape)

    def run(*operands: Any) -> Any:
        return getattr(jax_kernels, name)(*operands, **options)

    return Work(name, size.frames, jax.jit(run).lower, lambda: structs)


# Checked


def _judge(request: DeviceTask) -> Callable[[DeviceTask, Size], dict[str, Any]]:
    if request.job.startswith("kernels "):
        return _check_kernel
    if request.job in ("step", "prompt"):
        return _check_network
    return _check_gradients if request.job == "train" else _check_vae


def _check_vae(request: DeviceTask, size: Size) -> dict[str, Any]:
    vae, kind = worker.native(request.vae(size), request.torch_dtype), request.kind
    with np.load(request.data) as file:
        x, want = (torch.from_numpy(file[f"{name}_{kind}"]) for name in ("input", "answer"))
    if request.in_torch:
        vae.to(_torch_device())
        x = x.to(_torch_device())
    backend = backends.backend(request.backend).from_native(vae)
    if request.dp or request.tp:
        backend.vae.place_on(request.mesh())
    results = worker.run_chunks(backend, kind, backend.put(x.to(request.torch_dtype)))
    got = torch.cat([backend.to_torch(result).cpu() for result in results], dim=2)
    return worker.check(got, want, request.dtype, (request.torch_rms or {}).get(kind))


def _check_network(request: DeviceTask, size: Size) -> dict[str, Any]:
    exact, tensors = _network(request, size, "cpu")
    exact = nn.Module.float(exact)
    inputs = _tensors(tensors, stock=False)
    as_stock = {name: value for name, value in inputs.items() if name != "positions"}
    floats = {name: _cast(value, torch.float32) for name, value in as_stock.items()}
    want = Stock(exact)(floats, None)[0]
    own: Any = nn.Module.to(copy.deepcopy(exact), request.torch_dtype)
    torchs = tolerances.rms_error(Stock(own)(as_stock, None)[0], want)
    if request.in_torch:
        device = _torch_device()
        moved = {name: _cast(value, None, device) for name, value in as_stock.items()}
        got = Stock(own.to(device))(moved, None)[0].cpu()
        return worker.check(got, want, request.dtype, torchs)
    runtime.enable()
    mesh = request.mesh()
    program = _network_program(request, own, mesh)
    network = Stock(own) if request.way == "torchax-stock" else own.network_class(own)
    runtime.put_weights(network)
    given = as_stock if request.way == "torchax-stock" else inputs
    result = program.run(program.weights(network), program.put(given))[0]
    return worker.check(runtime.to_torch(runtime.tensor_of(result)), want, request.dtype, torchs)


def _cast(value: Any, dtype: torch.dtype | None, device: str = "cpu") -> Any:
    """Return a tensor, or a tuple of them, in a dtype, but for integers, and on a device."""
    if isinstance(value, tuple):
        return tuple(_cast(each, dtype, device) for each in value)
    return value.to(device, dtype if dtype and value.is_floating_point() else value.dtype)


def _check_gradients(request: DeviceTask, size: Size) -> dict[str, Any]:
    """Compare the gradients of both halves, all weights' together."""
    got, want, own = [], [], []
    dtype = request.torch_dtype
    exact = stock_of(worker.native(request.vae(size), torch.float32))
    rounded: Any = nn.Module.to(copy.deepcopy(exact), dtype)
    works: Any = (None, None)
    if not request.in_torch:
        ported: Any = port_vae(copy.deepcopy(rounded))
        runtime.put_weights(ported)
        works = list(training.gradient_works(ported, request.video(size), request.mesh()))
    elif _torch_device() == "cuda":
        rounded.to("cuda")
    for kind, work in zip(Direction, works, strict=True):
        job = jobs.Job(kind, size.frames, size.height, size.width)
        pieces, (channels, *sides) = job.chunk_shapes(port_vae(copy.deepcopy(exact)))
        shape = (1, channels, pieces[-1].stop, *sides)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        wanted = _torch_gradients(exact, chunk_network(exact, kind), kind, x)
        beside = x.to(rounded.device, dtype)
        torchs = _torch_gradients(rounded, chunk_network(rounded, kind), kind, beside)
        found = torchs
        if work is not None:
            weights = work.program.weights(chunk_network(ported, kind))
            batch = work.structs()[1].shape[0]
            array = work.program.place.put(runtime.as_array(x.to(dtype)))
            found = _gradients(work, weights, array, batch)
        for name in wanted:
            for flat, gradients in ((want, wanted), (own, torchs), (got, found)):
                flat.append(gradients[name].float().cpu().reshape(-1))
    got, want, own = map(torch.cat, (got, want, own))
    allowed = GRADIENT_RELATIVE if request.dtype == "float32" else None
    return worker.check(got, want, request.dtype, tolerances.rms_error(own, want), allowed)


def _gradients(work: Work, weights: Any, x: Any, batch: int) -> dict[str, torch.Tensor]:
    """Return the gradients by the program that is measured; of several equal videos, those of one."""
    import jax.numpy as jnp

    compiled = work.lower(weights, jnp.repeat(x, batch, 0)).compile()
    found, _ = compiled(weights, jnp.repeat(x, batch, 0))
    return {
        name: runtime.to_torch(runtime.tensor_of(gradient)).float() / batch
        for name, gradient in found.items()
    }


def _check_kernel(request: DeviceTask, size: Size) -> dict[str, Any]:
    """Compare an op with its plain reference, on the host in float32."""
    import importlib

    import jax
    import jax.numpy as jnp

    import jax_kernels

    name = request.job.removeprefix("kernels ")
    op = getattr(jax_kernels, name)
    plain = getattr(importlib.import_module(op.__module__.rpartition(".")[0] + ".reference"), name)
    shapes, options = _kernel(name, size)
    generator = np.random.default_rng(0)
    device, host = request.mesh().devices.reshape(-1)[0], jax.devices("cpu")[0]
    dtype = runtime.jax_dtype(request.torch_dtype)

    def drawn(shape: Any) -> Any:
        if shape is int:
            return 11
        scale = 1 / math.sqrt(math.prod(shape[:-1])) if len(shape) in (2, 5) else 1.0
        return (generator.normal(0.3, 1, tuple(shape)) * scale).astype(np.float32)

    exact = jax.tree.map(drawn, shapes, is_leaf=_is_shape)
    if name == "qk_norm_rope":  # both of a pair of channels have one angle
        *others, cos, sin = exact
        exact = (*others, *(np.repeat(table[:, ::2], 2, axis=1) for table in (cos, sin)))
    structs = _kernel_work(request, size, request.mesh()).structs()

    def put(where: Any) -> Any:
        return jax.tree.map(
            lambda value, struct: jax.device_put(jnp.asarray(value, struct.dtype), where), exact, structs
        )

    tile = {"tile": 2} if name == "norm_conv3d" and device.platform == "tpu" and dtype != np.float32 else {}
    with jax.default_device(host):
        want = plain(*jax.device_put(exact, host), **options)
        own = plain(*put(host), **options, **tile)
    got = op(*put(device), **options)
    leaves = [jax.tree.leaves(tree) for tree in (got, want, own)]
    got, want, own = (
        torch.from_numpy(np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in each]))
        for each in leaves
    )
    allowed = None if request.dtype == "float32" else tolerances.BFLOAT16_LAYER_RMS_RATIO
    return worker.check(got, want, request.dtype, tolerances.rms_error(own, want), allowed)
