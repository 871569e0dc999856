"""diffusers' caches on a ported pipeline: the steps that stock diffusers skips, and its latents."""

import copy
import functools
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import jax
import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
)

from cogvideox_torchax import runtime
from examples.small_pipeline import SENTENCES
from tests import small_pipelines
from tests.pipelines.test_pipeline import PLACEMENTS, TOLERANCE, latents as of_two_steps, pipeline
from tests.reference import compilations, largest_error

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")  # of diffusers' FasterCache

STEPS = 6


def build(kind="text", version="5b", placement=None, cache=None):
    """Build a pipeline of three layers, whose transformer is its own."""
    model = small_pipelines.transformer(version, num_layers=3, **small_pipelines.conditioning(kind, version))
    if cache is not None:
        model.enable_cache(cache)
    return pipeline(kind, version, placement, transformer=model)


def first_block(pipe, threshold=0.3):
    """Return a config whose threshold the text tokens, or one half of guidance, would cross otherwise."""
    return FirstBlockCacheConfig(threshold=threshold)


def taylor(pipe, **options):
    return TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float32, **options
    )


CONFIGS = {
    "first block": first_block,
    "mag": lambda _pipe: MagCacheConfig(
        threshold=0.2, num_inference_steps=STEPS, mag_ratios=[1.0] + [0.98] * (STEPS - 1)
    ),
    "broadcast": lambda pipe: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: pipe.current_timestep
    ),
    "faster": lambda pipe: FasterCacheConfig(
        attention_weight_callback=lambda _: 0.3,
        tensor_format="BFCHW",
        spatial_attention_timestep_skip_range=(-1, 981),  # the second step skips too
        unconditional_batch_timestep_skip_range=(-1, 981),
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "taylor": functools.partial(
        taylor, cache_identifiers=[r"transformer_blocks\.\d+\.(attn1|ff)"], max_order=2
    ),
    "taylor lite": functools.partial(taylor, use_lite_mode=True),
    "taylor inside of attention": functools.partial(
        taylor, cache_identifiers=[r".*attn1\.to_q"], skip_predict_identifiers=[r".*1\.ff"], max_order=2
    ),
}


latents = functools.partial(of_two_steps, num_inference_steps=STEPS, guidance_scale=6.0)


def clip(kind, version):
    """Return the pictures of an even number of latents, which 1.5 requires of a given video."""
    name = {"video": "video", "control": "control_video"}.get(kind) if version == "1.5" else None
    return {name: [*map(small_pipelines.picture, range(small_pipelines.FRAMES + 2))]} if name else {}


def recorded_steps(model):
    """Return a list that gets an entry for each step of a stock transformer.

    An entry is the number of videos, then a 1 for each part that runs.
    """
    seen = []
    model.patch_embed.register_forward_pre_hook(lambda _, args: seen.append([args[1].shape[0]]))
    parts = [(block.attn1.to_q, block.ff.net[0].proj) for block in model.transformer_blocks]
    for part in (*itertools.chain(*parts), model.proj_out):
        part.register_forward_pre_hook(lambda *_: seen[-1].append(1))
    return seen


@functools.cache
def reference(kind, version, name):
    """Latents of stock diffusers with this cache, and which steps it computed whole."""
    pipe = build(kind, version)
    pipe.transformer.enable_cache(CONFIGS[name](pipe))
    steps = recorded_steps(pipe.transformer)
    found = latents(pipe, kind, **clip(kind, version))
    return found, [step == steps[0] for step in steps]  # the first step computes everything


@pytest.fixture
def donated(monkeypatch):
    """Return, of each cached array that a program took, whether it is gone while the program runs."""
    gone, run = [], runtime.Program.run

    def watched(program, weights, inputs, cache=None):
        result = run(program, weights, inputs, cache)
        gone.extend(array.is_deleted() for array in jax.tree.leaves(cache))
        return result

    monkeypatch.setattr(runtime.Program, "run", watched)
    return gone


for_all_caches = functools.lru_cache(maxsize=1)(build)


