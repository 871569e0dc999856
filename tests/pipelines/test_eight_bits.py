"""Weights in eight bits stay so on the device, and give what PyTorch gives with rounded weights."""

import pickle
import re

import diffusers
import gguf
import jax
import numpy as np
import pytest
import torch
import torchax
import transformers
from diffusers.models import ModelMixin, attention_processor, model_loading_utils
from diffusers.quantizers.gguf.utils import dequantize_functions
from torch.nn import functional as F
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from cogvideox_torchax import load_pipeline, make_mesh, port, runtime, upstream
from cogvideox_torchax.files.models import ModelError
from cogvideox_torchax.pipelines import layers, sharding
from cogvideox_torchax.runtime.trees import change_in
from cogvideox_torchax.vae.tolerances import rms_error
from tests import small_pipelines
from tests.pipelines.test_blocks import SPLITS, step
from tests.pipelines.test_changes import pipeline_of, planned, stock, with_lora
from tests.reference import largest_error

pytestmark = pytest.mark.usefixtures("torchax_off")


def matrices(model):
    """Return the names of a stock model's matrices that `port` makes int8."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(sharding.weight_spec(f"{name}.weight"))
    }


def in_int8(x):
    """Round a tensor to 255 values a row."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def rounded(model, weights="int8"):
    """Round a stock model's matrices in place, and with "int8-dynamic" what is multiplied by most of them."""
    for name in matrices(model):
        model.get_parameter(name).data.copy_(in_int8(model.get_parameter(name).data))
        if weights == "int8-dynamic" and re.search(r"\.(to_[qkv]|net\.0\.proj|net\.2)\.", name):
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(
                lambda _layer, inputs: in_int8(*inputs)
            )
    return model


def error_of(weights, got, want):
    """Return the error of a step, but for its largest tenth in "int8-dynamic", relative to the largest value.

    A number half-way between two integers may be rounded to either, which a change of 1e-7 decides. Its token
    then differs by up to 1e-3, and others by far less. A layer that rounds no tokens changes most of them.
    """
    share = 0.9 if weights == "int8-dynamic" else 1.0
    return torch.quantile((got - want).abs() / want.abs().max(), share).item()


def ported(transformer=None, text_encoder=None, weights="int8", **options):
    parts = {"transformer": transformer or stock(), "text_encoder": text_encoder}
    return port(pipeline_of(**parts), weights=weights, **options)


