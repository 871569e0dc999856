"""Work of a process of `bench`: describe the devices, compute a job's reference, measure a job, or plan it.

A job runs in parts: a VAE's first chunk and its later chunks, a training step's two directions, one call of a
network, one call of an op.

Letters of the kernels' shapes: T frames, H rows, W columns, S tokens, A heads, C channels of all heads.
"""

import contextlib
import functools
import importlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import jax_kernels
from cogvideox_torchax import backends, runtime
from cogvideox_torchax.bench.ladder import Size
from cogvideox_torchax.pipelines.networks import port_network, prompt_tensors, step_tensors
from cogvideox_torchax.plan import chips, jobs, models, networks, training
from cogvideox_torchax.plan.programs import Work, compile_program
from cogvideox_torchax.runtime.clock import CompileClock
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae import tolerances
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

ALLOWED = {
    ("train", "float32"): 1e-4,  # gradients sum what many pixels contribute
    ("kernels", "bfloat16"): tolerances.BFLOAT16_LAYER_RMS_RATIO,
}
"""By job and dtype, bounds of the error in place of the contract's."""
LATENT_FRAMES, LATENT_SIDE = 4, 8
"""Frames to a latent frame, and pixels to a latent pixel along each side."""
WHOLE = "whole"
"""The name under which all parts of a run are timed together."""
TOKENS = 226
"""Tokens of a prompt."""
SMALL_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_layers": 2,
    "use_rotary_positional_embeddings": True,
    "text_embed_dim": 256,
    "max_text_seq_length": 64,
}
SMALL_TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 512,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}

Run = Callable[[], Iterator[tuple[str, Any]]]
"""Runs a job once: yields the name and the result of each part, which JAX may still be computing."""


@dataclass(frozen=True)
class Task:
    """Request to a process.

    Attributes:
        job, way: of `ladder`; "" as the way is the reference: PyTorch on the host, or an op's plain form.
        size: the `ladder.Size` to measure, as a sequence.
        checked: the `ladder.Size` at which results are compared with the reference.
        dtype: of weights and activations.
        dp, tp: the mesh; one device where both are None.
        data: path of the .npy file of the reference's results.
        rms: error of PyTorch's own run in the dtype; see `reference`.
        peer: whether the way is a peer, which is timed with any finite error, even beyond the contract.
        platform: of the device that is measured.
        topology: of TPUs to plan for, such as "v6e:1x1".
        warmups: runs that do not count.
        runs, seconds, fewest: at most `runs` runs, as many as `seconds` hold, but at least `fewest`.
    """

    job: str = ""
    way: str = ""
    size: Any = None
    checked: Any = None
    dtype: str = "float32"
    dp: int | None = None
    tp: int | None = None
    data: str = ""
    rms: float = 0.0
    peer: bool = False
    platform: str = "cpu"
    topology: str = ""
    warmups: int = 2
    runs: int = 20
    seconds: float = 5.0
    fewest: int = 3

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def backend(self) -> str:
        """The backend of the way, which may end in ", kernels off"; PyTorch for a reference."""
        return self.way.partition(",")[0] or "torch"

    @property
    def torch_device(self) -> str | None:
        """The device of a way that runs in PyTorch; None for a way on JAX."""
        if self.backend not in ("torch", "torch-compile"):
            return None
        return "cuda" if self.way and torch.cuda.is_available() else "cpu"

    @property
    def direction(self) -> Direction:
        """The direction of a job of chunks: "encode" encodes, all others decode."""
        return ENCODE if self.job == "encode" else DECODE

    def mesh(self, devices: Any = None) -> Any:
        """Return the mesh of `dp` x `tp` devices, or of one device where neither is given.

        `devices` are those of a topology; None for JAX's.
        """
        several = self.dp or self.tp
        # A tp of None takes all devices that dp leaves.
        return make_mesh(self.dp or 1, self.tp if several else 1, devices=devices)


