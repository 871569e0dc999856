"""`plan` for a pipeline's transformer and text encoder: one denoising step, and the encoding of a prompt.

All layers of a network are equal, and the compiler takes minutes for each. So two programs of a few layers
are compiled, and the difference that a layer makes is extrapolated to all layers. For temporaries this is an
upper bound, as buffers are reused. Attention on a TPU is a kernel, for which the compiler gives no cycles:
its final schedule counts. If that is not known, attention counts as its floating-point operations over the
chip's peak, and the plan says so.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from transformers import T5Config, T5EncoderModel

from cogvideox_torchax import runtime
from cogvideox_torchax.files.models import locate, read_json
from cogvideox_torchax.pipelines.cache_options import config_of
from cogvideox_torchax.pipelines.networks import (
    CachedStep,
    TensorSpecs,
    port_network,
    prompt_tensors,
    step_tensors,
)
from cogvideox_torchax.plan import models
from cogvideox_torchax.plan.chips import GIB, Chip, PlanError
from cogvideox_torchax.plan.programs import COPY, KERNEL, ProgramPlan, Work, compile_program
from cogvideox_torchax.plan.report import figures
from cogvideox_torchax.sharding import Parallel, make_mesh

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "2b": {"num_attention_heads": 30, "num_layers": 30},
    "5b": {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    "1.5-5b": {
        "num_attention_heads": 48,
        "num_layers": 42,
        "use_rotary_positional_embeddings": True,
        "patch_size_t": 2,
        "patch_bias": False,
        "max_text_seq_length": 224,
    },
}
"""Configs of the published transformers, as far as they cost time; other values are diffusers' defaults."""

TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
"""Config of T5 v1.1 XXL's encoder, which all published pipelines have."""

FEW = (2, 3)
"""Number of layers of the two programs that are compiled.

One layer alone would mislead: the second reuses buffers of the first, and a step cache treats the first layer
differently.
"""

STEPS = 50
"""Denoising steps of a whole video."""


@dataclass(frozen=True)
class NetworkPlan:
    """The compiler's figures for a network of many layers, per device, from programs of a few.

    Attributes:
        name: "step" or "prompt".
        program: plan of the program of `FEW[1]` layers, with times, sizes and numbers of kernels
            extrapolated to all layers; its `collectives` are not.
        layers: number of layers of the whole network.
        attention_seconds: time of all Pallas kernels, attention's among them; a part of `seconds`. None
            without a chip.
        by_schedule: whether attention's time is that of its kernel's final schedule; False if it is its
            floating-point operations over the chip's peak.
        parallel: in words, how the network uses the mesh's axis "tp", and why.
        kept: bytes that a step cache keeps for the next step; the program's `argument_bytes` have them too.
    """

    name: str
    program: ProgramPlan
    layers: int
    attention_seconds: float | None
    by_schedule: bool = True
    parallel: str = ""
    kept: int = 0

    @property
    def seconds(self) -> float | None:
        """The estimate of the whole network, without collectives; None if a part of it is not known."""
        if self.program.seconds is None or self.attention_seconds is None:
            return None
        # `attention_seconds` replaces the kernels' seconds in `shares`: it may be counted at the chip's peak.
        return self.program.seconds - self.program.shares.get(KERNEL, 0.0) + self.attention_seconds


def weightless_transformer(model: str | None, dtype: torch.dtype, layers: int) -> Any:
    """Return a ported transformer of `layers` layers and no weights; `model` as for `transformer_config`.

    Raises:
        PlanError: a model that has no transformer.
    """
    config = transformer_config(model)
    if "num_layers" not in config:  # of a VAE
        raise PlanError(
            f"{model} has no transformer: give a whole pipeline, or one of {', '.join(TRANSFORMERS)}"
        )
    return port_network(transformer({**config, "num_layers": layers}, dtype))


def transformer(config: dict[str, Any], dtype: torch.dtype, device: str = "meta") -> Any:
    """Return diffusers' transformer of a config, with random weights; with none on device "meta"."""
    return models.build(lambda: CogVideoXTransformer3DModel.from_config(config), dtype, device)


