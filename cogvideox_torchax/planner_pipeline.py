"""`plan` for a pipeline's other two networks: one denoising step, and the encoding of a prompt.

Their layers are all alike and compile one by one, which takes minutes each: two programs of a few layers are
compiled, and what a layer adds is multiplied. Of temporaries that is an upper bound: buffers are used again.
Attention on a TPU is a kernel, for which the compiler gives no cycles: its floating-point operations are
counted against the chip's peak and shown apart.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from cogvideox_torchax import components, runtime
from cogvideox_torchax.hollow import PlanError
from cogvideox_torchax.planner import Chip, ProgramPlan, read_program
from cogvideox_torchax.sharding import make_mesh

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
"""The published transformers, in what costs time; everything else is diffusers' default."""

TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
"""T5 v1.1 XXL's encoder, which all of them have."""

FEW = (1, 2)
"""Layers of the two programs that are compiled."""


@dataclass(frozen=True)
class NetworkPlan:
    """What the compiler says of a network of many layers, a device, from programs of a few.

    Attributes:
        name: "step" or "prompt".
        program: of the whole network: its estimates and sizes extended, its collectives not.
        layers: of the whole network.
        attention_flops: of its attention kernels; they are not part of `program`.
        attention_seconds: those over the chip's peak; None for no chip.
    """

    name: str
    program: ProgramPlan
    layers: int
    attention_flops: float
    attention_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """The compiler's estimate, and attention at the chip's peak; None where there is no estimate."""
        if self.program.seconds is None or self.attention_seconds is None:
            return None
        return self.program.seconds + self.attention_seconds


def hollow_transformer(model: str | None, dtype: torch.dtype, layers: int) -> Any:
    """The ported transformer of a published config or of a directory, of so many layers, without weights."""
    config = {**transformer_config(model), "num_layers": layers}

    def build() -> Any:
        from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel

        with torch.device("meta"):
            network: Any = CogVideoXTransformer3DModel.from_config(config)
        return torch.nn.Module.to(network, dtype).eval()

    return _ported(runtime.without_torchax(build))


def transformer_config(model: str | None) -> dict[str, Any]:
    """The config of a published transformer, or of a pipeline's directory or hub id."""
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel

    if (model or "5b") in TRANSFORMERS:
        return TRANSFORMERS[model or "5b"]
    try:
        return dict(CogVideoXTransformer3DModel.load_config(model, subfolder="transformer"))  # pyright: ignore
    except OSError as error:
        raise PlanError(f"cannot read the transformer's config of {model}: {error}") from error


def hollow_text_encoder(dtype: torch.dtype, layers: int) -> Any:
    """The ported T5 v1.1 XXL encoder of so many layers, without weights."""

    def build() -> Any:
        from transformers import T5Config, T5EncoderModel

        with torch.device("meta"):
            network = T5EncoderModel(T5Config(**{**TEXT_ENCODER, "num_layers": layers}))
        return torch.nn.Module.to(network, dtype).eval()

    return _ported(runtime.without_torchax(build))