@pytest.mark.parametrize("version", ["5b", "1.5"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("weights", ["int8", "int8-dynamic"])
@pytest.mark.slow_cases(
    but=["int8-one device-5b", "int8-2x4 context, weights gathered-5b", "int8*-1x8 tensor-5b"]
)
def test_a_step_in_int8_is_that_of_the_rounded_weights(weights, split, version):
    mesh, kind, memory = SPLITS[split]
    model = ported(stock(version), weights=weights, mesh=mesh and make_mesh(*mesh), parallel=kind).transformer
    if memory:
        model.place_on(model.mesh, kind, memory)
        model.place()
    want = rounded(stock(version), weights)
    assert error_of(weights, step(model), step(want)) < 1e-4
    assert (of_dtype(model, torch.int8), change_in(model)) == (matrices(want), None)
    if split == "one device":
        program = planned(model)
        kernels = "qk_norm_rope", "adaptive_layer_norm", "gated_linear", "linear_gelu", "split_linear"
        assert [word for word in (*kernels, "xi8>") if word not in program] == []
        sums_of_int8 = re.search(r"dot_general.*xi8>, tensor<\S+xi8>\) -> tensor<\S+xi32>", program)
        assert (sums_of_int8 is not None) == (weights == "int8-dynamic")


def test_the_files_weights_become_int8_while_they_are_loaded(saved):
    options = {"weights": "int8-dynamic", "mesh": make_mesh(1, 2), "parallel": "tensor"}
    loaded = load_pipeline(saved(), dtype=torch.bfloat16, **options)
    wanted = port(small_pipelines.one_layer().to(torch.bfloat16), **options)
    assert any(getattr(layer, "dynamic", False) for layer in loaded.transformer.modules())
    for part in ("transformer", "text_encoder"):
        got, want = (getattr(each, part).state_dict() for each in (loaded, wanted))
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert torch.equal(runtime.to_torch(got[name]), runtime.to_torch(weight)), name
            one, other = (runtime.array_of(each).sharding for each in (got[name], weight))
            assert one.is_equivalent_to(other, weight.ndim), name


def test_what_is_read_of_int8_has_the_dtype_that_transformers_gives_it(saved):
    pipe = diffusers.CogVideoXPipeline.from_pretrained(saved(), dtype=torch.float16)
    dtypes = {n: m.weight.dtype for n, m in pipe.text_encoder.named_modules() if type(m) is torch.nn.Linear}
    assert {*dtypes.values()} == {torch.float16, torch.float32}
    for ported in (port(pipe, weights="int8"), load_pipeline(saved(), dtype=torch.float16, weights="int8")):
        assert {name: ported.text_encoder.get_submodule(name).weight.dtype for name in dtypes} == dtypes


@pytest.mark.parametrize("weights", ["int8", "int8-dynamic"])
@pytest.mark.slow_cases("int8")
def test_a_model_in_int8_moves_casts_and_takes_a_lora_with_its_scales_exact(weights):
    model = ported(weights=weights).transformer
    scales = {name: runtime.to_torch(scale) for name, scale in model.named_buffers() if "scale" in name}
    result = step(model)
    assert error_of(weights, step(model.to("cpu")), result) < 1e-5
    assert largest_error(step(model.to("jax")), result) == 0
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
    assert all(torch.equal(runtime.to_torch(model.get_buffer(name)), scales[name]) for name in scales)
    model, wanted = ported(weights=weights).transformer, rounded(stock(), weights)
    with_lora("to_q", "to_v")(model)
    model.place()
    with_lora("to_q", "to_v")(wanted)
    assert change_in(model) is None
    assert error_of(weights, step(model), step(wanted)) < 1e-4


@torch.enable_grad()
def test_in_pytorch_the_gradient_of_rounded_tokens_is_that_of_whole_ones():
    layer, x = layers.Linear(8, 4), torch.linspace(-1, 3, 16).reshape(2, 8).requires_grad_()
    layer.hold(torch.arange(32, dtype=torch.int8).reshape(4, 8), torch.full((4,), 0.1), torch.float32)
    whole = layer(x)
    layer.dynamic = True
    rounded = layer(x)
    assert not torch.equal(rounded, whole)
    assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in (rounded, whole)))


def test_bfloat16s_error_of_a_step_grows_by_a_tenth_at_most_in_int8():
    exact, in_bfloat16 = step(stock()), stock().to(torch.bfloat16)
    limit = 1.1 * rms_error(step(in_bfloat16), exact)
    pipe, forms = ported(in_bfloat16), ("int8", "int8-dynamic", "int8")
    int8, dynamic, again = (step(port(pipe, weights=form).transformer) for form in forms)
    assert not torch.equal(dynamic, int8)
    assert max(rms_error(result, exact) for result in (int8, dynamic)) < limit
    assert torch.equal(again, int8)