QUICK = [
    ("text", "1.5", "1x8 tensor", "first block"),
    ("text", "1.5", "1x8 tensor", "mag"),
    ("video", "2b", "2x4", "broadcast"),
    ("video", "2b", "2x4", "faster"),
    ("video", "2b", "2x4", "taylor"),
]
"""Cases of two pipelines, which are ported once each."""
SLOW = [
    ("control", "1.5", "one device", "mag"),
    ("video", "2b", "1x8", "broadcast"),
    ("image", "5b-I2V", "2x4", "taylor"),
    ("control", "2b", "2x4 tensor", "faster"),
    ("text", "2b", "one device", "broadcast"),
    ("text", "2b", "one device", "taylor"),
    ("text", "2b", "1x8 tensor", "faster"),
    ("text", "2b", "2x4 tensor", "first block"),
    ("text", "2b", "2x4 tensor", "mag"),
    *(("text", "5b", placement, "taylor lite") for placement in PLACEMENTS),
    *(("text", "5b", placement, "taylor inside of attention") for placement in PLACEMENTS),
    ("text", "5b", "1x8", "mag"),
    ("text", "1.5", "2x4", "broadcast"),
    ("image", "2b", "1x8 tensor", "mag"),
    ("image", "5b", "one device", "first block"),
    ("image", "1.5", "1x8", "faster"),
    ("image", "5b-I2V", "one device", "faster"),
    ("image", "5b-I2V", "1x8", "first block"),
    ("image", "5b-I2V", "1x8 tensor", "mag"),
    ("image", "5b-I2V", "2x4 tensor", "broadcast"),
    ("video", "2b", "one device", "first block"),
    ("video", "2b", "2x4", "mag"),
    ("video", "2b", "1x8 tensor", "taylor"),
    ("video", "5b", "2x4", "faster"),
    ("video", "1.5", "2x4 tensor", "taylor"),
    ("control", "2b", "2x4", "first block"),
    ("control", "5b", "1x8", "taylor"),
    ("control", "5b", "1x8 tensor", "broadcast"),
]
"""With `QUICK` each pair of a pipeline, a version, a placement and a cache."""


