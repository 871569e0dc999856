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

from benchmarks.estimate import chips, programs
from benchmarks.pages import RESULTS, estimate
from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh
from cogvideox_torchax.files import reports
from cogvideox_torchax.plan.chips import GIB
from cogvideox_torchax.plan.jobs import CONFIGS, build
from cogvideox_torchax.plan.programs import Work
from cogvideox_torchax.runtime import bridge, torchtpu
from cogvideox_torchax.runtime.tensors import jax_dtype
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.torchax.networks import chunk_network
from cogvideox_torchax.versions import versions

FORMAT = "cogvideox-torchax-torchtpu/1"
RESULT = RESULTS / "torchtpu.json"
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
    mesh = make_mesh(1, 1, devices=chips.topology_devices(TOPOLOGY)[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = tuple(
        jax.ShapeDtypeStruct(tuple(each.shape), jax_dtype(each.dtype), sharding=whole) for each in inputs
    )
    run = jax.jit(OnJax(graph, functions).run, keep_unused=True)
    work = Work(name, frames, run.lower, lambda: structs)
    return programs.estimate_program(work, mesh, chips.CHIPS[TOPOLOGY.partition(":")[0]])


def run() -> None:
    """Capture and estimate all programs; write `RESULT` and print the table."""
    chips.topology_devices(TOPOLOGY)  # first, as libtpu dumps schedules only if it is loaded here
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
    result = {
        "format": FORMAT,
        "versions": versions("torch", "torch-tpu", "libtpu", "jax", "jaxlib"),
        "model": MODEL,
        "topology": TOPOLOGY,
        "programs": rows,
    }
    reports.write_json(RESULT, result)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return the table of the programs, beside torchax's and those of diffusers' own modules by torchax."""
    rows = []
    for direction, captured_programs in result["programs"].items():
        # Of a build some programs may not be estimated.
        stock, ported = (
            {
                program["name"]: program
                for program in estimate(f"plan-v6e-1-{direction}-{backend}")["programs"]
            }
            for backend in ("torchax-stock", "torchax")
        )
        for plan in captured_programs:
            own, milliseconds = ported[plan["name"]], 1e3 * plan["seconds"]
            other = stock.get(plan["name"])
            rows.append(
                (
                    f"{direction}, {'first' if plan['name'] == 'first' else 'steady'} chunk",
                    f"{1e3 * other['seconds']:.0f}" if other else "",
                    f"{1e3 * own['seconds']:.1f}",
                    f"{milliseconds:.1f}",
                    f"{milliseconds / own['seconds'] / 1e3:.2f}",
                    f"{own['kernels']} and {plan['kernels']}",
                    f"{own['temp_bytes'] / GIB:.1f} and {plan['temp_bytes'] / GIB:.1f}",
                )
            )
    head = ("program", "stock torchax, ms", "torchax, ms", "TorchTPU, ms", "TorchTPU over torchax")
    return reports.table((*head, "kernels", "temporaries, GiB"), rows)


TABLES = {("docs/torchtpu.md", "torchtpu"): lambda: table(reports.load(RESULT, FORMAT))}