def text_encoder(config: dict[str, Any], dtype: torch.dtype, device: str = "meta") -> Any:
    """Return transformers' text encoder of a T5 config, with random weights; with none on device "meta"."""
    return models.build(lambda: T5EncoderModel(T5Config(**config)), dtype, device)


def transformer_config(model: str | None) -> dict[str, Any]:
    """Return a transformer's config.

    Args:
        model: a name of `TRANSFORMERS`, or a pipeline's directory or hub id; None is "5b".
    """
    name = model or "5b"
    if name in TRANSFORMERS:
        return TRANSFORMERS[name]
    return read_json(locate(name, "transformer", files=("config.json",)) / "config.json")


def text_encoder_config(model: str | None) -> dict[str, Any]:
    """Return the text encoder's config of a model.

    Args:
        model: a name of `TRANSFORMERS`, such as "5b", a pipeline's directory or hub id; None for "5b".

    Raises:
        PlanError: a model that has no T5.
    """
    name = model or "5b"
    if name in TRANSFORMERS:
        return TEXT_ENCODER
    config = read_json(locate(name, "text_encoder", files=("config.json",)) / "config.json")
    if config.get("model_type") != "t5":
        raise PlanError(
            f"{name} has no T5 text encoder: give a whole pipeline, or one of {', '.join(TRANSFORMERS)}"
        )
    return config