def probe(request: Task) -> dict[str, Any]:
    """Return a description of the devices in the request's mesh.

    "torch" is the device on which PyTorch runs on the same hardware, "cuda" or "cpu"; None on a TPU.

    Raises:
        ValueError: a mesh that does not fit the devices.
    """
    used = request.mesh().devices.reshape(-1).tolist()
    platform = used[0].platform
    beside = {"gpu": "cuda" if torch.cuda.is_available() else None, "cpu": "cpu"}
    return {
        "platform": platform,
        "kind": used[0].device_kind,
        "count": len(jax.devices()),
        "used": len(used),
        "coordinates": [list(getattr(device, "coords", None) or (0, 0, 0)) for device in used],
        "torch": beside.get(platform),
    }


@torch.no_grad()
def reference(request: Task) -> dict[str, Any]:
    """Write a job's results in float32 to `request.data`: PyTorch's on the host, or an op's plain form's.

    Returns:
        "rms", the error of the same computation in the job's dtype, and "flops", PyTorch's operations.
    """
    size, in_dtype = Size(*request.checked), replace(request, way="")
    exact = replace(in_dtype, dtype="float32")
    with FlopCounterMode(display=False) as counter:
        _, results = _once(_load(exact, size))
    want = _flat(results)
    del results
    np.save(request.data, want.numpy())
    got = want if in_dtype == exact else _flat(_once(_load(in_dtype, size))[1])
    return {"rms": tolerances.rms_error(got, want), "flops": counter.get_total_flops()}


@torch.no_grad()
def measure(request: Task) -> dict[str, Any]:
    """Compare a job's results with the reference; where they are right, time its runs.

    Returns:
        "check", the comparison. Unless "status" is "wrong", also the device, the seconds to load, the memory,
        and the times of the "whole" run and of its "parts": of the first run, which compiles, and the spread
        over the runs after the warm-ups.
    """
    checked, size = Size(*request.checked), Size(*request.size)
    start = time.perf_counter()
    run = _load(request, checked)
    load_seconds = time.perf_counter() - start
    first_run, results = _once(run)
    allowed = ALLOWED.get((request.job.partition(" ")[0], request.dtype))
    want = torch.from_numpy(np.load(request.data))
    verdict = check(_flat(results), want, request.dtype, request.rms, allowed)
    del results  # frees the device's memory for the runs below
    is_finite = isinstance(verdict.get("rms_error"), float)  # `check` gives text for any other number
    if not (verdict["passed"] or (request.peer and is_finite)):
        return {"status": "wrong", "check": verdict}
    if size != checked:
        run = _load(request, size)
        first_run, _ = _once(run)
    for _ in range(request.warmups):
        _once(run)
    runs: list[dict[str, Any]] = []
    end = time.perf_counter() + request.seconds
    while len(runs) < request.fewest or (len(runs) < request.runs and time.perf_counter() < end):
        runs.append(_once(run)[0])
    parts = {
        name: part | spread([each[name]["start_s"] for each in runs]) for name, part in first_run.items()
    }
    for part in parts.values() if request.torch_device else ():
        # JAX compiled nothing here; `torch.compile` compiles within the first run, and does not say how long.
        compiled = part["start_s"] if request.way == "torch-compile" else None
        part.update(lower_s=None, compile_s=compiled)
    peak = _peak_bytes()
    return {
        "check": verdict,
        "device": backends.backend(request.backend).device(),
        "load_s": load_seconds,
        "whole": parts.pop(WHOLE),
        "parts": [{"part": name, **part, "peak_bytes": peak} for name, part in parts.items()],
        "host_peak_bytes": runtime.host_peak_bytes(),
    }


