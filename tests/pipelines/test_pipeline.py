"""A ported pipeline is the pipeline: the same frames as stock diffusers, from diffusers' own call."""

import functools
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import accelerate
import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    ContextParallelConfig,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
)
from diffusers.pipelines.cogvideo import pipeline_cogvideox

from cogvideox_torchax import make_mesh, port, runtime, upstream
from cogvideox_torchax.pipelines import frames as processors, port as porting, steps as denoising
from cogvideox_torchax.runtime import device, host
from cogvideox_torchax.vae.directions import DECODE
from examples.small_pipeline import SENTENCES
from tests import small_pipelines
from tests.reference import compilations, largest_error

TOLERANCE = 1e-4
"""Relative error of the frames after four steps, in float32."""

PLACEMENTS = {
    "one device": port,
    "1x8": lambda pipe: port(pipe, mesh=make_mesh(1, 8)),
    "2x4": lambda pipe: port(pipe, mesh=make_mesh(2, 4)),
    "1x8 tensor": lambda pipe: port(pipe, mesh=make_mesh(1, 8), parallel="tensor"),
    "2x4 tensor": lambda pipe: port(pipe, mesh=make_mesh(2, 4), parallel="tensor"),
}


@functools.cache
def shared(placement):
    """Return the parts that all cases share, so that they are compiled once: VAE and text encoder."""
    pipe = port_to(placement, small_pipelines.build())
    return pipe.vae, pipe.text_encoder


@functools.cache
def transformer(placement, version, conditioning):
    """One for all pipelines that take the same."""
    model = small_pipelines.transformer(version, **dict(conditioning))
    return port_to(placement, small_pipelines.build(transformer=model)).transformer


def port_to(placement, pipe):
    """Port a pipeline to a placement; None leaves it as it is."""
    return pipe if placement is None else PLACEMENTS[placement](pipe)


def pipeline(kind="text", version="5b", placement=None, **components):
    """Return a pipeline of stock diffusers, or, for a placement, a ported one of the same weights."""
    vae, text_encoder = shared(placement)
    parts = {"vae": small_pipelines.configured(vae, version), "text_encoder": text_encoder, **components}
    if "transformer" not in components:
        conditioning = tuple(small_pipelines.conditioning(kind, version).items())
        parts["transformer"] = transformer(placement, version, conditioning)
    return port_to(placement, small_pipelines.build(kind, version, **parts))


def frames(pipe, kind="text", **overrides):
    return pipe(**small_pipelines.inputs(kind, **overrides)).frames


def latents(pipe, kind="text", **overrides):
    """Return the latents after two steps, without guidance, on the host."""
    few = {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "latent"}
    return runtime.to_torch(frames(pipe, kind, **{**few, **overrides}))


BOTH, GUIDED, UNGUIDED = (6.0, 1.0), (6.0,), (1.0,)
"""Scales of guidance of the runs of a case; 1 is without."""

CASES = {
    "text to video, 5b": ("text", "5b", "one device", BOTH),
    "text to video, 5b, 2x4": ("text", "5b", "2x4", BOTH),
    "text to video, 5b, 2x4 tensor": ("text", "5b", "2x4 tensor", GUIDED),
    "text to video, 5b, 1x8": ("text", "5b", "1x8", BOTH),
    "text to video, 5b, 1x8 tensor": ("text", "5b", "1x8 tensor", UNGUIDED),
    "text to video, 2b": ("text", "2b", "one device", BOTH),
    "text to video, 1.5": ("text", "1.5", "one device", BOTH),
    "text to video, 1.5, 2x4": ("text", "1.5", "2x4", GUIDED),
    "text to video, 1.5, 1x8": ("text", "1.5", "1x8", UNGUIDED),
    "image to video, 5b": ("image", "5b", "one device", BOTH),
    "image to video, 5b, 2x4": ("image", "5b", "2x4", GUIDED),
    "image to video, 5b, 1x8": ("image", "5b", "1x8", UNGUIDED),
    "image to video, 5b-I2V": ("image", "5b-I2V", "one device", BOTH),
    "image to video, 1.5": ("image", "1.5", "one device", GUIDED),
    "image to video, 1.5, 2x4": ("image", "1.5", "2x4", GUIDED),
    "video to video": ("video", "5b", "one device", BOTH),
    "video to video, 2x4": ("video", "5b", "2x4", GUIDED),
    "video to video, 1x8": ("video", "5b", "1x8", UNGUIDED),
    "control": ("control", "5b", "one device", BOTH),
    "control, 2x4": ("control", "5b", "2x4", GUIDED),
    "control, 1x8": ("control", "5b", "1x8", UNGUIDED),
}