def plan_step(
    model: str | None,
    dtype: torch.dtype,
    devices: list[Any],
    chip: Chip | None,
    *,
    frames: int,
    height: int,
    width: int,
    guided: bool = True,
    dp: int = 1,
    tp: int = 1,
    parallel: Parallel | None = None,
    cache: str | None = None,
    step: int = 0,
) -> NetworkPlan:
    """Plan one denoising step of one video.

    Compiles two transformers, of 2 and of 3 layers (`FEW`), and extrapolates to all layers.

    Args:
        model: a name of `TRANSFORMERS`, such as "5b", a pipeline's directory or hub id; None for "5b".
        dtype: dtype of weights and activations.
        devices: devices of a topology, or of this machine.
        chip: the chip whose peaks give the times; None for no times.
        frames, height, width: size of the latents.
        guided: whether the batch has the video twice, without the prompt and with it, for guidance.
        dp, tp: sizes of the mesh.
        parallel: the use of the mesh's axis "tp", as `port` takes it; None chooses by the chip's memory.
        cache: a step cache, which reuses results of earlier steps, as the command line takes it
            (`cache_options.CHOICES`); None for none.
        step: with a cache, number of the step to plan, a key of `cached_steps`. Step 0 runs all layers.

    Raises:
        PlanError: a config that cannot be read, or a size that its patches do not divide.
    """
    networks = [weightless_transformer(model, dtype, few) for few in FEW]
    config, layers = networks[0].config, transformer_config(model)["num_layers"]
    patch, patch_t = config["patch_size"], config["patch_size_t"] or 1  # None: patches have a single frame
    if height % patch or width % patch:
        raise PlanError(
            f"got {height} x {width} latents: the transformer's patches take multiples of {patch}"
        )
    frames = -(-frames // patch_t) * patch_t  # padded to whole patches, as diffusers' pipelines do
    batch = 2 if guided else 1
    mesh = make_mesh(dp, tp, devices=devices)
    plans, kept = [], []  # of each transformer: its plan, and the bytes that a cache keeps for the next step
    for few, network in zip(FEW, networks, strict=True):
        # A device's memory decides whether it has all weights or gathers them. The few layers get a
        # proportional part of the memory, so that the decision is the same as for all layers.
        network.place_on(mesh, parallel, chip and chip.memory * few / layers)
        tensors = step_tensors(network, batch=batch, frames=frames, height=height, width=width)
        program, before = network.program, None
        if cache is not None:
            program, tensors = cached_program(network, tensors, cache, batch, step)
            # The program takes arrays that the previous step, with equal inputs, has kept.
            before = tensors
            kept.append(cache_bytes(program, tensors))
        structs = functools.partial(program.structs, tensors, before=before)
        plans.append(compile_program(Work("step", frames, program.lower, structs), mesh, chip))
    patches = frames // patch_t * (height // patch) * (width // patch)
    tokens = config["max_text_seq_length"] + patches
    # Attention has two products, queries by keys and scores by values, of 2 operations for a multiply-add.
    layer_flops = 2 * 2 * batch * config["num_attention_heads"] * config["attention_head_dim"] * tokens**2
    attention_flops = layer_flops * layers / (dp * tp)  # of a device; they count where a schedule is missing
    # None are added without kernels, as on a CPU: attention is in the compiler's own figures. Nor for a step
    # after the first, which may skip attention: only the kernels of the compiled program count.
    if not plans[0].kernels or step > 0:
        attention_flops = 0.0
    plan = _extrapolated_plan("step", plans, layers, attention_flops, chip)
    kept_by_all_layers = _extrapolate(kept[0], kept[1], layers) if kept else 0
    return replace(plan, parallel=str(networks[0].parallelism), kept=kept_by_all_layers)


def cached_steps(model: str | None, dtype: torch.dtype, cache: str, guided: bool = True) -> dict[int, int]:
    """Return the number of steps of each kind in a run with a cache, by the number of the kind's first step.

    Steps of one kind run the same layers, and share a program. FirstBlockCache decides at run time which
    layers a step runs: its result has one step that runs all blocks, and one that does not.

    Args:
        model: a name of `TRANSFORMERS`, such as "5b", a pipeline's directory or hub id; None for "5b".
        dtype: dtype of weights and activations.
        cache: a step cache, as the command line takes it (`cache_options.CHOICES`).
        guided: whether the batch has the video twice, for guidance.
    """
    network = weightless_transformer(model, dtype, FEW[0])  # the fewest layers `plan_step` takes
    # Each step's form: the layers that it runs and the results that it keeps (`caches.Form`), its kind.
    forms = [form for form, _numbers in _plan_cached_run(network, cache, 2 if guided else 1)]
    return {forms.index(form): count for form, count in Counter(forms).items()}


def _plan_cached_run(network: Any, cache: str, batch: int) -> list[Any]:
    """Enable a cache on a transformer without weights, and return the plan of each step of a run.

    Args:
        network: the transformer.
        cache: name of a step cache, and its value if one is given, such as "pab:2".
        batch: number of videos: 2 with guidance, else 1.

    Returns:
        (form, numbers) of each step. The form names the layers that run and the results that are kept. The
        numbers are scalar tensors, by name, that the step's program takes besides the transformer's inputs.
    """
    # A list, so that `steps` can set its one item, the present step's timestep, and the cache's configuration
    # reads it: some caches skip only steps in a range of timesteps.
    timestep = [0.0]

    def steps() -> Iterator[int]:
        """Yield each step's number, once its timestep is set: from 999 down, as diffusers' schedulers."""
        for step in range(STEPS):
            timestep[0] = 999 - step * 1000 / STEPS
            yield step

    config = config_of(cache, steps=STEPS, guided=batch == 2, timestep=lambda: timestep[0])
    network.enable_cache(config)
    network.take_cache()  # moves diffusers' hooks from the modules into `step_cache`
    return runtime.without_torchax(network.step_cache.plan_run, network, batch, steps())


def cached_program(
    network: Any, tensors: TensorSpecs, cache: str, batch: int, step: int
) -> tuple[Any, TensorSpecs]:
    """Return the program of a step with a cache, and the (shape, JAX dtype) of each of its inputs by name.

    Args:
        network: a ported transformer without weights; the cache is enabled on it.
        tensors: inputs of a step without a cache, of `step_tensors`.
        cache: name of the step cache, as the command line takes it.
        batch: number of videos: 2 with guidance, else 1.
        step: the step's number in a run.
    """
    # The layers that the step runs, and scalar inputs that the cache adds, such as a threshold.
    form, numbers = _plan_cached_run(network, cache, batch)[step]
    number_specs = {
        name: (tuple(number.shape), jax.dtypes.canonicalize_dtype(runtime.jax_dtype(number.dtype)))
        for name, number in numbers.items()
    }
    return network.program_of(CachedStep(network, attention_kwargs=None, form=form)), tensors | number_specs


def cache_bytes(program: runtime.Program, tensors: TensorSpecs) -> int:
    """Return the bytes on one device of the cache that a program returns for these inputs."""
    # What a call returns, the next call takes: `structs` describes the next call, with equal inputs.
    _weights, _inputs, cache = program.structs(tensors, before=tensors)
    total = 0
    for array in jax.tree.leaves(cache):
        shape = array.sharding.shard_shape(array.shape) if array.sharding else array.shape  # on one device
        total += math.prod(shape) * array.dtype.itemsize
    return total


def plan_prompt(
    model: str | None,
    dtype: torch.dtype,
    devices: list[Any],
    chip: Chip | None,
    *,
    tokens: int,
    dp: int = 1,
    tp: int = 1,
) -> NetworkPlan:
    """Plan the encoding of one prompt.

    Text encoders of 2 and of 3 layers (`FEW`) are compiled, and their costs are extrapolated to all layers.

    Args:
        model: a name of `TRANSFORMERS`, such as "5b", a pipeline's directory or hub id; None for "5b".
        dtype: dtype of weights and activations.
        devices: devices of a topology, or of this machine.
        chip: the chip whose peaks give the times; None for no times.
        tokens: number of tokens of the prompt.
        dp, tp: sizes of the mesh.
    """
    config, mesh = text_encoder_config(model), make_mesh(dp, tp, devices=devices)
    plans = []
    for few in FEW:
        network = port_network(text_encoder({**config, "num_layers": few}, dtype))
        network.place_on(mesh)
        program = network.program
        structs = functools.partial(program.structs, prompt_tensors(batch=1, text=tokens))
        plans.append(compile_program(Work("prompt", tokens, program.lower, structs), mesh, chip))
    # Text encoders have no attention kernel, the only use of `attention_flops`.
    plan = _extrapolated_plan("prompt", plans, config["num_layers"], attention_flops=0.0, chip=chip)
    return replace(plan, parallel=str(network.parallelism))  # equal for both encoders


def _extrapolated_plan(
    name: str, plans: list[ProgramPlan], layers: int, attention_flops: float, chip: Chip | None
) -> NetworkPlan:
    """Extrapolate from the plans of a few layers to the plan of the whole network.

    Args:
        name: "step" or "prompt".
        plans: plans of the programs with the two numbers of layers in `FEW`, the one of fewer layers first.
        layers: number of layers of the whole network.
        attention_flops: operations of all layers' attention on one device, which count at the chip's peak if
            a schedule of the attention kernel is missing.
        chip: the chip whose peaks give the times; None for no times.
    """
    fewer, more = plans
    values = _extrapolate_fields(GROWING, fewer, more, layers)  # for all layers, by the plan's fields
    values["temp_bytes"] = max(more.temp_bytes, values["temp_bytes"])  # reused buffers may make it fall
    values["kernel_times"] = {}
    for kernel, time in more.kernel_times.items():
        # A kernel that the program of fewer layers lacks is taken as it is: no layer adds to it.
        time_of_fewer = fewer.kernel_times.get(kernel, time)
        grown = _extrapolate_fields(GROWING_TIMES, time_of_fewer, time, layers)
        values["kernel_times"][kernel] = replace(time, **grown)
    program = replace(more, compile_seconds=fewer.compile_seconds + more.compile_seconds, **values)
    if chip is None:
        return NetworkPlan(name, program, layers, attention_seconds=None)
    # The seconds of all Pallas kernels, attention's among them; 0 for a program without any.
    seconds = program.shares.get(KERNEL, 0.0)
    attention = program.kernel_times.get("attention")
    # `by_bytes` is the number of attention kernels whose schedule is missing.
    by_schedule = attention is None or attention.by_bytes == 0
    if not by_schedule:
        seconds = max(seconds, attention_flops / chip.flops)
    return NetworkPlan(name, program, layers, attention_seconds=seconds, by_schedule=by_schedule)


GROWING = (
    "flops",
    "bytes_accessed",
    "seconds",
    "floor_seconds",
    "shares",
    "collective_seconds",
    "kernels",
    "argument_bytes",
    "temp_bytes",
    "output_bytes",
)
"""Fields of a `ProgramPlan` that grow with each layer."""
GROWING_TIMES = ("count", "bytes_seconds", "schedule_seconds", "seconds")
"""Fields of a `KernelTime` that grow with each layer."""


def _extrapolate_fields(fields: tuple[str, ...], fewer: Any, more: Any, layers: int) -> dict[str, Any]:
    """Return values of `fields` for `layers` layers, extrapolated by `_extrapolate`, by the fields' names.

    `fewer` and `more` are plans, or `KernelTime`s, of programs with the two numbers of layers in `FEW`.
    """
    return {field: _extrapolate(getattr(fewer, field), getattr(more, field), layers) for field in fields}


def _extrapolate(fewer: Any, more: Any, layers: int) -> Any:
    """Extrapolate a figure linearly from the two numbers of layers in `FEW` to `layers`.

    Args:
        fewer, more: the figure for `FEW[0]` and for `FEW[1]` layers: a number, a dictionary of numbers, or
            None.
        layers: number of layers of the whole network.

    Returns:
        A result of `more`'s type; None if either figure is None.
    """
    if fewer is None or more is None:
        return None
    if isinstance(more, dict):
        return {key: _extrapolate(fewer.get(key, 0.0), number, layers) for key, number in more.items()}
    return type(more)(more + (layers - FEW[1]) / (FEW[1] - FEW[0]) * (more - fewer))


def cached_table(plans: list[NetworkPlan], counts: list[int], chip: Chip | None) -> dict[str, Any]:
    """Return the figures of a video with a cache: of a full step, the memory kept, and the steps' times.

    Kinds of steps that skip are numbered: "skipping_step_2_s" has the seconds of a step of the second kind.

    Args:
        plans: a plan of each kind of step (`cached_steps`), the full step first.
        counts: number of steps of each kind in a video.
        chip: the chip whose peaks give the times; None for no times.
    """
    steps = [f"{counts[0]} in full"]
    steps += [f"{count} of skipping step {kind}" for kind, count in enumerate(counts[1:], 1)]
    rows = network_table(plans[0], chip)  # of the full step
    rows |= {"kept_GiB": plans[0].kept / GIB, "steps": ", ".join(steps)}
    if chip is not None:
        # Of a step of each kind, with the time of collectives where the plan has one.
        seconds = [network_table(plan, chip).get("with_collectives_s", plan.seconds) for plan in plans]
        rows |= {f"skipping_step_{kind}_s": skipping for kind, skipping in enumerate(seconds[1:], 1)}
        rows["all_steps_s"] = sum(count * of_one for count, of_one in zip(counts, seconds, strict=True))
    return rows


def network_table(plan: NetworkPlan, chip: Chip | None) -> dict[str, Any]:
    """Return a plan's figures per device, by the names that `plan` prints.

    Sizes and times are for all layers: they are extrapolated from programs of two numbers of layers, `FEW`.
    """
    program = plan.program
    seconds: dict[str, Any] = {}
    if plan.seconds is not None:
        seconds = {
            "estimate_s": plan.seconds,
            "of_it_attention_s": plan.attention_seconds,
            "attention_counted": "by schedule" if plan.by_schedule else "at the chip's peak",
            **{f"of_it_{kernel}_s": time.seconds for kernel, time in program.kernel_times.items()},
            "of_it_copies_s": program.shares.get(COPY, 0.0),
        }
    if plan.seconds is not None and program.collective_seconds is not None:
        seconds["collectives_s"] = collectives = sum(program.collective_seconds.values())
        seconds["with_collectives_s"] = plan.seconds + collectives
    return figures(
        f"{plan.name}, {plan.layers} layers, from programs of {' and '.join(map(str, FEW))}",
        {
            "arguments_GiB": program.argument_bytes,
            "temporaries_GiB": program.temp_bytes,
            "results_GiB": program.output_bytes,
            "peak_memory_GiB": program.peak_bytes,
        },
        seconds,
        parallel=plan.parallel,
        flops=program.flops,
        compile_seconds=program.compile_seconds,
        chip=chip,
    )
