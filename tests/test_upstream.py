"""Interfaces that other packages do not promise to keep: a release that removes one fails here."""

import inspect
import sys

import diffusers
import jax
import jax.core
import pytest
import torch
import torchax

from cogvideox_torchax import AutoencoderKLCogVideoX, runtime, terminal, upstream
from cogvideox_torchax.pipelines import call, layers, networks, port, transformer
from cogvideox_torchax.runtime.device import import_torchax
from cogvideox_torchax.vae.torchax.modules import PORTED

# What upstream.py takes


@pytest.mark.usefixtures("torchax_off")
def test_torchax_on_is_seen_in_torchs_stack_of_modes():
    assert not upstream.torchax_is_on()
    torchax.enable_globally()
    jax.jit(lambda x: import_torchax().interop.jax_view(lambda t: t * 2)(x))(jax.numpy.ones(2))
    assert upstream.torchax_is_on(), "torchax no longer pushes an XLAFunctionMode: upstream.torchax_is_on"
    torchax.disable_globally()
    assert not upstream.torchax_is_on()


@pytest.mark.parametrize("operation", [torch.add, torch.sub, torch.mul])
@pytest.mark.parametrize(
    "other", [torch.ones(2, 3), torch.tensor(0.5, dtype=torch.float64)], ids=["tensor", "number"]
)
def test_a_sum_or_a_product_is_one_program(operation, other):
    other = runtime.to_jax(other) if other.ndim else other
    function = import_torchax().interop.jax_view(lambda x: operation(x, other))
    names = [equation.primitive.name for equation in jax.make_jaxpr(function)(jax.numpy.ones((2, 3))).eqns]
    assert names in (["jit"], ["pjit"]), names


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (diffusers.DiffusionPipeline, "from_pipe"),
        (diffusers.DiffusionPipeline, "_get_signature_types"),
    ],
)
def test_models_and_pipelines_are_made_by_one_class_method(kind, name):
    classes = (diffusers.AutoencoderKLCogVideoX, diffusers.CogVideoXTransformer3DModel, *call.PIPELINES)
    own = [found for found in classes if issubclass(found, kind) and name in vars(found)]
    assert not own, f"{own} have a {name} of their own now: upstream.wrap_{name}"
    assert isinstance(vars(kind)[name], classmethod)
    assert inspect.unwrap(vars(kind)[name].__func__).__module__.startswith("diffusers.")


@pytest.mark.parametrize("kind", call.PIPELINES)
def test_a_pipeline_asks_one_method_for_its_rotary_tables(kind):
    assert f"self.{upstream.ROTARY_TABLES}(height, width, " in inspect.getsource(kind.__call__), (
        f"{kind.__name__} makes its tables elsewhere now"
    )


def test_jax_says_how_long_it_traces_lowers_and_compiles():
    watch = terminal.CompileClock()
    jax.jit(lambda x: x * 5 + 3)(2.0)
    assert {event for event, *_ in watch.spans} >= {*upstream.TRACING_EVENTS, *upstream.COMPILING_EVENTS}, (
        "jax.monitoring has other names"
    )


@pytest.mark.parametrize(
    ("take_away", "use", "words"),
    [
        pytest.param(
            lambda patch: patch.delattr("torch.overrides._get_current_function_mode_stack"),
            upstream.torchax_is_on,
            "torch .* has no torch.overrides._get_current_function_mode_stack any more: install torch==",
            id="torch's stack of modes",
        ),
        pytest.param(
            lambda patch: patch.delattr("torchax.tensor.XLAFunctionMode"),
            upstream.torchax_is_on,
            "torchax .* has no torchax.tensor.XLAFunctionMode any more: install torchax==",
            id="torchax's mode",
        ),
        pytest.param(
            lambda patch: patch.delattr("torchax.tensor.Tensor.apply_jax_"),
            lambda: upstream.replace_array(runtime.to_jax(torch.ones(1)), abs),
            "torchax .* has no Tensor.apply_jax_ any more",
            id="torchax's assignment",
        ),
        pytest.param(
            lambda patch: patch.delattr("jax.core.Tracer"),
            lambda: upstream.is_traced(1),
            "jax .* has no jax.core.Tracer any more: install jax==",
            id="JAX's tracer",
        ),
        pytest.param(
            lambda patch: patch.delattr("jax._src.core.trace_state_clean"),
            upstream.is_tracing,
            "jax .* has no jax._src.core.trace_state_clean any more: install jax==",
            id="JAX's state of tracing",
        ),
        pytest.param(
            lambda patch: patch.setitem(sys.modules, "jax._src.core", None),
            upstream.is_tracing,
            "jax .* has no jax._src.core.trace_state_clean any more: install jax==",
            id="the module of JAX's state of tracing",
        ),
        pytest.param(
            lambda patch: patch.delattr("diffusers.hooks._helpers.TransformerBlockRegistry"),
            lambda: upstream.register_block(type("Block", (), {})),
            "diffusers .* has no diffusers.hooks._helpers.TransformerBlockRegistry any more",
            id="diffusers' registry of blocks",
        ),
    ],
)
def test_what_a_release_takes_away_is_named_with_the_release_that_has_it(monkeypatch, take_away, use, words):
    take_away(monkeypatch)
    with pytest.raises(ImportError, match=words):
        use()


# What ported classes override by its name


OVERRIDDEN = {
    AutoencoderKLCogVideoX: ("_encode", "_decode", "tiled_encode", "tiled_decode", "enable_tiling"),
    layers.PatchEmbed: ("forward",),
    port.PortedPipeline: (
        "to",
        "enable_model_cpu_offload",
        "enable_sequential_cpu_offload",
    ),
    **dict.fromkeys((*PORTED.values(), *networks.LAYERS.values(), *port.KNOWN.values()), ("forward",)),
    transformer.CogVideoXTransformer3DModel: (
        "forward",
        "enable_cache",
        "disable_cache",
        "cache_context",
        "_reset_stateful_cache",
    ),
}
"""Methods that diffusers, transformers or torch call by this name.

A renamed one would no longer be overridden, and the inherited code would run on JAX.
"""


@pytest.mark.parametrize("ported", OVERRIDDEN, ids=lambda ported: ported.__name__)
def test_every_method_that_is_overridden_is_there_upstream_and_takes_the_same(ported):
    own = next(kind for kind in ported.__mro__ if "cogvideox_torchax" not in kind.__module__)
    for stock in call.PIPELINES if ported is port.PortedPipeline else [own]:
        for name in OVERRIDDEN[ported]:
            assert hasattr(stock, name), (
                f"{stock.__name__} has no {name} any more, {ported.__name__} overrides it"
            )
            theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (stock, ported))
            takes_any = any(given.kind is given.VAR_KEYWORD for given in ours.values())
            missing = theirs.keys() - (theirs if takes_any else ours)
            assert not missing, f"{stock.__name__}.{name} takes {missing} now, {ported.__name__}'s does not"