@pytest.mark.parametrize(("kind", "version", "placement", "guidance_scales"), CASES.values(), ids=CASES)
@pytest.mark.slow_cases(but=["text to video, 5b", "image to video, 1.5"])
@pytest.mark.product_cases("video*, *x*", "control, *", "image to video, 5b, 1x8", "text to video, 1.5, *")
def test_the_frames_are_those_of_stock_diffusers(kind, version, placement, guidance_scales):
    stock, ported = pipeline(kind, version), pipeline(kind, version, placement)
    own = type(stock)(**ported.components)  # of diffusers' class, around the same networks
    for guidance_scale in guidance_scales:
        want = frames(stock, kind, guidance_scale=guidance_scale)
        assert want.std() > 0.01
        for pipe in (ported, own) if placement != "one device" else (ported,):
            assert largest_error(frames(pipe, kind, guidance_scale=guidance_scale), want) < TOLERANCE
    assert type(ported.scheduler) is type(stock.scheduler)


@pytest.fixture
def stock():
    return pipeline()


@pytest.fixture
def ported():
    return pipeline(placement="one device")


def test_two_steps_compile_all_that_more_steps_and_another_prompt_run():
    model, encoder = small_pipelines.transformer("5b", num_layers=1), small_pipelines.text_encoder()
    pipe = pipeline(placement="one device", transformer=model, text_encoder=encoder)
    frames(pipe, num_inference_steps=2)
    with compilations() as counted:
        frames(pipe, prompt="the sea is calm", num_inference_steps=10)
    assert (counted, model.program.compilations, encoder.program.compilations) == ([], 1, 1)


def test_classes_names_and_ties_stay():
    pipe = small_pipelines.build()
    encoder, parts = pipe.text_encoder, (pipe, pipe.transformer, pipe.text_encoder, pipe.scheduler)
    names = list(pipe.transformer.state_dict()), list(encoder.state_dict())
    kinds = [type(part) for part in parts]
    assert port(pipe) is pipe
    classes = [type(part) for part in parts]
    assert [*map(issubclass, classes, kinds)] == 4 * [True]
    assert [found.__name__ for found in classes] == [kind.__name__ for kind in kinds]
    assert (list(pipe.transformer.state_dict()), list(encoder.state_dict())) == names
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    assert "model.encoder.embed_tokens.weight" not in encoder.program.weights(encoder.network_class(encoder))
    assert inspect.signature(pipe.__call__) == inspect.signature(kinds[0].__call__.__get__(pipe))
    assert (port(pipe), pipe.device.type) == (pipe, "jax")
    assert [type(part) for part in parts] == classes


