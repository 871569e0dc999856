"""A case of a process: what it computes, how that is loaded, and run once.

A job runs in parts: a VAE's first chunk and its later chunks, a training step's two directions, one call of a
network, one call of an op.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from benchmarks import ops
from benchmarks.jobs import Size
from benchmarks.plan import networks, videos
from cogvideox_torchax import backends, runtime
from cogvideox_torchax.arrays.places import describes_one_input
from cogvideox_torchax.pipelines.port import port_network
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

SMALL_TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 512,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}


Run = Callable[[], Iterable[tuple[str, Any]]]
"""Runs a job once: gives the name and the result of each part, which JAX may still be computing."""


@dataclass(frozen=True)
class Case:
    """A job in one way, at one size.

    Attributes:
        job: name of a job in `jobs.JOBS`, or "kernels OP" for the job of one kernel.
        way: one of `jobs.WAYS`; "" for the reference: PyTorch on the host, or an op's plain form.
        size: of the video, and the model.
        dtype: of weights and activations.
        platform: of the device that is measured.
        dp, tp: the mesh; one device where both are None.
    """

    job: str
    way: str
    size: Size
    dtype: str = "float32"
    platform: str = "cpu"
    dp: int | None = None
    tp: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def backend(self) -> str:
        """The name of the package's backend that runs the case; "torch" for the reference.

        A way is a backend's name, or a name with an option after it: "torchax, kernels off".
        """
        name, _, _kernels_off = self.way.partition(",")
        return name.removesuffix("-compile") or "torch"

    @property
    def torch_device(self) -> str | None:
        """PyTorch's device for a backend in PyTorch, the GPU if there is one; None for a backend on JAX.

        The reference that results are compared with runs on the CPU.
        """
        if self.backend != "torch":
            return None
        return "cuda" if self.way and torch.cuda.is_available() else "cpu"

    @property
    def direction(self) -> Direction:
        """The direction of a job of chunks: "encode" encodes, all others decode."""
        return ENCODE if self.job == "encode" else DECODE

    def mesh(self, devices: Any = None) -> Any:
        return mesh(self.dp, self.tp, devices)


def mesh(dp: int | None, tp: int | None, devices: Any = None) -> Any:
    """Return the mesh of `dp` x `tp` devices, or of one device if neither is given.

    A tp of None beside a dp takes all devices that dp leaves. `devices` are those of a topology; None for
    JAX's.
    """
    return make_mesh(dp or 1, tp if dp or tp else 1, devices=devices)


def load(case: Case) -> Run:
    """Load the model and the inputs of a case; return the function that runs it once."""
    loaders = {"kernels": _op, "train": _training_step, "step": network, "prompt": network}
    # An op's job is "kernels OP"; "encode", "decode" and "still" run in chunks.
    return loaders.get(case.job.partition(" ")[0], _chunks)(case)


def _backend_and_inputs(case: Case, *directions: Direction) -> tuple[Any, list[torch.Tensor]]:
    """Return a VAE on the case's backend, and a random input for each of the directions, on the VAE's device.

    A published config gets random weights. An input has one video; to train, one for each of the mesh's `dp`
    devices.
    """
    size, dtype, device = case.size, case.torch_dtype, case.torch_device  # no device: arrays are JAX's
    torch.manual_seed(0)
    if size.model in videos.CONFIGS:
        # On "cpu" the weights are random. Not `vae.to(dtype)`: diffusers wraps that method in a way that
        # pyright cannot follow.
        vae: Any = nn.Module.to(videos.weightless_vae(size.model, torch.float32, "cpu"), dtype)
    else:
        vae = AutoencoderKLCogVideoX.from_pretrained(locate_vae(size.model), torch_dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    batch = (case.dp or 1) if case.job == "train" else 1
    inputs = []
    for direction in directions:
        job = videos.Job(direction, size.frames, size.height, size.width)
        chunks, (channels, height, width) = job.chunk_shapes(vae)
        frames = chunks[-1].stop  # the end of the last chunk; latent frames for decoding
        x = torch.randn((batch, channels, frames, height, width), generator=generator).to(dtype)
        inputs.append(x.to(device) if device else runtime.to_jax(x))
    backend = backends.backend(case.backend).from_native(nn.Module.to(vae, device) if device else vae)
    if case.way == "torch-compile":
        backend.vae.encoder.compile()
        backend.vae.decoder.compile()
    if case.way and (case.dp or case.tp):  # the reference, whose `way` is "", runs on one device
        backend.vae.place_on(case.mesh())
    return backend, inputs


def _chunks(case: Case) -> Run:
    """Load a VAE; a run encodes or decodes a video, and gives a chunk as "first" or "later"."""
    backend, (x,) = _backend_and_inputs(case, case.direction)
    names = "first", *["later"] * case.size.frames  # more than there are chunks: `zip` drops the excess
    return lambda: zip(names, backend.chunks(case.direction, x), strict=False)


def _training_step(case: Case) -> Run:
    """Load a VAE to train; a run gives the weights' gradients in encoding, then those in decoding.

    The loss is half the sum of the squares of the direction's result. Gradient checkpointing is on.
    """
    backend, inputs = _backend_and_inputs(case, *Direction)  # an input for each direction
    vae = backend.vae.train()
    vae.enable_gradient_checkpointing()

    def gradients(direction: Direction, x: torch.Tensor) -> tuple[str, Any]:
        vae.zero_grad()
        # `measure` runs jobs without gradients, so they are enabled here. On JAX torchax is enabled too.
        with torch.enable_grad():
            result = vae.encode(x).latent_dist.parameters if direction == ENCODE else vae.decode(x).sample
            (result.square().sum() / 2).backward()
        # The weights of the other direction have no gradients.
        found = {name: weight.grad for name, weight in vae.named_parameters() if weight.grad is not None}
        return f"train {direction}", found

    return lambda: map(gradients, Direction, inputs)


class Stock(nn.Module):
    """diffusers' transformer or text encoder, not ported, in the form that `runtime.Program` compiles.

    A program's network takes (inputs, cache) and returns (result, cache). This one has no cache: None.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        return self.model(**tensors, return_dict=False)[0], cache


