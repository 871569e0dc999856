"""Offload: weights are on the devices while their network is used, else on the host; frames do not change."""

import copy
import functools
import gc
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import accelerate
import jax
import pytest
import torch
from diffusers import CogVideoXPipeline, TaylorSeerCacheConfig

from cogvideox_torchax import load_pipeline, make_mesh, port, runtime
from cogvideox_torchax.arrays import places
from cogvideox_torchax.pipelines import offload, sharding
from tests import small_pipelines
from tests.reference import largest_error
from tests.small_pipelines import one_layer as build

NETWORKS = ("text_encoder", "transformer", "vae")
PROGRAMS = {"TextEncoding": "text_encoder", "TransformerStep": "transformer", "DecoderChunk": "vae"}


def frames(pipe, kind="text", **overrides):
    return pipe(**small_pipelines.inputs(kind, num_inference_steps=3, **overrides)).frames


def arrays(pipe, name):
    return [runtime.array_of(weight) for weight in runtime.named_tensors(pipe.components[name]).values()]


def on_devices(pipe):
    """Return the names of the networks on the devices; each is there, or on the host, as a whole."""
    on_host = {name: {*map(runtime.is_in_host_memory, arrays(pipe, name))} for name in NETWORKS}
    assert all(len(places) == 1 for places in on_host.values()), on_host
    return {name for name in NETWORKS if False in on_host[name]}


def strays(pipe):
    """Return the shapes of live matrices that are no weights of the pipeline, but could be former ones."""
    gc.collect()
    weights = [array for name in NETWORKS for array in arrays(pipe, name)]
    shapes = {array.shape for array in weights if array.size > 4000}
    return [
        array.shape
        for array in jax.live_arrays()
        if array.shape in shapes
        and id(array) not in OTHERS
        and not any(array is weight for weight in weights)
    ]


OTHERS: dict[int, jax.Array] = {}
"""The arrays, by id, that other tests of this process have left; they are held, so that no id comes again."""


@pytest.fixture
def clean():
    """Leave out what other tests have left, to count the arrays that are alive."""
    gc.collect()
    gc.freeze()  # `strays` looks through the objects of this test alone
    OTHERS.update((id(array), array) for array in jax.live_arrays())
    yield
    OTHERS.clear()


@pytest.fixture(scope="module")
def want():
    """Return the frames of a pipeline on one device, without offload."""
    pipe = port(build())
    assert on_devices(pipe) == {*NETWORKS}
    return frames(pipe)


@pytest.fixture
def watched(monkeypatch):
    """Return what moves: ("load", class) for a network to devices, and ("store", bytes) for an array back."""
    events = []

    def recording(what, function, name_of):
        return lambda *args, **kwargs: [events.append((what, name_of(args[0]))), function(*args, **kwargs)][1]

    put, to_host = offload.put_weights, offload._to_host
    monkeypatch.setattr(offload, "put_weights", recording("load", put, lambda model: type(model).__name__))
    monkeypatch.setattr(offload, "_to_host", recording("store", to_host, lambda array: array.nbytes))
    return events


@pytest.mark.parametrize("grid", [None, (1, 2), (2, 2)])
@pytest.mark.slow_cases("None", "grid2")
def test_one_network_at_a_time_is_on_the_devices_and_the_loop_moves_nothing(
    grid, clean, watched, monkeypatch
):
    pipe = port(build(), mesh=None if grid is None else make_mesh(*grid))
    want, programs = frames(pipe), pipe.transformer.program.compilations
    pipe.enable_model_cpu_offload(device="cuda")
    assert on_devices(pipe) == set()
    seen, run = [], places.ArrayProgram.run

    def look(program, *args, **kwargs):
        seen.append((PROGRAMS[program._network.name], on_devices(pipe), strays(pipe)))
        return run(program, *args, **kwargs)

    monkeypatch.setattr(places.ArrayProgram, "run", look)
    watched.clear()
    assert torch.equal(frames(pipe), want)
    assert all(there == {name} and not stray for name, there, stray in seen), seen
    assert [name for what, name in watched if what == "load"] == [
        "T5EncoderModel",
        "CogVideoXTransformer3DModel",
        "AutoencoderKLCogVideoX",
    ]
    assert sum(what == "store" for what, _ in watched) == sum(len(arrays(pipe, name)) for name in NETWORKS)
    assert (on_devices(pipe), strays(pipe), pipe.transformer.program.compilations) == (set(), [], programs)
    pipe.remove_all_hooks()
    assert torch.equal(frames(pipe), want)
    assert on_devices(pipe) == {*NETWORKS}
    assert pipe.enable_sequential_cpu_offload() is pipe.enable_group_offload(onload_device="cuda") is None
    assert on_devices(pipe) == set()