def _ported(network: Any) -> Any:
    components.port_network(network)
    return network


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
) -> NetworkPlan:
    """One denoising step of one video.

    Args:
        model: "2b", "5b", "1.5-5b", a pipeline's directory or its hub id.
        dtype: of weights and activations.
        devices: of a topology, or of this machine.
        chip: the peaks to hold it against; None for none.
        frames, height, width: of the latents.
        guided: whether the step runs on both halves of classifier-free guidance.
        dp, tp: the mesh.

    Raises:
        PlanError: a config that cannot be read, or a size that its patches do not divide.
    """
    networks = [hollow_transformer(model, dtype, layers) for layers in FEW]
    config, layers = networks[0].config, transformer_config(model)["num_layers"]
    patch, patch_t = config["patch_size"], config["patch_size_t"] or 1
    if height % patch or width % patch:
        raise PlanError(
            f"got {height} x {width} latents: the transformer's patches take multiples of {patch}"
        )
    frames = -(-frames // patch_t) * patch_t
    batch = 2 if guided else 1
    plans = []
    for network in networks:
        tensors = components.step_tensors(network, batch=batch, frames=frames, height=height, width=width)
        plans.append(_compile("step", frames, network, tensors, make_mesh(dp, tp, devices=devices), chip))
    tokens = config["max_text_seq_length"] + frames // patch_t * (height // patch) * (width // patch)
    products = 4 * batch * config["num_attention_heads"] * config["attention_head_dim"] * tokens**2
    attention = products * layers / (dp * tp) if plans[0].kernels else 0.0
    return _extended("step", plans, layers, attention, chip)


def plan_prompt(
    dtype: torch.dtype, devices: list[Any], chip: Chip | None, *, tokens: int, dp: int = 1, tp: int = 1
) -> NetworkPlan:
    """The encoding of one prompt of so many tokens; the rest as `plan_step` takes it."""

    tensors = components.prompt_tensors(batch=1, text=tokens)
    mesh = make_mesh(dp, tp, devices=devices)
    plans = [
        _compile("prompt", tokens, hollow_text_encoder(dtype, layers), tensors, mesh, chip) for layers in FEW
    ]
    return _extended("prompt", plans, TEXT_ENCODER["num_layers"], 0.0, chip)


def _compile(
    name: str, frames: int, network: Any, tensors: dict[str, Any], mesh: Any, chip: Chip | None
) -> ProgramPlan:
    import jax

    network.place_on(mesh)
    start = time.perf_counter()
    with jax.set_mesh(mesh):  # lowering a kernel for a TPU asks it for the chip's kind
        compiled = network.program.lower_structs(network.options(), tensors).compile()
    taken = time.perf_counter() - start
    return read_program(name, frames, compiled, chip, taken, count_kernels=False)


def _extended(
    name: str, plans: list[ProgramPlan], layers: int, attention_flops: float, chip: Chip | None
) -> NetworkPlan:
    """The plan of all layers from those of a few: what one more layer added is added for every other."""
    fewer, more = plans
    count = (layers - FEW[1]) / (FEW[1] - FEW[0])

    def extend(field: str) -> Any:
        one, other = getattr(fewer, field), getattr(more, field)
        return None if other is None else other + count * (other - one)

    grown = {field: extend(field) for field in ("flops", "bytes_accessed", "seconds", "floor_seconds")}
    grown |= {field: int(extend(field)) for field in ("kernels", "argument_bytes")}
    grown["temp_bytes"] = max(more.temp_bytes, int(extend("temp_bytes")))
    shares = {kind: part + count * (part - fewer.shares.get(kind, 0.0)) for kind, part in more.shares.items()}
    program = replace(
        more, shares=shares, compile_seconds=fewer.compile_seconds + more.compile_seconds, **grown
    )
    peak = attention_flops / chip.flops if chip else None
    return NetworkPlan(name, program, layers, attention_flops, peak)


def table(plan: NetworkPlan, chip: Chip | None) -> dict[str, Any]:
    """A plan in words and figures, a device: what `plan` prints."""
    program, gib = plan.program, 2**30
    rows: dict[str, Any] = {
        "network": f"{plan.name}, {plan.layers} layers, from programs of {FEW[0]} and {FEW[1]}",
        "TFLOP": program.flops / 1e12,
        "arguments_GiB": program.argument_bytes / gib,
        "temporaries_GiB": program.temp_bytes / gib,
        "results_GiB": program.output_bytes / gib,
        "peak_memory_GiB": program.peak_bytes / gib,
    }
    if chip is not None:
        rows["fits"] = f"{'yes' if program.peak_bytes <= chip.memory else 'no'} ({chip.memory / gib:.2f} GiB)"
    if plan.seconds is not None:
        rows["estimate_s"] = plan.seconds
        rows["of_it_attention_at_the_chips_peak_s"] = plan.attention_seconds
        rows["of_it_copies_s"] = program.shares.get("copies", 0.0)
    rows["compiled_in_s"] = program.compile_seconds
    return rows