def _once(run: Run) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Run a job once, each part computed to its end before the next begins; return (seconds, results).

    Returns:
        The seconds of each part by its name, parts of one name summed, and of the whole run under `WHOLE`:
        "start_s" in all, and of these "lower_s" and "compile_s" in JAX's compiler. Then a list of the parts'
        results.
    """
    clock, seconds, results = _clock(), dict[str, Counter[str]](), []
    start = time.perf_counter()
    for name, result in run():
        for leaf in jax.tree.leaves(result):
            jax.block_until_ready(runtime.wait(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken: Any = {"start_s": time.perf_counter() - start, **clock.take()}
        for key in (name, WHOLE):
            seconds.setdefault(key, Counter()).update(taken)  # adds
        results.append(result)
        start = time.perf_counter()
    return {name: dict(part) for name, part in seconds.items()}, results


_clock = functools.cache(CompileClock)  # one for the process, as a clock listens to JAX for good


def _peak_bytes() -> int | None:
    """Return the device's peak memory by its own counter; None for a device without one, such as a CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def spread(times: list[float]) -> dict[str, Any]:
    """Return times in seconds, their median and extremes, and how many there are."""
    extremes = {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}
    return extremes | {"runs": len(times), "all_s": times}


# Compared


def check(
    got: torch.Tensor, want: torch.Tensor, dtype: str, torchs: float, allowed: float | None = None
) -> dict[str, Any]:
    """Compare a job's numbers with the reference's.

    Args:
        got, want: all numbers of the results and of the reference, in one row each.
        dtype: the dtype whose contract of `tolerances` must hold.
        torchs: the RMS error of PyTorch's own run in that dtype, which bfloat16's contract multiplies.
        allowed: a bound in place of the contract's.

    Returns:
        "passed", "relative_error" and "rms_error", or "passed" and a "reason" where the shapes differ. An
        error that is not finite is text, as JSON has no such number.
    """
    if got.shape != want.shape:
        return {"passed": False, "reason": f"shape {tuple(got.shape)} for {tuple(want.shape)}"}
    error, rms = tolerances.relative_error(got, want), tolerances.rms_error(got, want)
    _, measured, bound = tolerances.contract(getattr(torch, dtype), error, rms, torchs)
    numbers = {"relative_error": error, "rms_error": rms}
    shown = {name: value if np.isfinite(value) else str(value) for name, value in numbers.items()}
    return {"passed": measured <= (allowed or bound), **shown}


def _flat(results: list[Any]) -> torch.Tensor:
    """Return all numbers of nested results, tensors or arrays, in one float32 row on the host."""
    hosts = [
        runtime.to_torch(leaf).cpu() if isinstance(leaf, torch.Tensor) else np.array(leaf, np.float32)
        for leaf in jax.tree.leaves(results)
    ]
    return torch.cat([torch.as_tensor(host).float().ravel() for host in hosts])


# Jobs


def _load(request: Task, size: Size) -> Run:
    """Load the model and the inputs of a job at a size; return the function that runs the job once."""
    families = {"kernels": _op, "train": _training_step, "step": _network, "prompt": _network}
    return families.get(request.job.partition(" ")[0], _chunks)(request, size)


def _seeded() -> Callable[..., torch.Tensor]:
    """Return a function that draws an input of a shape and a NumPy dtype, from a fixed seed.

    Floats are normal. Integers are all 7, which is valid as a token, as a timestep and as a text's length.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """Return the next input on the host."""
        name = np.dtype(dtype).name
        if "int" in name:
            return torch.full(shape, 7, dtype=torch.int32)
        return torch.randn(shape, generator=generator).to(getattr(torch, name))

    return draw


def _backend(request: Task, size: Size, *directions: Direction) -> tuple[Any, list[torch.Tensor]]:
    """Return a VAE on the way's backend, and an input for each of the directions, on the VAE's device.

    A published config gets random weights. An input to train on has a video for each device of "dp".
    """
    dtype, device = request.torch_dtype, request.torch_device
    torch.manual_seed(0)
    if size.model in models.CONFIGS:
        vae: Any = nn.Module.to(models.weightless_vae(size.model, torch.float32, "cpu"), dtype)
    else:
        vae = AutoencoderKLCogVideoX.from_pretrained(locate_vae(size.model), torch_dtype=dtype)
    draw, videos = _seeded(), (request.dp or 1) if request.job == "train" else 1
    inputs = []
    for direction in directions:
        chunks, (channels, *sides) = jobs.Job(direction, *size[1:]).chunk_shapes(vae)
        frames = chunks[-1].stop  # of all chunks; for decoding latent frames
        x = draw((videos, channels, frames, *sides), np.float32).to(dtype)
        inputs.append(x.to(device) if device else runtime.to_jax(x))
    backend = backends.backend(request.backend).from_native(nn.Module.to(vae, device) if device else vae)
    if request.way and (request.dp or request.tp):
        backend.vae.place_on(request.mesh())
    return backend, inputs


def _chunks(request: Task, size: Size) -> Run:
    """Load a VAE; a run gives the results of a video's chunks: the part "first", then each as "later"."""
    direction = request.direction
    backend, (x,) = _backend(request, size, direction)
    names = "first", *["later"] * size.frames  # more than there are chunks: `zip` drops the excess
    return lambda: zip(names, backend.chunks(direction, x), strict=False)