@pytest.mark.parametrize(
    ("kind", "version", "placement", "name"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_cache_skips_what_it_skips_in_stock_diffusers(kind, version, placement, name, donated):
    want, computed = reference(kind, version, name)
    pipe = for_all_caches(kind, version, placement)
    pipe.transformer.disable_cache()
    pipe.transformer.enable_cache(CONFIGS[name](pipe))
    with compilations() as compiled:
        latents(pipe, kind, num_inference_steps=2, **clip(kind, version))
        got = latents(pipe, kind, **clip(kind, version))
    assert compiled.count("jit(CachedStep)") <= 4
    assert largest_error(got, want) < TOLERANCE
    assert pipe.transformer.step_cache.computed == computed
    assert len({*computed}) == 2, "this case skips nothing, or everything"
    assert {*donated} == {True}


@pytest.mark.parametrize("name", ["broadcast", "taylor"])
def test_beside_a_hook_on_attention_a_cache_skips_what_it_skips_without(name, caplog):
    want, computed = reference("text", "5b", name)
    pipe, seen = build(placement="one device"), []
    pipe.transformer.transformer_blocks[1].attn1.register_forward_hook(lambda *_: seen.append(1))
    pipe.transformer.enable_cache(CONFIGS[name](pipe))
    assert largest_error(latents(pipe), want) < TOLERANCE
    assert pipe.transformer.step_cache.computed == computed
    assert "CachedStep: hooks or methods change seen, a variable outside" in caplog.text, "the hook runs"
    assert not seen


@pytest.fixture(scope="module")
def enabled_before():
    """Return a pipeline whose cache was enabled before it was ported."""
    return build(placement="one device", cache=first_block(None))


@pytest.fixture
def ported(enabled_before):
    if not enabled_before.transformer.is_cache_enabled:
        enabled_before.transformer.enable_cache(first_block(enabled_before))
    return enabled_before


def is_as_stock(pipe, **overrides):
    want, computed = reference("text", "5b", "first block")
    error = largest_error(latents(pipe, **overrides), want)
    return error < TOLERANCE and pipe.transformer.step_cache.computed == computed


def test_a_cache_enabled_before_the_port_is_traced_once_and_begins_anew_with_each_run(ported):
    runtime.forget_programs(ported.transformer)  # those of earlier tests
    network = ported.transformer.step_cache
    with compilations("CachedStep") as compiled:
        assert is_as_stock(ported)
    assert len(compiled) == 1
    with compilations() as compiled:
        latents(ported, prompt="an astronaut hatches")
        assert is_as_stock(ported)
        ported.transformer.disable_cache()
        ported.transformer.enable_cache(first_block(ported, threshold=1e-6))
        latents(ported)
    assert not compiled
    assert ported.transformer.step_cache is not network
    assert ported.transformer.step_cache.computed == [True] * STEPS
    ported.transformer.disable_cache()


def test_what_a_run_kept_that_failed_is_not_reused(ported):
    with pytest.raises(KeyError):
        latents(ported, prompt="the sea is calm", callback_on_step_end=Mock(side_effect=KeyError("stopped")))
    assert is_as_stock(ported)


def test_a_callback_may_decode_between_steps(ported):
    def decode(pipe, step, timestep, kwargs):
        assert torch.isfinite(pipe.decode_latents(kwargs["latents"])).all()
        return {}

    assert is_as_stock(ported, callback_on_step_end=decode)


def test_threads_do_not_mix_with_a_transformer_each_or_one_for_both(ported):
    sharing = copy.copy(ported)
    sharing.scheduler = copy.deepcopy(ported.scheduler)
    pipes, barrier = (ported, sharing, copy.deepcopy(ported)), threading.Barrier(3, timeout=60)

    def take_turns(pipe, step, timestep, kwargs):
        barrier.wait()
        return {}

    def run(pipe, prompt, callback=None):
        return latents(pipe, prompt=prompt, callback_on_step_end=callback)

    want = [run(*each) for each in zip(pipes, SENTENCES, strict=False)]
    with ThreadPoolExecutor(3) as pool:
        got = pool.map(run, pipes, SENTENCES, 3 * [take_turns])
        assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == 3 * [True]
    assert is_as_stock(ported)


def test_contexts_do_not_mix(ported):
    def run(model, put):
        draw = torch.Generator().manual_seed(0)
        for step in range(4):
            for name in ("one", "other"):
                latents = torch.randn(1, 3, 16, 4, 8, generator=draw) * (0.1 * step if name == "one" else 1)
                given = latents, torch.ones(1, 16, 32), torch.tensor([999 - step])
                with model.cache_context(name):
                    yield runtime.to_torch(model(*map(put, given))[0])

    stock = build().transformer
    stock.enable_cache(first_block(None))
    ported.transformer._reset_stateful_cache()
    results = run(ported.transformer, runtime.to_jax), run(stock, lambda tensor: tensor)
    assert largest_error(*(torch.stack([*each]) for each in results)) < TOLERANCE


def test_a_copy_keeps_the_cache_and_a_pickle_drops_it(ported):
    copied = copy.deepcopy(ported)
    ported.transformer.disable_cache()
    assert is_as_stock(copied)
    assert not pickle.loads(pickle.dumps(copied)).transformer.is_cache_enabled


def test_on_the_host_the_cache_is_diffusers_own_and_back_on_jax_it_is_ours(ported):
    want, _ = reference("text", "5b", "first block")
    ported.to("cpu")
    assert ported.transformer.step_cache is None
    assert largest_error(latents(ported), want) < 1e-6
    assert is_as_stock(ported.to("jax"))


def test_a_cache_applied_by_diffusers_function_is_seen(ported):
    ported.transformer.disable_cache()
    apply_first_block_cache(ported.transformer, first_block(ported))
    assert is_as_stock(ported)


@pytest.mark.parametrize(
    "config", [SeaCacheConfig(), TaylorSeerCacheConfig()], ids=lambda c: type(c).__name__
)
def test_a_cache_without_effect_says_so_and_a_disabled_one_leaves_nothing(ported, config):
    ported.transformer.disable_cache()
    assert ported.transformer.step_cache is None
    want = latents(ported)
    with pytest.warns(UserWarning, match=f"{type(config).__name__} skips nothing on CogVideoX.*FirstBlock"):
        ported.transformer.enable_cache(config)
    assert torch.equal(latents(ported), want)
    ported.transformer.disable_cache()
    assert not any("forward" in vars(module) for module in ported.transformer.modules())


def test_a_step_outside_of_a_context_is_refused_as_by_diffusers(ported):
    tensors = [runtime.to_jax(torch.zeros(size)) for size in ((2, 3, 16, 4, 8), (2, 16, 32), (2,))]
    with pytest.raises(ValueError, match="No cache context is set"):
        ported.transformer(*tensors)


@pytest.mark.slow
def test_magcache_calibrates_as_in_diffusers(capsys):
    printed = []
    for placement in ("one device", None):
        pipe = build(placement=placement)
        pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
        latents(pipe)
        printed.append(torch.tensor(eval(capsys.readouterr().out.splitlines()[-2])))
    assert len(printed[0]) == STEPS
    assert largest_error(*printed) < TOLERANCE