def _network_and_inputs(case: Case) -> tuple[Any, dict[str, Any]]:
    """Return diffusers' network of a case, and a description of its inputs: (shape, dtype) by name.

    A small network has random weights on the host, the same for every backend. A published one has random
    weights on `case.torch_device`, or no weights (the device "meta") for a backend on JAX.
    """
    size, dtype = case.size, case.torch_dtype
    published = size.model in ops.TRANSFORMERS
    device = (case.torch_device or "meta") if published else "cpu"
    torch.manual_seed(0)
    if case.job == "prompt":
        config = networks.TEXT_ENCODER if published else SMALL_TEXT_ENCODER
        return networks.text_encoder(config, dtype, device), networks.prompt_tensors(batch=1, text=ops.TOKENS)
    config = ops.TRANSFORMERS.get(size.model, ops.SMALL_TRANSFORMER)
    ported = port_network(networks.transformer(config, dtype))  # without weights, to describe its inputs
    inputs = networks.step_tensors(ported, batch=2, **ops.latents(size))  # 2: with the prompt, and without
    if case.backend != "torchax":
        inputs.pop("positions", None)  # diffusers' own model computes its table of positions
    return networks.transformer(config, dtype, device), inputs


def network(case: Case) -> Run:
    """Load the transformer or the text encoder; a run gives the job's name and the network's result.

    On JAX the network is ported for the backend "torchax", and diffusers' own for "torchax-stock". There a
    network of a published size gets random JAX arrays as weights; a small one's own weights are moved to JAX.
    """
    # diffusers' network, and (shape, dtype) of each input by name.
    model, described = _network_and_inputs(case)
    generator = torch.Generator().manual_seed(1)

    def draw(pair: tuple[Any, ...]) -> torch.Tensor:
        """Return an input on the host by its (shape, dtype): `ops.INTEGER`, or normal numbers."""
        shape, dtype = pair
        if dtype == np.int32:
            return torch.full(shape, ops.INTEGER, dtype=torch.int32)
        return torch.randn(shape, generator=generator).to(getattr(torch, np.dtype(dtype).name))

    inputs = jax.tree.map(draw, described, is_leaf=describes_one_input)
    if case.torch_device:
        if case.way == "torch-compile":
            model.compile()
        nn.Module.to(model, case.torch_device)
        on_device = jax.tree.map(lambda x: x.to(case.torch_device), inputs)
        # Without a dictionary diffusers returns a tuple, whose first element is the result.
        return lambda: iter([(case.job, model(**on_device, return_dict=False)[0])])
    if case.backend == "torchax":
        port_network(model)
        if case.dp or case.tp:
            model.place_on(case.mesh())
        network, program = model.network_class(model), model.program
    else:
        network = Stock(model)
        program = runtime.Program(network)
    if case.size.model in ops.TRANSFORMERS:
        weight_structs, _inputs, _no_cache = program.structs(described)
        weights = jax.tree.map(_random_weight, weight_structs)
    else:
        runtime.put_weights(network)
        weights = program.weights(network)
    arrays = program.put(inputs)
    # `run` returns (result, cache).
    return lambda: iter([(case.job, program.run(weights, arrays)[0])])


def _random_weight(struct: Any) -> jax.Array:
    """Return small random numbers as an array of a struct's shape, dtype and sharding."""
    # To draw billions of numbers would take minutes, so 65,537 are repeated: a prime, so that the rows of a
    # matrix differ.
    numbers = np.random.default_rng(0).normal(0, 0.02, 65_537).astype(struct.dtype)
    return jax.device_put(np.resize(numbers, struct.shape), struct.sharding)


def _op(case: Case) -> Run:
    """Load an op with random operands, for the reference in its plain form; a run gives (name, result)."""
    name = case.job.removeprefix("kernels ")
    # A TPU's kernel convolves by Winograd's algorithm, 2 results at a time; its reference does the same, to
    # round alike.
    by_winograd = name == "norm_conv3d" and case.platform == "tpu" and case.dtype != "float32"
    # None loads the op itself; options, even {}, load its form without a kernel.
    options = None if case.way else {"tile": 2} if by_winograd else {}
    run = ops.load(name, case.size, runtime.jax_dtype(case.torch_dtype), options)
    return lambda: iter([(name, run())])
