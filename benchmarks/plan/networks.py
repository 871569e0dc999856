"""Plans for a pipeline's transformer and text encoder: one denoising step, and the encoding of a prompt.

A `model` is a name of `TRANSFORMERS`, such as "5b", or a pipeline's directory or hub id. A `dtype` is that of
activations and of weights; with `weights` "int8" the matrices of the blocks are in eight bits. A *cache* is
one of diffusers' caches, which reuse a step's results in later steps; `cache` is its name on the command line
(`cache_options.CHOICES`).
"""

import functools
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5EncoderModel

from benchmarks.plan import videos
from benchmarks.plan.chips import GIB, Chip, PlanError
from benchmarks.plan.programs import Work
from cogvideox_torchax import runtime
from cogvideox_torchax.arrays.places import describes_one_input
from cogvideox_torchax.files.models import INDEX, locate, read_json
from cogvideox_torchax.pipelines import caches
from cogvideox_torchax.pipelines.cache_options import config_of
from cogvideox_torchax.pipelines.eight_bits import Weights, quantize
from cogvideox_torchax.pipelines.networks import KnownNetwork
from cogvideox_torchax.pipelines.port import port_network
from cogvideox_torchax.pipelines.transformer import CachedStep
from cogvideox_torchax.runtime.calls import MethodCall
from cogvideox_torchax.sharding import Parallel

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
"""Configs of the published transformers: the fields that cost time, where they differ from the defaults."""

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

TensorSpecs = dict[str, Any]
"""(shape, JAX dtype) of each argument of a program, or a tuple of such pairs, by name."""

STEPS = 50
"""Denoising steps of a whole video, diffusers' default."""


def weightless_transformer(model: str, dtype: torch.dtype, weights: Weights | None = None) -> Any:
    """Return a ported transformer without weights; `PlanError` if the model has no transformer."""
    config = transformer_config(model)
    if "num_layers" not in config:  # it is a VAE's config
        raise PlanError(
            f"{model} has no transformer: give a whole pipeline, or one of {', '.join(TRANSFORMERS)}"
        )
    network_class = transformer_class(model, config)
    return _ported(videos.build(lambda: network_class.from_config(config), dtype, "meta"), weights)


def _ported(network: Any, weights: Weights | None) -> Any:
    """Port a network without weights, whose matrices become int8 if `weights` says so."""
    network = port_network(network)
    if weights:
        quantize(network, weights)
    return network


def transformer_class(model: str, config: dict[str, Any]) -> Any:
    """Return the class of a model's transformer; `PlanError` if it cannot be imported.

    model_index.json names the class and its package. A model without that file has only the class's name in
    its config; the class is then diffusers'.
    """
    if model in TRANSFORMERS or "_class_name" not in config:
        return CogVideoXTransformer3DModel
    package, name = "diffusers", config["_class_name"]
    index = locate(model, files=(INDEX,)) / INDEX
    if index.is_file():
        package, name = read_json(index).get("transformer", (package, name))
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"{model} has a transformer of class {name}, which cannot be imported from {package}: put it on "
            "PYTHONPATH"
        ) from error


def transformer(config: dict[str, Any], dtype: torch.dtype, device: str = "meta") -> Any:
    """Return diffusers' transformer with random weights, or with none on the device "meta"."""
    return videos.build(lambda: CogVideoXTransformer3DModel.from_config(config), dtype, device)


def text_encoder(config: dict[str, Any], dtype: torch.dtype, device: str = "meta") -> Any:
    """Return the text encoder of a T5 config with random weights, or with none on the device "meta"."""
    return videos.build(lambda: T5EncoderModel(T5Config(**config)), dtype, device)


def transformer_config(model: str) -> dict[str, Any]:
    """Return the config of a model's transformer."""
    if model in TRANSFORMERS:
        return TRANSFORMERS[model]
    return read_json(locate(model, "transformer", files=("config.json",)) / "config.json")


def text_encoder_config(model: str) -> dict[str, Any]:
    """Return the config of a model's text encoder; `PlanError` if it is no T5."""
    if model in TRANSFORMERS:
        return TEXT_ENCODER
    config = read_json(locate(model, "text_encoder", files=("config.json",)) / "config.json")
    if config.get("model_type") != "t5":
        raise PlanError(
            f"{model} has no T5 text encoder: give a whole pipeline, or one of {', '.join(TRANSFORMERS)}"
        )
    return config