def fails(*_args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("breaks", ["in the loop", "while a network goes", "while a network comes"])
@pytest.mark.slow_cases(but=["while a network comes"])
def test_a_call_that_is_interrupted_loses_no_weight_and_the_next_one_works(breaks, want, clean, monkeypatch):
    pipe = port(build())
    pipe.enable_model_cpu_offload()
    with monkeypatch.context() as patch:
        if breaks != "in the loop":
            owner, name = (
                (offload, "_to_host") if "goes" in breaks else (type(pipe.transformer), "put_weight")
            )
            move = getattr(owner, name)
            moves = itertools.chain([move, fails], itertools.repeat(move))
            patch.setattr(owner, name, lambda *args: next(moves)(*args))
        with pytest.raises(KeyboardInterrupt):
            frames(pipe, callback_on_step_end=fails if breaks == "in the loop" else None)
    assert torch.equal(frames(pipe), want)
    assert (on_devices(pipe), strays(pipe)) == (set(), [])


def test_threads_take_turns(clean):
    pipe = port(build())
    want = [frames(pipe, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    pipe.enable_model_cpu_offload()
    pipes = [CogVideoXPipeline.from_pipe(pipe, scheduler=copy.deepcopy(pipe.scheduler)) for _ in want]
    with ThreadPoolExecutor(3) as threads:
        made = threads.map(
            lambda seed: frames(pipes[seed], generator=torch.Generator().manual_seed(seed)), range(3)
        )
        assert all(map(torch.equal, made, want))
    pipe.maybe_free_model_hooks()
    assert (on_devices(pipe), strays(pipe)) == (set(), [])


class Beside(torch.nn.Linear):
    """A network that is called in each step beside the transformer, and that nobody knows."""

    # diffusers asks every network of a pipeline for these.
    device = property(lambda self: self.weight.device)
    dtype = property(lambda self: self.weight.dtype)


class Controlled(CogVideoXPipeline):
    def __init__(self, beside, tokenizer, text_encoder, vae, transformer, scheduler):
        super().__init__(tokenizer, text_encoder, vae, transformer, scheduler)
        self.register_modules(beside=beside)


def test_an_unknown_network_that_steps_call_stays_on_the_devices_during_a_call(watched):
    pipe = port(Controlled(Beside(8, 8).eval(), **build().components))

    def step(pipe, i, timestep, tensors):
        return {"latents": pipe.beside(tensors["latents"].to("jax"))}

    want = frames(pipe, callback_on_step_end=step)
    pipe.enable_model_cpu_offload()
    watched.clear()
    assert torch.equal(frames(pipe, callback_on_step_end=step), want)
    assert on_devices(pipe) == set()
    assert [name for what, name in watched if what == "load"] == [
        "T5EncoderModel",
        "CogVideoXTransformer3DModel",
        "Beside",
        "AutoencoderKLCogVideoX",
    ]


OWN_HOOKS = {
    "model": lambda pipe, _: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential": lambda pipe, _: pipe.enable_sequential_cpu_offload(device="cuda"),
    "group": lambda pipe, _: pipe.enable_group_offload(torch.device("cpu"), offload_type="leaf_level"),
    "group, on disk": lambda pipe, path: pipe.enable_group_offload(
        torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(path)
    ),
    "one network": lambda pipe, _: accelerate.cpu_offload(pipe.text_encoder, torch.device("cpu")),
}


@pytest.mark.parametrize("take", OWN_HOOKS.values(), ids=OWN_HOOKS)
@pytest.mark.slow_cases("group", "sequential")  # whose hooks are those of "group, on disk" and "one network"
def test_a_pipeline_with_diffusers_own_hooks_means_the_same(take, want, tmp_path):
    pipe = build()
    take(pipe, tmp_path)
    port(pipe)
    assert on_devices(pipe) == set()
    assert torch.equal(frames(pipe), want)
    assert on_devices(pipe) == set()


LOAD, SMALL = functools.partial(load_pipeline, dtype=torch.float32), 1_040_000
"""Loads a pipeline; bytes of a device that the weights of all networks do not fit into."""


@pytest.mark.parametrize(
    ("make", "free"),
    [
        pytest.param(functools.partial(LOAD, offload=True), None, id="asked"),
        pytest.param(LOAD, SMALL, id="no room"),
        pytest.param(lambda _: port(build()), SMALL, id="no room for a port"),
    ],
)
def test_weights_wait_on_the_host_if_asked_or_if_they_do_not_fit(
    make, free, want, saved, monkeypatch, caplog
):
    monkeypatch.setattr(sharding, "memory_of", lambda mesh: free)
    pipe = make(saved())
    assert on_devices(pipe) == set()
    assert torch.equal(frames(pipe), want)
    words = "0.00 GiB of weights for 0.00 GiB of a device: they wait on the host between uses"
    assert [record.getMessage().startswith(words) for record in caplog.records] == [True] * (free is not None)


WITH_WAITING = {
    "save_pretrained": lambda pipe, path: pipe.save_pretrained(path),
    "torch.save": lambda pipe, path: torch.save(pipe.transformer.state_dict(), path / "file"),
    "pickle": lambda pipe, _: pickle.loads(pickle.dumps(pipe.vae)),
    "deepcopy": lambda pipe, _: copy.deepcopy(pipe),
    "a cache": lambda pipe, _: [
        pipe.transformer.enable_cache(TaylorSeerCacheConfig(use_lite_mode=True)),
        frames(pipe),
        pipe.transformer.disable_cache(),
    ],
    "a LoRA": lambda pipe, path: [
        small_pipelines.save_lora(build(), path / "lora.safetensors"),
        pipe.load_lora_weights(path / "lora.safetensors"),
        pipe.unload_lora_weights(),
    ],
    "to the CPU": lambda pipe, _: pipe.to("cpu").to("jax"),
}


def offloaded():
    pipe = port(build())
    pipe.enable_model_cpu_offload()
    return pipe


waiting = pytest.fixture(scope="module")(offloaded)
"""A pipeline that a test leaves as it is."""


@pytest.mark.parametrize("use", WITH_WAITING.values(), ids=WITH_WAITING)
def test_what_is_done_with_weights_on_devices_is_done_while_they_wait(use, want, tmp_path):
    pipe = offloaded()
    use(pipe, tmp_path)
    assert largest_error(frames(pipe), want) < 1e-5


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_what_diffusers_does_to_weights_in_pytorch_is_refused_by_name(part, waiting):
    model, device = getattr(waiting, part), torch.device("cpu")
    with pytest.raises(ValueError, match=r"enable_group_offload is .*call pipe.enable_model_cpu_offload"):
        model.enable_group_offload(onload_device=device, offload_type="leaf_level")
    with pytest.raises(ValueError, match=r"enable_layerwise_casting is .*call it before port"):
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    copy.deepcopy(model).to("cpu").enable_group_offload(onload_device=device, offload_type="leaf_level")


CHILDREN = {
    "a decoder": lambda pipe, x: pipe.vae.decoder(x(1, 16, 2, 4, 4))[0],
    "a convolution": lambda pipe, x: pipe.vae.decoder.conv_in(x(1, 16, 2, 4, 4))[0],
    "embeddings": lambda pipe, x: pipe.text_encoder.get_input_embeddings()(x(1, 4).abs().long()),
    "a projection": lambda pipe, x: pipe.transformer.proj_out(x(1, 4, 128)),
    "a norm": lambda pipe, x: pipe.transformer.norm_final(x(1, 4, 128)),
    "a feed-forward": lambda pipe, x: pipe.transformer.transformer_blocks[0].ff(x(1, 4, 128)),
    "a T5 block": lambda pipe, x: pipe.text_encoder.encoder.block[0].layer[1](x(1, 4, 32)),
    "a weight": lambda pipe, x: x(1, 4, 128) @ pipe.transformer.proj_out.weight.T,
    "rows of a weight": lambda pipe, x: pipe.transformer.proj_out.weight[x(1, 4).abs().long()],
    "a weight on the host": lambda pipe, _: pipe.transformer.proj_out.weight.to("cpu", torch.float64),
    "a statistic": lambda pipe, x: pipe.transformer.proj_out.weight.float().std(),
}


@pytest.mark.parametrize("call", CHILDREN.values(), ids=CHILDREN)
def test_a_part_of_a_network_whose_weights_wait_can_be_used_alone(call, waiting):
    def given(*shape):
        return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)

    got = runtime.to_torch(call(waiting, lambda *shape: given(*shape).to("jax")))
    assert largest_error(got, call(build(), given)) < 1e-5
    assert on_devices(waiting) == set()