OPTIONS = {
    "negative prompt": {"negative_prompt": "the sky is full of stars"},
    "dynamic guidance": {"use_dynamic_cfg": True},
    "two prompts": {"prompt": ["a panda", "the moon"], "guidance_scale": 1.0},
    "more videos": {"num_videos_per_prompt": 2},
    "its own latents": {"latents": lambda: torch.full((1, 3, 16, 4, 8), 0.5)},
    "a list of generators": {"generator": lambda: [torch.Generator().manual_seed(5)]},
    "arrays": {"output_type": "np"},
    "a tuple": {"return_dict": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_calls_own_options_work(ported, stock, options):
    def result(pipe):
        given = {name: value() if callable(value) else value for name, value in options.items()}
        return pipe(**small_pipelines.inputs("text", num_inference_steps=2, **given))[0]

    assert largest_error(result(ported), result(stock)) < TOLERANCE


CHANGES = {
    "latents": lambda _pipe, latents: {"latents": latents * 0.5},
    "guidance": lambda pipe, _latents: setattr(pipe, "_guidance_scale", 1.0) or {},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_callback_sees_every_step_what_it_changes_counts_and_what_it_keeps_stays(ported, stock, change):
    def run(pipe, given):
        seen = []

        def callback(pipe, step, timestep, kwargs):
            seen.append(((step, int(timestep), sorted(kwargs)), kwargs["latents"]))
            return change(pipe, kwargs["latents"]) if step == 1 else {}

        made = frames(
            pipe,
            latents=given,
            callback_on_step_end=callback,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
        )
        steps, kept = zip(*seen, strict=True)
        return made, torch.stack([runtime.to_torch(latents) for latents in kept]), steps

    latents = torch.full((1, 3, 16, 4, 8), 0.5)
    on_jax = runtime.to_jax(latents)
    (want, stock_kept, stock_steps), (got, kept, steps) = run(stock, latents), run(ported, on_jax)
    assert (len(steps), steps) == (4, stock_steps)
    assert largest_error(got, want) < TOLERANCE
    assert largest_error(kept, stock_kept) < TOLERANCE
    assert torch.equal(runtime.to_torch(on_jax), latents)
    assert largest_error(got, frames(stock, latents=latents)) > TOLERANCE


def test_gradients_of_the_transformer_are_refused_in_words(ported):
    tensors = [*map(runtime.to_jax, TENSORS)]
    with torch.enable_grad():
        sample = ported.transformer(*tensors, return_dict=False)[0]
        # A loop that is not in `no_grad` has results of networks, and of weights, as inputs.
        ported.transformer(sample * ported.transformer.proj_out.bias.mean(), *tensors[1:])
        with pytest.raises(ValueError, match="no gradients"):
            sample.sum().backward()


@pytest.mark.parametrize("wanted", [lambda x: x, lambda x: torch.cat([x * 2, x * 3], dim=1)])
@pytest.mark.parametrize("position", [0, 1])
def test_a_gradient_of_a_networks_input_is_refused_at_its_call_with_what_works(ported, wanted, position):
    tensors = [*map(runtime.to_jax, TENSORS)]
    with torch.enable_grad():
        tensors[position] = wanted(tensors[position].requires_grad_())
        with pytest.raises(ValueError, match=r"in torch.no_grad\(\), and .* the VAE alone"):
            ported.transformer(*tensors)


class Forwarding(CogVideoXDDIMScheduler):
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


SCHEDULERS = {
    "one that passes arguments on": Forwarding,
    "DPM": CogVideoXDPMScheduler,
    "diffusers' DDIM": DDIMScheduler,
    "diffusers' multistep DPM": DPMSolverMultistepScheduler,
}


@pytest.mark.parametrize("kind", SCHEDULERS.values(), ids=SCHEDULERS)
def test_another_scheduler_may_be_set_after_porting(ported, stock, kind):
    for pipe in (ported, stock):
        pipe.scheduler = kind.from_config(pipe.scheduler.config)
    assert largest_error(*(frames(pipe, num_inference_steps=3) for pipe in (ported, stock))) < TOLERANCE
    assert type(ported.scheduler) is kind


def test_a_step_is_looked_at_while_the_next_one_runs(ported, monkeypatch):
    """Asked later, a device that works in order would answer only once that one is done."""
    events, steps = [], iter("abcd")

    class Finite:
        def __init__(self, _latents):
            self.step = next(steps)
            events.append(f"asked of {self.step}")

        def __bool__(self):
            events.append(f"waited for {self.step}")
            return True

    monkeypatch.setattr(runtime, "all_finite", Finite)
    with ported.transformer.register_forward_pre_hook(lambda *_: events.append("network")):
        frames(ported, output_type="latent")
    assert events == [
        *("network", "asked of a", "network", "waited for a", "asked of b"),
        *("network", "waited for b", "asked of c", "network", "waited for c", "asked of d", "waited for d"),
    ]


POISONED = {
    "its last layer": ("proj_out", r"step 3 of 4 \(timestep 499\) .*torch.float32.*bfloat16"),
    "its first layer": ("patch_embed.text_proj", "step 3 of 4"),
    "latents after the third step": (None, "step 4 of 4"),
}


@pytest.mark.parametrize(("part", "words"), POISONED.values(), ids=POISONED)
def test_a_nan_stops_the_run_without_decoding_and_names_the_step(ported, part, words, monkeypatch):
    def callback(pipe, step, timestep, kwargs):
        if part is None and step == 2:
            return {"latents": kwargs["latents"] * float("nan")}
        if part is not None and step == 1:
            layer = pipe.transformer.get_submodule(part)
            bias = torch.nn.Parameter(runtime.tensor_of(runtime.array_of(layer.bias).at[0].set(float("nan"))))
            monkeypatch.setitem(layer._parameters, "bias", bias)
        return {}

    with pytest.raises(denoising.NonFiniteError, match=words):
        frames(ported, callback_on_step_end=callback, output_type="latent")


SET_AFTER_THE_PORT = {
    "a VAE": (lambda pipe: setattr(pipe, "vae", shared(None)[0]), "the pipeline's vae, a .*, was set after"),
    "a transformer": (
        lambda pipe: setattr(pipe, "transformer", torch.compile(torch.nn.Linear(1, 1))),
        "the pipeline's transformer, a .*, was set after port: call",
    ),
    "a cast": (
        lambda pipe: diffusers.hooks.apply_layerwise_casting(pipe.transformer, torch.bfloat16, torch.float32),
        "the weights of a CogVideoXTransformer3DModel are cast layer by",
    ),
    "offload": (
        lambda pipe: accelerate.hooks.add_hook_to_module(pipe.vae, accelerate.hooks.ModelHook()),
        "the weights of the pipeline's vae were offloaded after port: call",
    ),
}


@pytest.mark.parametrize(("change", "words"), SET_AFTER_THE_PORT.values(), ids=SET_AFTER_THE_PORT)
def test_what_is_set_after_the_port_is_refused_before_anything_runs(change, words):
    pipe = port(small_pipelines.one_layer())
    change(pipe)
    with pytest.raises(ValueError, match=f"^{words}"):
        frames(pipe)


def test_a_decode_that_is_set_on_the_vae_is_used(ported, monkeypatch):
    monkeypatch.setitem(vars(ported.vae), "decode", lambda z: Mock(sample=z[:, :3] * 0 + 3))
    assert bool(ported.decode_latents(runtime.to_jax(torch.ones(1, 2, 16, 4, 8))).eq(3).all())


def test_latents_are_scaled_for_the_decoder_as_in_pytorch_and_decoded_as_a_stream(monkeypatch):
    seen, pipe = [], port(small_pipelines.one_layer().to(torch.bfloat16))
    monkeypatch.setitem(vars(pipe.vae), "decode_stream", lambda z: [seen.append(z) or z])
    latents = torch.randn(1, 2, 16, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    pipe.decode_latents(runtime.to_jax(latents))
    scaled = 1 / pipe.vae_scaling_factor_image * latents
    assert [runtime.to_torch(z).equal(scaled.permute(0, 2, 1, 3, 4)) for z in seen] == [True]


@pytest.mark.parametrize("owner", ["class", "object", "module"])
def test_positions_of_a_users_own_reach_beyond_the_models_size(owner, monkeypatch):
    module, name = pipeline_cogvideox, upstream.ROTARY_TABLES
    stock = module.get_3d_rotary_pos_embed

    def positions(*args, grid_size, **options):
        return stock(*args, **{**options, "grid_size": grid_size, "max_size": grid_size})

    def method(_pipe, height, width, num_frames, device):
        sizes = {"grid_size": (height // 4, width // 4), "temporal_size": -(-num_frames // 2)}
        return positions(16, crops_coords=None, grid_type="slice", device=device, **sizes)

    results = []
    for place in ("one device", None):
        pipe = pipeline("text", "1.5", place)
        entry = {"class": (CogVideoXPipeline, name, method), "module": (module, stock.__name__, positions)}
        monkeypatch.setattr(*entry.get(owner, (pipe, name, functools.partial(method, pipe))), raising=False)
        results.append(latents(pipe, height=16))
    assert largest_error(*results) < TOLERANCE


TENSORS = [torch.zeros(size) for size in ((1, 2, 16, 4, 8), (1, 16, 32), (1,))]
"""A step's inputs."""
NO_POSITIONS = {"max_sequence_length": 9}
"""An option that is refused once the prompt is encoded."""

REFUSED = {
    "diffusers' parallelism": (
        lambda pipe: pipe.transformer.enable_parallelism(config=ContextParallelConfig(ring_degree=2)),
        "^transformer: enable_parallelism .* mesh=make_mesh",
    ),
    "inputs on the host": (
        lambda pipe: pipe.transformer(*TENSORS),
        "got inputs on the host for weights on jax: move",
    ),
    "weights on the host": (
        lambda _: porting.port_network(small_pipelines.transformer("5b"))(*map(runtime.to_jax, TENSORS)),
        "got inputs on jax for weights in PyTorch: move",
    ),
    "dropout": (
        lambda _: port(small_pipelines.one_layer()).text_encoder.train()(torch.zeros(1, 16).long()),
        r"^text_encoder\.encoder\.block\.0\..*dropout drops values",
    ),
    "a height": (
        lambda pipe: frames(pipe, height=10, **NO_POSITIONS),
        "multiples of 8; try height=8, width=16",
    ),
    "a width": (lambda pipe: frames(pipe, width=18, **NO_POSITIONS), "height=8, width=16"),
    **{
        f"a size beyond the positions of 1.5, {kind}": (
            lambda _, kind=kind: frames(
                pipeline(kind, "1.5", "one device"), kind, height=16, width=24, **NO_POSITIONS
            ),
            "got height=16, width=24: .* at most height=8, width=16; try height=8, width=16",
        )
        for kind in ("text", "image")
    },
    **{
        f"a prompt without positions, {version}": (
            lambda _, version=version: transformer("one device", version, ())(
                *map(runtime.to_jax, (torch.zeros(1, 3, 16, 4, 8), torch.zeros(1, 226, 32), torch.zeros(1)))
            ),
            "prompt of 226 tokens.* pass max_sequence_length=16 to the",
        )
        for version in ("2b", "5b-I2V")
    },
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_words_before_anything_is_compiled(ported, call, words):
    with compilations() as counted, pytest.raises(ValueError, match=words):
        call(ported)
    assert {*counted} <= {"jit(stage)"}, "what moves a table of positions"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2b", "5b"])
def test_another_size_than_the_models_own_gives_the_same_frames(version):
    size = {"height": 16, "width": 24, "num_frames": 7, "guidance_scale": 1.0}
    pipes = (pipeline("text", version, place) for place in ("one device", None))
    assert largest_error(*(frames(pipe, **size) for pipe in pipes)) < TOLERANCE


def test_a_table_of_positions_is_that_of_the_size_and_of_the_settings(monkeypatch):
    embed = transformer("one device", "2b", ()).patch_embed
    want = embed.table_for(6, 8, 2)
    assert embed.table_for(6, 8, 2) is want
    monkeypatch.setattr(embed, "spatial_interpolation_scale", 4.0)
    assert not torch.equal(runtime.to_torch(embed.table_for(6, 8, 2)), runtime.to_torch(want))


def test_a_tokenizer_whose_padding_is_state_is_used_by_one_thread_at_a_time_also_in_parts(monkeypatch):
    class InParts(CogVideoXPipeline):
        def encode_prompt(self, prompt, *args, **kwargs):
            if isinstance(prompt, str):
                return super().encode_prompt(prompt, *args, **kwargs)
            return [self.encode_prompt(part, *args, **kwargs)[0] for part in prompt]

    def tokenize(*args, **kwargs):
        assert in_use.acquire(blocking=False)
        time.sleep(0.02)
        in_use.release()
        return tokenizer(*args, **kwargs)

    in_use, pipe = threading.Lock(), pipeline(placement="one device")
    tokenizer, pipe.__class__ = pipe.tokenizer, InParts
    monkeypatch.setattr(port(pipe), "tokenizer", tokenize)
    with ThreadPoolExecutor(2) as threads:  # a lock that a thread waits for and has itself is never given
        encoded = threads.map(pipe.encode_prompt, 2 * [SENTENCES[:2]])
    assert [len(each) for each in encoded] == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CogVideoXDDIMScheduler, {}),
        (CogVideoXDPMScheduler, {"old_pred_original_sample": None, "timestep_back": None}),
        (DDIMScheduler, {"eta": 0.5}),
    ],
)
def test_diffusers_schedulers_compute_on_jax_what_they_do_on_the_host(kind, options, dtype):
    """A step that draws noise draws it in the dtype of the latents, which are noised as for an inversion."""
    sample, prediction = torch.randn(2, 1, 4, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    def step(device):
        scheduler = kind()
        scheduler.set_timesteps(4, device=device)
        generator, latents, predicted = torch.Generator().manual_seed(1), sample, prediction.to(device)
        for timestep in [*reversed(scheduler.timesteps)][1:3]:
            noised = scheduler.add_noise(latents.to(device), predicted * 0.1, timestep.reshape(1))
            latents = scheduler.step(
                predicted, timestep=timestep, sample=noised, generator=generator, **options
            )[0]
        return latents

    got, want = step("jax"), step("cpu")
    assert largest_error(got.cpu().float(), want.float()) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("kind", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler, DPMSolverMultistepScheduler])
def test_a_step_reads_nothing_from_the_device(ported, kind, monkeypatch):
    """A scheduler looks timesteps up in its tables: a read of the device would wait for its network."""
    reads = []
    monkeypatch.setattr(device, "on_host", lambda array: reads.append(array.shape) or host.on_host(array))

    def callback(_pipe, step, _timestep, kwargs):
        reads.append(f"step {step}")
        return kwargs

    monkeypatch.setattr(ported, "scheduler", kind.from_config(ported.scheduler.config))
    frames(ported, callback_on_step_end=callback, output_type="latent")
    assert reads[reads.index("step 0") : reads.index("step 3") + 1] == [f"step {i}" for i in range(4)]


# Frames are diffusers' own, to the last bit; pictures leave the device as bytes.


def bits(results):
    """Return what a processor has returned as an array, and its type."""
    if isinstance(results, list):
        return np.stack([[np.asarray(picture) for picture in video] for video in results]), results[0][0].mode
    return np.asarray(results.float() if isinstance(results, torch.Tensor) else results), results.dtype


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_frames_are_converted_as_by_diffusers(output_type, dtype, device):
    frames = (torch.randn(2, 3, 5, 24, 32, generator=torch.Generator().manual_seed(0)) * 0.7).to(dtype)
    given = frames.clone()
    got, kind = bits(processors.FrameProcessor().postprocess_video(given.to(device), output_type))
    want, wanted_kind = bits(pipeline_cogvideox.VideoProcessor().postprocess_video(frames, output_type))
    assert np.array_equal(got, want)
    assert (kind, given.equal(frames)) == (wanted_kind, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", small_pipelines.CLASSES)
@pytest.mark.slow_cases(but=["text-dtype1"])
def test_pictures_leave_the_device_as_bytes_in_chunks_and_are_those_of_the_frames(kind, dtype, monkeypatch):
    pipe = port(small_pipelines.one_layer(kind).to(dtype))
    seen, convert = [], processors.FrameProcessor.postprocess_video
    monkeypatch.setattr(
        processors.FrameProcessor,
        "postprocess_video",
        lambda *args, **rest: seen.append(rest["video"]) or convert(*args, **rest),
    )
    pictures, _ = (frames(pipe, kind, num_inference_steps=2, output_type=each) for each in ("pil", "pt"))
    in_bytes, in_floats = seen
    assert (in_bytes.dtype, in_floats.dtype) == (torch.uint8, dtype)
    wanted = pipeline_cogvideox.VideoProcessor().postprocess_video(in_floats, "pil")
    assert np.array_equal(bits(pictures)[0], bits(wanted)[0])
    # Outside of such a call frames are floats, whoever asks for them.
    assert pipe.decode_latents(torch.zeros(1, 2, 16, 4, 8, dtype=dtype).to("jax")).dtype == dtype
    assert not any(map(runtime.on_jax, seen))


def test_a_call_for_pictures_in_another_thread_makes_no_bytes_of_these_frames():
    decoded = []

    def decode_in_a_thread(pipe, _step, _timestep, tensors):
        pipe._current_timestep = None  # as at the end of a call in that thread
        with ThreadPoolExecutor(1) as thread:
            decoded.append(thread.submit(pipe.decode_latents, tensors["latents"]).result())
        return tensors

    pipe = port(small_pipelines.one_layer())
    pictures = frames(pipe, num_inference_steps=1, output_type="pil", callback_on_step_end=decode_in_a_thread)
    assert ([each.dtype for each in decoded], bits(pictures)[1]) == ([torch.float32], "RGB")


# While a first call compiles its prompt and its steps, threads compile the decoder.


@pytest.fixture
def compilers():
    """Return a list that gets, for each compilation of a decoder's chunk, the thread that compiled it."""
    with compilations("DecoderChunk", lambda _name: threading.current_thread()) as threads:
        yield threads


@pytest.mark.parametrize(
    ("kind", "version", "mesh"), [("text", "5b", None), ("text", "5b", (2, 4)), ("image", "1.5", None)]
)
@pytest.mark.slow_cases(but=["text-5b-None"])
def test_the_decoder_is_compiled_in_threads_and_only_once(compilers, kind, version, mesh):
    pipe = port(small_pipelines.one_layer(kind, version), mesh=make_mesh(*mesh) if mesh else None)
    inputs = small_pipelines.inputs(kind, num_frames=9, num_inference_steps=1)

    for _ in range(2):
        assert pipe(**inputs).frames.shape[1] == 9
        assert len(compilers) == 2  # the first chunk, and the later ones
    assert threading.current_thread() not in compilers


def test_a_decode_waits_for_the_thread(monkeypatch, compilers):
    pipe, compile_lowered = port(small_pipelines.one_layer()), jax.stages.Lowered.compile

    def slowly(lowered):
        time.sleep(1)
        return compile_lowered(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slowly)
    z = torch.zeros(1, pipe.vae.config.latent_channels, 5, 2, 4)
    pipe.vae.compile_ahead(DECODE, z.shape)
    assert (len(list(pipe.vae.decode_stream(z))), len(compilers)) == (2, 2)
    assert threading.current_thread() not in compilers


@pytest.fixture(scope="module")
def undecoded():
    """Return a pipeline whose decoder is not compiled yet."""
    return port(small_pipelines.one_layer())


def test_latents_need_no_decoder(undecoded, compilers):
    found = frames(undecoded, num_inference_steps=1, output_type="latent")
    assert runtime.on_jax(found)
    assert torch.equal((found * 2).permute(0, 2, 1, 3, 4).cpu(), found.cpu().permute(0, 2, 1, 3, 4) * 2)
    assert not compilers


@pytest.mark.parametrize(
    "wrong", [{"height": 9}, {"prompt": None}, {"num_frames": "5"}, {"no_such_option": 1}, {"image": "none"}]
)
def test_a_refused_call_compiles_nothing(undecoded, compilers, wrong):
    with pytest.raises((TypeError, ValueError)):
        frames(undecoded, **wrong)
    assert not compilers


def test_a_thread_that_fails_leaves_the_error_to_the_call(undecoded, monkeypatch, compilers):
    monkeypatch.setattr(jax.stages.Lowered, "compile", Mock(side_effect=RuntimeError("no memory")))
    assert torch.isfinite(frames(undecoded, num_inference_steps=1)).all()
    assert {*compilers} == {threading.current_thread()}