def step_work(
    model: str,
    dtype: torch.dtype,
    mesh: Any,
    chip: Chip | None,
    *,
    frames: int,
    height: int,
    width: int,
    guided: bool = True,
    parallel: Parallel | None = None,
    cache: str | None = None,
    step: int = 0,
    weights: Weights | None = None,
) -> Work:
    """Return the program of one denoising step of one video.

    Args:
        model, dtype, weights, cache: see the module.
        mesh: of `make_mesh`, of the devices to compile for.
        chip: the chip, into whose memory the weights must fit; else they are split over "tp". With None,
            each device has all weights.
        frames, height, width: size of the latents.
        guided: whether the batch has the video twice, without the prompt and with it, for guidance.
        parallel: the use of the mesh's axis "tp", as `port` takes it; None chooses by the chip's memory.
        step: with a cache, the number of the step to plan, a key of `cached_steps`. Step 0 runs all layers.

    Raises:
        PlanError: a config cannot be read, or its patches do not divide the size.
    """
    network = weightless_transformer(model, dtype, weights)
    # `isinstance` would narrow `network` from Any to a module, for whose attributes pyright has no types.
    if cache and not issubclass(type(network), KnownNetwork):
        raise PlanError(f"got --cache for a {type(network).__name__}: caches are planned for CogVideoX's own")
    patch_t = network.config.get("patch_size_t") or 1  # frames of a patch; None is diffusers' word for one
    frames = -(-frames // patch_t) * patch_t  # padded to whole patches, as diffusers' pipelines do
    batch = 2 if guided else 1
    tensors = step_tensors(network, batch=batch, frames=frames, height=height, width=width)
    # 0 leaves the FLOPs to the compiler's count. PyTorch's would include the layers that the cache skips.
    flops = 0.0 if cache else _counted_flops(network, tensors) / mesh.size
    network.place_on(mesh, parallel, chip and chip.memory)  # None without a chip
    program, tensors = described_program(network, tensors)
    previous_tensors, about = None, _about("step", network, network.config["num_layers"])
    if cache is not None:
        # The form tells which layers the step runs. The numbers are scalar inputs that the cache adds.
        form, numbers = _plan_cached_run(network, cache, batch)[step]
        program = network.program_of(CachedStep(network, attention_kwargs=None, form=form))
        tensors = tensors | {
            name: (tuple(number.shape), jax.dtypes.canonicalize_dtype(runtime.jax_dtype(number.dtype)))
            for name, number in numbers.items()
        }
        # The program also takes the results that the cache kept in the previous step. Their shapes follow
        # from that step's inputs, which are described as this step's are. They are the last struct.
        previous_tensors = tensors
        about["kept_GiB"] = _device_bytes(program.structs(tensors, before=tensors)[-1]) / GIB
    return Work(
        "step",
        frames,
        program.lower,
        functools.partial(program.structs, tensors, before=previous_tensors),
        flops=flops,
        about=about,
    )


def _about(name: str, network: Any, layers: int) -> dict[str, Any]:
    return {"network": f"{name}, {layers} layers", "parallel": str(network.parallelism)}


def described_program(network: Any, tensors: TensorSpecs) -> tuple[Any, TensorSpecs]:
    """Return the program of a call of a ported network, and the specs of the program's inputs, by name.

    The program of a network that is not stock, or of another class than CogVideoX's, names its inputs by
    numbers.
    """
    program = network.program if isinstance(network, KnownNetwork) else None
    if program is not None:
        return program, tensors
    stock: Any = type(network).__bases__[-1]  # `port` puts the mixin before the stock class
    # Classes of diffusers return an object unless they are asked for a tuple of tensors.
    takes = inspect.signature(stock.forward).parameters
    options = {"return_dict": False} if "return_dict" in takes else {}
    descriptions, _ = jax.tree.flatten(tensors, is_leaf=describes_one_input)
    # Empty tensors stand for the described ones: they only mark their positions among the leaves.
    markers = jax.tree.map(lambda _: torch.empty(0), tensors, is_leaf=describes_one_input)
    leaves, structure = pytree.tree_flatten(((), {**markers, **options}))
    call = MethodCall(network, stock.forward, structure, leaves)
    inputs = dict(zip(call.inputs(leaves), descriptions, strict=True))
    return runtime.Program(call, network.placement), inputs


def step_tensors(
    transformer: Any, *, batch: int, frames: int, height: int, width: int, text: int | None = None
) -> TensorSpecs:
    """Return the (shape, JAX dtype) of each input of a denoising step, by name.

    Args:
        transformer: a transformer of any class, with weights or without.
        batch: number of videos; with guidance each counts as two.
        frames, height, width: size of the latents.
        text: number of tokens of a prompt; None for the model's limit.
    """
    # The config of a class that is not diffusers' may lack these two; None is their default.
    config = {"patch_size_t": None, "ofs_embed_dim": None, **transformer.config}
    dtype = runtime.jax_dtype(transformer.dtype)
    patch_embed: Any = getattr(transformer, "patch_embed", None)
    text = text or config["max_text_seq_length"]
    tensors: TensorSpecs = {
        "hidden_states": ((batch, frames, config["in_channels"], height, width), dtype),
        "encoder_hidden_states": ((batch, text, config["text_embed_dim"]), dtype),
        "timestep": ((batch,), jnp.int32),
    }
    patch = config["patch_size"]
    patch_t = config["patch_size_t"] or 1  # None: a patch has one frame
    patches = frames // patch_t * (height // patch) * (width // patch)
    if config["use_rotary_positional_embeddings"]:
        table = ((patches, config["attention_head_dim"]), jnp.float32)
        tensors["image_rotary_emb"] = (table, table)  # cosines and sines
    elif isinstance(transformer, KnownNetwork) and patch_embed.needs_table(height, width, frames):
        # Only a ported transformer takes positions as an input, where its own table does not fit.
        tensors["positions"] = ((1, text + patches, patch_embed.embed_dim), jnp.float32)
    if config["ofs_embed_dim"]:
        tensors["ofs"] = ((1,), dtype)
    return tensors


def _counted_flops(network: Any, tensors: TensorSpecs) -> int:
    """Return the FLOPs of a step in diffusers' own modules, as PyTorch counts them on "meta" tensors."""

    def meta_tensor(spec: tuple[Any, ...]) -> torch.Tensor:
        shape, dtype = spec  # JAX's dtype
        return torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device="meta")

    # "positions" is the port's own argument: diffusers' model computes its table of positions.
    arguments = {name: spec for name, spec in tensors.items() if name != "positions"}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(**jax.tree.map(meta_tensor, arguments, is_leaf=describes_one_input))
    return counter.get_total_flops()