def _training_step(request: Task, size: Size) -> Run:
    """Load a VAE to train; a run gives the weights' gradients of encoding, then the gradients of decoding.

    The loss is half the sum of the squares of the result, and gradient checkpointing is on.
    """
    backend, inputs = _backend(request, size, *Direction)
    vae = backend.vae.train()
    vae.enable_gradient_checkpointing()
    if request.way == "torch-compile":
        vae.encoder.compile()
        vae.decoder.compile()

    def gradients(direction: Direction, x: torch.Tensor) -> tuple[str, Any]:
        """Return the part's name, and by name the gradients of the weights that a direction uses on `x`."""
        vae.zero_grad()
        with torch.enable_grad(), contextlib.nullcontext() if request.torch_device else runtime.active():
            result = vae.encode(x).latent_dist.parameters if direction == ENCODE else vae.decode(x).sample
            (result.square().sum() / 2).backward()
        weights = vae.named_parameters()
        return f"train {direction}", {
            name: weight.grad for name, weight in weights if weight.grad is not None
        }

    return lambda: map(gradients, Direction, inputs)


class Stock(nn.Module):
    """diffusers' transformer or text encoder, not ported, in the form that `runtime.Program` compiles.

    That form takes and returns a cache besides its inputs and its result; this network has none, so None.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        return self.model(**tensors, return_dict=False)[0], cache


def _network(request: Task, size: Size) -> Run:
    """Load the transformer or the text encoder; a run gives the result of one call.

    It runs in PyTorch where `request.torch_device` names a device; else on JAX, ported for the backend
    "torchax" and stock for "torchax-stock". A published config gets random weights. For a way on JAX the
    PyTorch model is then on "meta", without memory, and JAX arrays are drawn in the place of its weights.
    """
    dtype, published = request.torch_dtype, size.model in networks.TRANSFORMERS
    device = request.torch_device or ("meta" if published else "cpu")
    torch.manual_seed(0)
    if request.job == "prompt":
        config = networks.TEXT_ENCODER if published else SMALL_TEXT_ENCODER
        model = networks.text_encoder(config, dtype, device)
        described = prompt_tensors(batch=1, text=TOKENS)
    else:
        config = networks.TRANSFORMERS.get(size.model, SMALL_TRANSFORMER)
        model, ported = networks.transformer(config, dtype, device), networks.transformer(config, dtype)
        port_network(ported)  # without weights, for the description of its inputs alone
        described = step_tensors(ported, batch=2, **_latents(size))  # 2: with the prompt, and without
    # `described` has each input's (shape, dtype), or a tuple of such pairs, by name. The table of positions
    # is an input of the port alone: diffusers' model computes its own.
    if request.backend != "torchax":
        described.pop("positions", None)
    draw = _seeded()
    inputs = jax.tree.map(lambda spec: draw(*spec), described, is_leaf=lambda spec: not _are_several(spec))
    if request.torch_device:
        if request.way == "torch-compile":
            model.compile()
        given = jax.tree.map(lambda x: x.to(device), inputs)
        return lambda: iter([(request.job, model(**given, return_dict=False)[0])])
    if request.backend == "torchax":
        port_network(model)
        if request.dp or request.tp:
            model.place_on(request.mesh())
        network, program = model.network_class(model), model.build_program()
    else:
        network = Stock(model)
        program = runtime.Program(network)
    if published:
        weight_structs, *_ = program.structs(described)
        weights = jax.tree.map(_array, weight_structs)
    else:
        runtime.put_weights(network)
        weights = program.weights(network)
    arrays = program.put(inputs)
    return lambda: iter([(request.job, program.run(weights, arrays)[0])])


def _are_several(described: Any) -> bool:
    """Return whether a description is of several inputs: a dict, or a tuple of (shape, dtype) pairs.

    The description of one input is such a pair itself.
    """
    return isinstance(described, dict) or isinstance(described[1], tuple)


def _array(struct: Any) -> jax.Array:
    """Return small random numbers as an array of a struct's shape, dtype and sharding.

    Some numbers are drawn and repeated, as billions would take minutes; their count is a prime, so that the
    rows of a matrix differ.
    """
    numbers = np.random.default_rng(0).normal(0, 0.02, 65_537).astype(struct.dtype)
    return jax.device_put(np.resize(numbers, struct.shape), struct.sharding)


def _latents(size: Size) -> dict[str, int]:
    """Return the "frames", "height" and "width" of the latents of a video of a size."""
    frames = (size.frames - 1) // LATENT_FRAMES + 1
    return {"frames": frames, "height": size.height // LATENT_SIDE, "width": size.width // LATENT_SIDE}


# Kernels


def _op(request: Task, size: Size) -> Run:
    """Load an op with random operands, or, for the reference, the op's plain form on the host.

    A run gives the result of one call.
    """
    name = request.job.removeprefix("kernels ")
    structs, options = op_structs(name, size, runtime.jax_dtype(request.torch_dtype))
    draw = _seeded()

    def operand(struct: Any) -> Any:
        """Return a random array of a struct's shape and dtype."""
        is_integer = np.issubdtype(struct.dtype, np.integer)
        numbers = draw(struct.shape, np.int32 if is_integer else np.float32).numpy()
        # Weights of convolutions and products are among the operands of 2 and 5 axes: scaled down, sums of
        # their products stay near 1. A mean other than 0 shows an error in a norm's mean.
        scale = math.sqrt(math.prod(struct.shape[:-1])) if len(struct.shape) in (2, 5) else 1.0
        return jax.device_put((numbers if is_integer else (numbers + 0.3) / scale).astype(struct.dtype))

    operands = jax.tree.map(operand, structs)
    if name == "qk_norm_rope":  # its last two operands are the rotation's tables, cosines and sines
        operands = *operands[:3], *map(of_pairs, operands[3:])
    op = run = getattr(jax_kernels, name)
    if request.way:
        run = jax.jit(functools.partial(op, **options))
    else:
        module = importlib.import_module(op.__module__.rpartition(".")[0] + ".reference")
        tiled = name == "norm_conv3d" and request.platform == "tpu" and request.dtype != "float32"
        tile = {"tile": 2} if tiled else {}  # Winograd's, whose rounding a TPU's results have
        run = functools.partial(getattr(module, name), **options, **tile)
    return lambda: iter([(name, run(*operands))])