REFUSED = {
    "saving": (
        lambda pipe, path: pipe.transformer.save_pretrained(path),
        "got weights in int8",
    ),
    "fusing projections": (lambda pipe, path: pipe.transformer.fuse_qkv_projections(), "fuse_qkv_.* in int8"),
    "fusing a LoRA": (lambda pipe, path: pipe.fuse_lora(), "fuse_lora got weights in int8"),
    "another form": (
        lambda pipe, path: port(pipe, weights="int4"),
        "weights='int4': it takes 'int8', 'int8-dynamic', or None",
    ),
    "a VAE": (lambda pipe, path: port(pipe.vae, weights="int8"), "weights='int8' for a AutoencoderKLCog"),
    "no network": (
        lambda pipe, path: port(pipeline_of(), weights="int8"),
        "which has neither of the networks",
    ),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_int8_cannot_do_is_refused_in_one_line(tmp_path, call, words):
    with pytest.raises(ValueError, match=rf"\A.*{words}.*\Z"):
        call(ported(), tmp_path)
    assert not [*tmp_path.iterdir()]


def from_gguf(model, tmp_path):
    """Return a transformer as diffusers loads it from a file in GGUF, with matrices of several formats."""
    file, formats = tmp_path / "model.gguf", gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, "cogvideox")
    for name, weight in model.state_dict().items():
        in_float = weight.ndim != 2 or weight.shape[1] % 32
        form = formats.F32 if in_float else formats.Q8_0 if "attn1" in name else formats.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The steps of diffusers' `from_single_file`, which does not list this class.
    state = model_loading_utils.load_gguf_checkpoint(file)
    quantizer = diffusers.quantizers.DiffusersAutoQuantizer.from_config(
        diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    )
    quantizer.preprocess_model(model, device_map=None, state_dict=state, keep_in_fp32_modules=[])
    model_loading_utils.load_model_dict_into_meta(
        model, state, hf_quantizer=quantizer, dtype=torch.float32, device_map={"": "cpu"}
    )
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    return model


def by_torchao(config):
    def load(model, tmp_path):
        model.save_pretrained(tmp_path)
        library = diffusers if isinstance(model, ModelMixin) else transformers
        return type(model).from_pretrained(
            tmp_path,
            quantization_config=library.TorchAoConfig(config()),
            **{upstream.dtype_option(): torch.float32},
        )

    return load


def cast(model, tmp_path):
    if isinstance(model, ModelMixin):
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    else:  # with "wo" cast too, transformers casts that layer's input to float8
        diffusers.hooks.apply_layerwise_casting(
            model, torch.float8_e4m3fn, torch.float32, ("layer_norm", "wo")
        )
    return model


FORMS = {
    "GGUF": (from_gguf, torch.uint8),
    "torchao int8": (by_torchao(Int8WeightOnlyConfig), torch.int8),
    "torchao float8": (by_torchao(Float8WeightOnlyConfig), torch.float8_e4m3fn),
    "layerwise casting": (cast, torch.float8_e4m3fn),
}


def loaded(form, part, tmp_path):
    model = stock() if part == "transformer" else small_pipelines.text_encoder(num_layers=1)
    return FORMS[form][0](model, tmp_path).eval() if form in FORMS else model


def in_form(form, tmp_path, part="transformer"):
    """Return a network in a form, ported, and the one in PyTorch that it has to compute the same as."""
    model, want = (loaded(form, part, tmp_path) for _ in range(2))
    if form in FORMS:
        return getattr(port(pipeline_of(**{part: model})), part), want
    return getattr(ported(**{part: model}, weights=form), part), rounded(want, form)