def cached_steps(model: str, dtype: torch.dtype, cache: str, guided: bool = True) -> dict[int, int]:
    """Return how many of a video's steps are of each kind, by the number of the kind's first step.

    Steps of one kind run the same layers, and share a program. With FirstBlockCache, only a run itself
    decides which steps skip blocks. So the counts are then not a video's: the result is {0: 1, 1: 1}, one
    step that runs all blocks and one that skips some.
    """
    network = weightless_transformer(model, dtype)
    # A step's form (`caches.Form`) is the layers that it runs and the results that it keeps: its kind.
    # `index` finds the first step of a form.
    forms = [form for form, _numbers in _plan_cached_run(network, cache, 2 if guided else 1)]
    return {forms.index(form): count for form, count in Counter(forms).items()}


def _plan_cached_run(network: Any, cache: str, batch: int) -> list[Any]:
    """Enable a cache on a transformer without weights; return the pair (form, numbers) of each step."""
    # The present step's timestep, which `steps` sets and the cache's configuration reads: some caches skip
    # only steps in a range of timesteps. It is in a list so that `steps`, an inner function, can set it.
    timestep = [0.0]

    def steps() -> Iterator[int]:
        """Yield each step's number once its timestep is set: from 999 down, as in diffusers' schedulers."""
        for step in range(STEPS):
            timestep[0] = 999 - step * 1000 / STEPS
            yield step

    config = config_of(cache, steps=STEPS, guided=batch == 2, timestep=lambda: timestep[0])
    network.enable_cache(config)
    network.take_cache()  # moves the hooks that diffusers has put on the modules into `step_cache`
    # A step's form tells which layers it runs. Its numbers are the scalar inputs that the cache adds to the
    # step's program, such as a threshold, by name.
    state = network.step_cache.new_state("a plan")  # hooks need a context; its name does not matter
    tensors = {"hidden_states": torch.empty(batch, 0)}  # of which only the batch size is read
    plans = [network.step_cache.plan_step(state, network, tensors) for _ in steps()]
    if isinstance(network.step_cache, caches.FirstBlockSteps):
        # In a run one program has both kinds of steps, and the device chooses. Here each is a program.
        _form, numbers = plans[0]
        return [(caches.form("first_block", reuses=reuses), numbers) for reuses in (False, True)]
    return plans


def weight_bytes(work: Work) -> int:
    """Return the bytes of a program's weights on one device."""
    return _device_bytes(work.structs()[0])  # the first struct is the weights


def _device_bytes(structs: Any) -> int:
    """Return the bytes of one device's shards of the arrays that a tree of structs describes."""
    # If a struct has no sharding, its whole array is on the device.
    return sum(
        math.prod(struct.sharding.shard_shape(struct.shape) if struct.sharding else struct.shape)
        * struct.dtype.itemsize
        for struct in jax.tree.leaves(structs)
    )


def prompt_tensors(*, batch: int, text: int) -> TensorSpecs:
    """Return the (shape, JAX dtype) of the encoder's input, for `batch` prompts of `text` tokens each."""
    return {"input_ids": ((batch, text), jnp.int32)}


def prompt_work(
    model: str, dtype: torch.dtype, mesh: Any, *, tokens: int, weights: Weights | None = None
) -> Work:
    """Return the program that encodes one prompt of `tokens` tokens."""
    config = text_encoder_config(model)
    network = _ported(text_encoder(config, dtype), weights)
    network.place_on(mesh)
    program = network.program
    structs = functools.partial(program.structs, prompt_tensors(batch=1, text=tokens))
    about = _about("prompt", network, config["num_layers"])
    return Work("prompt", tokens, program.lower, structs, about=about)