def of_pairs(angles: Any) -> Any:
    """Return a rotation's table (S, D) with the entry of each even channel repeated in the odd one after it.

    Two channels form a pair, which is rotated by one angle.
    """
    return angles[:, ::2].repeat(2, axis=1)


def op_structs(name: str, size: Size, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """Return the structs (shape, dtype) of an op's operands, nested as the op takes them, and its options.

    Args:
        name: of the op, of `ladder.KERNELS`.
        size: of the video, and the model whose transformer gives the number of heads.
        dtype: of all operands but integers and rotations' tables.
    """
    T, H, W = min(size.frames, 8), size.height, size.width
    A = networks.TRANSFORMERS.get(size.model, SMALL_TRANSFORMER)["num_attention_heads"]
    S = TOKENS + ((size.frames - 1) // LATENT_FRAMES + 1) * (H // 16) * (W // 16)
    C = 64 * A

    def struct(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    # The VAE's: a chunk at full size, where it has 128 channels; its latents; a weight or bias of a norm; the
    # two convolutions of a spatial norm, each a kernel and a bias.
    x, z, channels = struct(1, T, H, W, 128), struct(1, max(T // 4, 1), H // 8, W // 8, 16), struct(128)
    modulation = struct(16, 128), channels, struct(16, 128), channels
    half_size, text_length = struct(1, max(T // 2, 1), H // 2, W // 2, 128), struct(dtype=np.int32)
    # The transformer's: two sequences, for guidance; their feed-forward's inner channels; a vector for the
    # text and one for the video of each sequence; a rotation's table.
    tokens, inner, text_and_video, angles = (
        struct(2, S, C),
        struct(2, S, 4 * C),
        struct(2, 2, C),
        struct(S, 64, dtype=np.float32),
    )
    norm = jax_kernels.NormParams(channels, channels, z, *modulation)
    groups = {"num_groups": 32}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "norm_conv3d": ((x, norm, struct(3, 3, 3, 128, 128), channels, struct(1, 2, H, W, 128)), groups),
        "upsample": ((half_size, struct(3, 3, 128, 128), channels), {"expand_time": True}),
        "group_norm": ((x, channels, channels), {**groups, "channel_axis": -1, "activation": "silu"}),
        "spatial_norm": ((x, z, channels, channels, *modulation), {**groups, "activation": "silu"}),
        "attention": ((struct(2, S, A, 64),) * 3, {}),
        "qk_norm_rope": ((tokens, struct(64), struct(64), angles, angles), {"heads": A}),
        "adaptive_layer_norm": (
            (tokens, struct(C), struct(C), text_and_video, text_and_video, text_length),
            {},
        ),
        "linear_gelu": ((tokens, struct(4 * C, C), struct(4 * C)), {}),
        "gated_linear": ((inner, struct(C, 4 * C), struct(C), tokens, text_and_video, text_length), {}),
    }
    return cases[name]


# Planned


def estimate(request: Task) -> dict[str, Any]:
    """Return {"seconds": `plan`'s estimates by part of a job}; no device is needed.

    Raises:
        PlanError: a network of another shape than the published ones.
    """
    size, dtype = Size(*request.size), request.torch_dtype
    devices = chips.topology_devices(request.topology)
    chip = chips.CHIPS[request.topology.partition(":")[0]]
    mesh = request.mesh(devices)
    if request.job not in ("step", "prompt"):
        plans = [compile_program(work, mesh, chip) for work in _works(request, size, mesh)]
        return {"seconds": {plan.name: plan.seconds_with_collectives for plan in plans}}
    if size.model not in networks.TRANSFORMERS:
        raise chips.PlanError("plan has the published shapes alone")
    options = {"dp": mesh.shape["dp"], "tp": mesh.shape["tp"]}
    if request.job == "step":
        plan = networks.plan_step(size.model, dtype, devices, chip, **_latents(size), **options)
    else:
        # All published models have one text encoder, which None stands for.
        plan = networks.plan_prompt(None, dtype, devices, chip, tokens=TOKENS, **options)
    return {"seconds": {request.job: networks.network_table(plan, chip).get("with_collectives_s")}}


def _works(request: Task, size: Size, mesh: Any) -> Iterable[Work]:
    """Return the programs of a kernel's or a VAE's job, to be compiled for a mesh of a topology's devices."""
    if request.job.startswith("kernels "):
        name = request.job.removeprefix("kernels ")
        structs, options = op_structs(name, size, runtime.jax_dtype(request.torch_dtype))
        one = jax.sharding.SingleDeviceSharding(mesh.devices.item())
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), structs)
        run = jax.jit(functools.partial(getattr(jax_kernels, name), **options))
        return [Work(name, size.frames, run.lower, lambda: placed)]
    vae = models.weightless_vae(size.model, request.torch_dtype)
    job = jobs.Job(request.direction, *size[1:])  # its direction does not matter in training, which has both
    works = training.gradient_works if request.job == "train" else jobs.chunk_works
    return works(vae, job, mesh)
