"""The VAE's programs under TorchTPU, captured and estimated without a TPU.

    python -m benchmarks torchtpu      # writes results/torchtpu.json; then python -m benchmarks draw

This needs an environment of its own, with the packages of `.[torchtpu,tpu]` and TorchTPU's libtpu (0.0.50 or
newer), as docs/torchtpu.md says. `torch.compile(fullgraph=True)` captures each chunk's program from tensors
without values, on TorchTPU's device: the operations' signatures and shapes are checked there. The captured
graph has one operation for each JAX function, and in between only selections and permutations of axes. It is
lowered again by JAX, compiled by the TPU's compiler, and read as every other program. TorchTPU itself lowers
operations of JAX functions only on a machine with a TPU, so what it would add is left out.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.pages import keep
from benchmarks.plan import chips, programs
from benchmarks.plan.videos import CONFIGS, build
from cogvideox_torchax import AutoencoderKLCogVideoX
from cogvideox_torchax.runtime import bridge, torchtpu
from cogvideox_torchax.runtime.tensors import jax_dtype
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.torchax.networks import chunk_network

TOPOLOGY = "v6e:1x1"
MODEL = "5b"
CHUNKS = {DECODE: ((1, 16, 3, 60, 90), 2), ENCODE: ((1, 3, 9, 480, 720), 8)}
"""By direction: the shape of the first chunk of 49 x 480 x 720, and the frames of a steady one."""

Jax = Callable[..., Any]
ATEN = torch.ops.aten
PLAIN: dict[Any, Jax] = {
    operator.getitem: operator.getitem,
    ATEN.permute.default: jnp.transpose,
    ATEN.select.int: lambda x, axis, index: jax.lax.index_in_dim(x, index, axis, keepdims=False),
    ATEN.clone.default: lambda x, memory_format: x,  # a copy into the order that a JAX array has
}
"""The operations of a captured graph that are no functions of JAX, in JAX."""


class OnJax(torch.fx.Interpreter):
    """Runs a captured graph on JAX arrays; `functions` are the JAX functions by their operations' names."""

    def __init__(self, graph: torch.fx.GraphModule, functions: dict[str, Jax]):
        super().__init__(graph)
        self._functions = functions

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        function = PLAIN.get(target) or self._functions[target.name().removesuffix(".default")]
        return function(*args, **kwargs)


def captured(direction: Direction) -> Iterator[tuple[str, int, torch.fx.GraphModule, list[torch.Tensor]]]:
    """Yield (name, frames, graph, its inputs) of the first chunk's program and of a steady one."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        def keep(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            graphs.append((gm, example_inputs))
            return make_boxed_func(gm.forward)

        return aot_module_simplified(module, inputs, fw_compiler=keep)

    shape, steady = CHUNKS[direction]
    vae = build(lambda: AutoencoderKLCogVideoX.from_config(CONFIGS[MODEL]), torch.bfloat16, "meta")
    network = chunk_network(vae, direction)
    chunk = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        expected, cache = network(chunk, None)
        expected_steady, _ = network(chunk[:, :, :steady], cache)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        on_tpu = torch.nn.Module.to_empty(network, device="tpu")
        program = torchtpu.TorchTPUProgram(on_tpu, backend)
        step = program.step(program.weights(on_tpu))
        chunk = torch.empty(shape, dtype=torch.bfloat16, device="tpu")
        result, cache = step(chunk, None)
        assert result.shape == expected.shape, (result.shape, expected.shape)
        result, _ = step(chunk[:, :, :steady], cache)
        assert result.shape == expected_steady.shape, (result.shape, expected_steady.shape)
    for name, frames, (graph, inputs) in zip(("first", "later"), (shape[2], steady), graphs, strict=True):
        yield name, frames, graph, inputs


def estimated(name: str, frames: int, graph: Any, inputs: list[Any], functions: dict[str, Jax]) -> Any:
    """Return the compiler's figures for a captured program, on one chip of `TOPOLOGY`."""
    structs = tuple(jax.ShapeDtypeStruct(tuple(each.shape), jax_dtype(each.dtype)) for each in inputs)
    run = jax.jit(OnJax(graph, functions).run, keep_unused=True)
    return programs.estimate_function(run, TOPOLOGY, structs, name, frames)


def run(_options: Any) -> None:
    """Capture and estimate all programs, and keep their figures."""
    chips.topology_devices(TOPOLOGY, schedules=True)  # before another call loads libtpu
    from torch_tpu import _loader  # pyright: ignore[reportMissingImports]

    _loader._init_device(bridge.TPU)  # without a TPU TorchTPU does not register its device by itself
    functions: dict[str, Jax] = {}
    make = torchtpu.jax_op

    def keeping(name: str, function: Jax) -> Any:
        functions[name] = function
        return make(name, function)

    torchtpu.jax_op = keeping
    rows: dict[str, list[dict[str, Any]]] = {}
    for direction in (DECODE, ENCODE):
        rows[str(direction)] = []
        for name, frames, graph, inputs in captured(direction):
            plan = estimated(name, frames, graph, inputs, functions)
            calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            of_jax = sum(count for target, count in calls.items() if target.startswith("cogvideox_torchax."))
            rows[str(direction)].append(plan.as_json() | {"operations": of_jax})
            print(f"{direction} {name}: {1e3 * plan.seconds:.1f} ms, {plan.kernels} kernels", flush=True)
    keep(
        "torchtpu",
        {"model": MODEL, "topology": TOPOLOGY, "programs": rows},
        *("torch", "torch-tpu", "libtpu", "jax", "jaxlib"),
    )
