"""Weights in eight bits stay so on the device, and give what PyTorch gives with rounded weights."""

from typing import Any

import pytest
import torch

from cogvideox_torchax import load_pipeline, make_mesh, port, runtime
from cogvideox_torchax.pipelines.sharding import weight_spec
from cogvideox_torchax.pipelines.transformer import step_tensors
from cogvideox_torchax.runtime.stock import change_in
from cogvideox_torchax.vae.tolerances import rms_error
from tests import small_pipelines
from tests.pipelines.test_blocks import SPLITS, step, stock
from tests.pipelines.test_changes import with_lora
from tests.reference import largest_error

pytestmark = pytest.mark.usefixtures("torchax_off")
KERNELS = "qk_norm_rope", "adaptive_layer_norm", "gated_linear", "linear_gelu", "split_linear"


def matrices(model):
    """Return the names of a stock model's matrices that `port` makes int8."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(weight_spec(f"{name}.weight"))
    }


def rounded(model):
    """Round a stock model's matrices to 255 values a row, in place."""
    for name in matrices(model):
        weight = model.get_parameter(name).data
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        weight.copy_((weight / scale).round() * scale)
    return model


def ported(transformer=None, text_encoder=None, **options):
    pipe = runtime.without_torchax(
        small_pipelines.build, transformer=transformer or stock(), text_encoder=text_encoder, tokenizer=None
    )
    return port(pipe, weights="int8", **options)


@pytest.mark.parametrize("version", ["5b", "1.5"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.slow_cases(but=["one device-5b", "2x4 context, weights gathered-5b", "1x8 tensor-5b"])
def test_a_step_in_int8_is_that_of_the_rounded_weights(split, version):
    mesh, kind, memory = SPLITS[split]
    transformer = stock(version)
    model = ported(transformer, mesh=mesh and make_mesh(*mesh), parallel=kind).transformer
    if memory:
        model.place_on(model.mesh, kind, memory)
        model.place()
    want = rounded(stock(version))
    assert largest_error(step(model), step(want)) < 1e-4
    assert {name for name, w in model.named_parameters() if w.dtype == torch.int8} == matrices(want)
    assert change_in(model) is None
    if split == "one device":
        tensors = step_tensors(model, batch=2, frames=4, height=4, width=8, text=7)
        program = model.program.lower(*model.program.structs(tensors)).as_text()
        assert all(kernel in program for kernel in KERNELS)
        assert "xi8>" in program


def test_a_prompt_in_int8_is_that_of_the_rounded_weights():
    make = lambda: runtime.without_torchax(small_pipelines.text_encoder)  # noqa: E731
    ids, model = torch.tensor([[3, 4, 5, 1]]), ported(text_encoder=make()).text_encoder
    want = runtime.without_torchax(lambda: rounded(make())(ids)[0])
    assert largest_error(runtime.to_torch(model(runtime.to_jax(ids))[0]), want) < 1e-4
    assert {name for name, w in model.named_parameters() if w.dtype == torch.int8} == matrices(make())


def test_the_files_weights_become_int8_while_they_are_loaded(tmp_path):
    pipe = runtime.without_torchax(small_pipelines.one_layer)
    runtime.without_torchax(pipe.save_pretrained, tmp_path)
    options: dict[str, Any] = {
        "weights": "int8",
        "dtype": torch.bfloat16,
        "mesh": make_mesh(1, 2),
        "parallel": "tensor",
    }
    loaded = load_pipeline(tmp_path, **options)
    wanted = port(
        pipe.to(torch.bfloat16), **{name: options[name] for name in ("weights", "mesh", "parallel")}
    )
    for part in ("transformer", "text_encoder"):
        got, want = (runtime.without_torchax(getattr(each, part).state_dict) for each in (loaded, wanted))
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert torch.equal(runtime.to_torch(got[name]), runtime.to_torch(weight)), name
            sharding = runtime.array_of(weight).sharding
            assert runtime.array_of(got[name]).sharding.is_equivalent_to(sharding, weight.ndim), name


def test_a_model_in_int8_moves_casts_and_takes_a_lora_with_its_scales_exact():
    model = ported().transformer
    scales = {name: runtime.to_torch(scale) for name, scale in model.named_buffers() if "scale" in name}
    result = step(model)
    assert largest_error(step(model.to("cpu")), result) < 1e-5
    assert largest_error(step(model.to("jax")), result) == 0
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(runtime.to_torch(model.get_buffer(name)), scales[name]) for name in scales)
    model, wanted = ported().transformer, rounded(stock())
    with runtime.active():
        with_lora("to_q", "to_v")(model)
    model.place()
    runtime.without_torchax(with_lora("to_q", "to_v"), wanted)
    assert change_in(model) is None
    assert largest_error(step(model), step(wanted)) < 1e-4


def test_bfloat16s_error_of_a_step_grows_by_a_tenth_at_most_in_int8():
    exact = step(stock())
    in_bfloat16 = runtime.without_torchax(stock().to, torch.bfloat16)
    limit = 1.1 * rms_error(step(in_bfloat16).float(), exact)
    assert rms_error(step(ported(in_bfloat16).transformer).float(), exact) < limit


REFUSED = {
    "saving": (
        lambda pipe, path: pipe.transformer.save_pretrained(path),
        "got weights in int8",
    ),
    "fusing projections": (lambda pipe, path: pipe.transformer.fuse_qkv_projections(), "fuse_qkv_.* in int8"),
    "fusing a LoRA": (lambda pipe, path: pipe.fuse_lora(), "fuse_lora got weights in int8"),
    "another form": (
        lambda pipe, path: port(pipe, **dict[str, Any](weights="int4")),
        "weights='int4': it takes 'int8'",
    ),
    "a VAE": (lambda pipe, path: port(pipe.vae, weights="int8"), "weights='int8' for a AutoencoderKLCog"),
}


@pytest.fixture(scope="module")
def pipe():
    return ported()


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_int8_cannot_do_is_refused_in_one_line(pipe, tmp_path, call, words):
    with pytest.raises(ValueError, match=words) as error:
        call(pipe, tmp_path)
    assert "\n" not in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_an_object_without_a_network_for_int8_is_refused():
    pipe = runtime.without_torchax(small_pipelines.build, transformer=None, text_encoder=None, tokenizer=None)
    with pytest.raises(ValueError, match="which has neither of the networks"):
        port(pipe, weights="int8")


def test_weights_that_another_library_has_quantized_are_named_with_the_form_that_works(caplog):
    transformer = stock()
    runtime.without_torchax(transformer.enable_layerwise_casting, torch.float8_e4m3fn)
    pipe = runtime.without_torchax(
        small_pipelines.build, transformer=transformer, text_encoder=None, tokenizer=None
    )
    port(pipe)
    assert "transformer: CogVideoXTransformer3DModel stays on the host, since" in caplog.text
    assert 'load it unquantized: port(pipe, weights="int8") has a form in eight bits' in caplog.text