class ByWeights(attention_processor.CogVideoXAttnProcessor2_0):
    """Attention that multiplies by a layer's weight itself, as some public processors do."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None
    ):
        given = hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        return tuple(x + F.linear(x, attn.to_q.weight) for x in super().__call__(attn, *given))


def reading_weights(model):
    model.transformer_blocks[0].attn1.processor = ByWeights()


def with_dora(model):
    with_lora("to_q", "to_v", alpha=8, use_dora=True)(model)
    for name, magnitudes in model.named_parameters():
        if "lora_magnitude_vector" in name:
            torch.nn.init.constant_(magnitudes, 2.0)


HELD = "int8", "int8-dynamic", "torchao int8", "torchao float8"


@pytest.mark.parametrize("read", [reading_weights, with_dora])
@pytest.mark.parametrize("form", HELD)
@pytest.mark.slow_cases(but=["int8-reading*", "torchao float8-with_dora"])
def test_who_reads_a_weight_sees_the_values_that_its_bits_stand_for(form, read, tmp_path):
    model, want = in_form(form, tmp_path)
    without = step(model)
    for each in (model, want):
        read(each)
    model.place()
    want = step(want)
    assert largest_error(without, want) > 1e-2
    assert error_of(form, step(model), want) < 1e-4


@pytest.mark.parametrize("device", ["jax", "cpu"])
@pytest.mark.parametrize("form", [*HELD, "GGUF"])
@pytest.mark.slow_cases("int8-dynamic*", "torchao int8*")
def test_a_write_into_values_that_are_written_out_is_refused(form, device, tmp_path):
    model = in_form(form, tmp_path)[0].to(device)
    with_lora("to_q", "to_v")(model)
    lora = model.transformer_blocks[0].attn1.to_q
    layer, values = lora.base_layer, lora.base_layer.weight
    assert values.dtype == torch.float32
    for write in (
        lora.merge,
        lambda: lora.merge(safe_merge=True),
        lambda: values.add_(1),
        lambda: values.data.copy_(values),
        lambda: torch.nn.init.zeros_(values),
    ):
        with pytest.raises(ValueError, match="got a write into values that are written out of bits"):
            write()
    x = torch.ones(1, layer.in_features, device=device)
    result = layer(x)
    assert largest_error(result, F.linear(x, values, layer.bias)) < 1e-5
    assert largest_error(pickle.loads(pickle.dumps(values)), runtime.to_torch(values)) == 0
    layer.weight = torch.nn.Parameter(2 * layer.weight)
    assert largest_error(layer(x) - layer.bias, 2 * (result - layer.bias)) < 1e-5


def in_bits(model):
    """Return the names of linear layers' weights that are no plain floats of more than eight bits."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and (type(module.weight) is not torch.nn.Parameter or module.weight.dtype.itemsize == 1)
    }


def of_dtype(model, dtype):
    return {name for name, weight in model.named_parameters() if weight.dtype == dtype}


@pytest.mark.parametrize("form", FORMS)
def test_a_step_with_the_bits_of_another_library_is_that_of_its_model(form, tmp_path):
    model, dtype = loaded(form, "transformer", tmp_path), FORMS[form][1]
    names, want = in_bits(model), step(model)
    assert largest_error(step(stock()), want) > 1e-3
    pipe = port(pipeline_of(transformer=model))
    model = pipe.transformer
    assert largest_error(step(model), want) < 1e-4
    assert of_dtype(model, dtype) == names != set()
    assert change_in(model) is None
    bits = {name: runtime.to_torch(model.state_dict()[name]) for name in names}
    pipe.enable_model_cpu_offload()
    arrays = map(runtime.array_of, runtime.named_tensors(model).values())  # the scales are buffers
    assert {*map(runtime.is_in_host_memory, arrays)} == {True}
    assert largest_error(step(model), want) < 1e-4
    for refused in (lambda: model.save_pretrained(tmp_path / "saved"), model.fuse_qkv_projections):
        with pytest.raises(ValueError, match=f"got weights in {runtime.dtype_name(dtype)}, which"):
            refused()
    assert largest_error(step(model.to("cpu")), want) < 1e-5
    if form == "layerwise casting":  # diffusers casts no other quantized model
        assert step(model.to(torch.bfloat16)).dtype == model.dtype == torch.bfloat16
    port(pipe, weights="int8-dynamic")
    assert all(torch.equal(runtime.to_torch(model.state_dict()[name]), bits[name]) for name in names)
    assert any(getattr(layer, "dynamic", False) for layer in model.modules()) == (form == "torchao int8")


@pytest.mark.parametrize("form", [*HELD, "layerwise casting"])
def test_a_prompt_in_few_bits_is_that_of_its_model(form, tmp_path):
    ids, (model, want) = torch.tensor([[3, 4, 5, 1]]), in_form(form, tmp_path, "text_encoder")
    names = in_bits(want) if form in FORMS else matrices(want)
    assert largest_error(runtime.to_torch(model(runtime.to_jax(ids))[0]), want(ids)[0]) < 1e-4
    assert of_dtype(model, FORMS[form][1] if form in FORMS else torch.int8) == names != set()
    assert change_in(model) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind"),
    [*((form, "tensor") for form in FORMS), ("GGUF", "context"), ("torchao int8", "context")],
)
def test_the_bits_of_another_library_are_split_over_a_mesh_and_take_a_lora(form, kind, tmp_path):
    model, mesh = stock(), make_mesh(2, 2)
    steps = [FORMS[form][0], lambda model, _path: with_lora("to_q", "to_out.0")(model) or model]
    # PEFT gives a LoRA the dtype of its layer, which PyTorch cannot multiply in float8.
    for change in reversed(steps) if form == "layerwise casting" else steps:
        model = change(model, tmp_path)
    want = step(model)
    model = port(pipeline_of(transformer=model), mesh=mesh, parallel=kind).transformer
    if kind == "context":  # with weights that are gathered
        model.place_on(mesh, "context", 1.0)
        model.place()
    assert largest_error(step(model), want) < 1e-4
    bits = model.transformer_blocks[0].ff.net[2]._parameters["weight"]
    assert not runtime.array_of(bits).is_fully_replicated
    assert change_in(model) is None


def by_config(config):
    model = stock()
    quantize_(model, config, lambda module, name: name.endswith("0.attn1.to_q"))
    return model


WITHOUT_FORM = {
    "activations": (lambda: by_config(Int8DynamicActivationInt8WeightConfig()), "a Int8Tensor of float32"),
    "blocks": (lambda: by_config(Int8WeightOnlyConfig(granularity=PerGroup(32))), "a Int8Tensor of float32"),
    "another library": (lambda: by_config(IntxWeightOnlyConfig()), "a IntxUnpackedToInt8Tensor of float32"),
    "no layer": (lambda: stock().to(torch.float8_e4m3fn), "a Parameter of float8_e4m3fn"),
}


@pytest.mark.parametrize(("make", "kind"), WITHOUT_FORM.values(), ids=WITHOUT_FORM)
def test_weights_without_a_form_are_named_with_the_forms_that_there_are(make, kind):
    pipe = pipeline_of(transformer=make())
    words = rf"^transformer\.\S+\.weight, {kind}, has no form on JAX: those .*Int8Weight.*GGUF.*layerwise.*\Z"
    with pytest.raises(ValueError, match=words):
        port(pipe)
    assert not runtime.is_on_jax(pipe.vae)


@pytest.mark.parametrize("form", dequantize_functions, ids=lambda form: form.name)
@pytest.mark.slow_cases(but=["Q4_K"])
def test_each_format_of_gguf_is_decoded_as_in_pytorch(form):
    block_size, bytes_of_block = gguf.GGML_QUANT_SIZES[form]
    shape = (3, 512 // block_size * bytes_of_block)
    data = torch.randint(64, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    want = upstream.from_gguf(data, form)
    assert want.shape == (3, 512)
    decode = torchax.interop.jax_view(lambda data: upstream.from_gguf(data, form))
    got = runtime.plain_tensor(np.array(jax.jit(decode)(data.numpy())))
    if form.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
        # Their blocks have a minimum. Some processors add it to the product without rounding that to float16.
        difference, blocks = ((each.float().reshape(-1, 32)).abs() for each in (got - want, want))
        assert (difference <= 2**-10 * blocks.amax(1, keepdim=True)).all()
        assert (difference == 0).float().mean() > 0.5
    else:
        assert torch.equal(got, want)


def test_files_in_eight_bits_are_refused_by_their_name(tmp_path):
    pipeline_of(transformer=loaded("layerwise casting", "transformer", tmp_path)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="safetensors has weights in F8_E4M3: load the model by its own"):
        load_pipeline(tmp_path)
