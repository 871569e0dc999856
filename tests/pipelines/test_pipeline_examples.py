"""Existing code of users: diffusers' own examples, torchax turned on by hand, LoRAs, saved pipelines."""

import copy
import importlib
import re
import textwrap

import diffusers.utils
import pytest
import torch
import torchax
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import relative_error
from tests import small_pipelines
from tests.pipelines.test_pipeline import latents, port_to
from tests.pipelines.test_unknown_networks import consisid, faces

pytestmark = pytest.mark.usefixtures("torchax_off")

EXAMPLES = {
    "text": "pipeline_cogvideox",
    "image": "pipeline_cogvideox_image2video",
    "video": "pipeline_cogvideox_video2video",
    "control": "pipeline_cogvideox_fun_control",
}
"""The module of each pipeline, which carries its example."""


def example(kind: str, model: str) -> str:
    """Return diffusers' own example, for a local model and few steps, with a line added: `port(pipe)`."""
    module = importlib.import_module(f"diffusers.pipelines.cogvideo.{EXAMPLES[kind]}")
    lines = [line.strip() for line in module.EXAMPLE_DOC_STRING.splitlines()]
    code = textwrap.dedent("\n".join(line[4:] for line in lines if line.startswith((">>>", "..."))))
    code = code.replace("num_inference_steps=50", "num_inference_steps=2")
    loading = re.compile(r'from_pretrained\(.*?torch_dtype(.*?)\)(?:\.to\("cuda"\))?', re.DOTALL)
    return loading.sub(rf"from_pretrained({model!r}, torch_dtype\1)\nport(pipe)", code, count=1)


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.slow_cases("image", "video", "control")
def test_diffusers_own_example_runs_with_one_line_added(kind, saved, monkeypatch):
    written = []
    clip = [small_pipelines.picture(i) for i in range(small_pipelines.FRAMES)]
    monkeypatch.setattr(diffusers.utils, "load_image", lambda url: small_pipelines.picture())
    monkeypatch.setattr(diffusers.utils, "load_video", lambda url: clip)
    monkeypatch.setattr(diffusers.utils, "export_to_video", lambda frames, path, fps: written.append(frames))
    code = example(kind, str(saved(kind)))
    assert code.count("port(pipe)") == 1
    exec(code, {"port": port})
    (frames,) = written
    wanted = 49 if kind == "image" else small_pipelines.FRAMES  # that call has a default of its own
    assert (len(frames), frames[0].size) == (wanted, (small_pipelines.WIDTH, small_pipelines.HEIGHT))


def loaded(saved, kind="text"):
    pipe = small_pipelines.CLASSES[kind].from_pretrained(saved(kind))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("when", ["before loading", "after loading", "after porting"])
@pytest.mark.slow_cases("after*")
def test_torchax_may_be_turned_on_by_the_user(saved, when):
    want = latents(loaded(saved))
    if when == "before loading":
        torchax.enable_globally()
    pipe = loaded(saved)
    assert {type(weight) for weight in pipe.transformer.parameters()} == {torch.nn.Parameter}
    if when == "after loading":
        torchax.enable_globally()
    port(pipe)
    if when == "after porting":
        torchax.enable_globally()
    assert relative_error(latents(pipe), want) < 1e-4


def test_weights_that_were_moved_and_untied_by_hand_are_tied_again_and_stay_so(saved):
    pipe = loaded(saved)
    torchax.enable_globally()
    torch.nn.Module.to(pipe.text_encoder, "jax")
    for move in (
        port,
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to("jax"),
        lambda pipe: port(pipe, mesh=make_mesh(1, 2)),
    ):
        encoder = move(pipe).text_encoder
        assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.fixture
def lora(saved, tmp_path):
    small_pipelines.save_lora(loaded(saved), tmp_path)
    return tmp_path


@pytest.mark.parametrize("placement", ["one device", "1x8", "2x4", "2x4 tensor"])
@pytest.mark.slow_cases(but=["2x4"])
@pytest.mark.product_cases("1x8")
def test_a_lora_loaded_before_porting_scaled_after_it_and_one_unloaded(saved, lora, placement):
    def scaled(pipe):
        """Return the results by the whole LoRA, by half of it, and by half of that half."""
        whole = latents(pipe)
        pipe.set_adapters(["drawn"], [0.5])
        return whole, latents(pipe), latents(pipe, attention_kwargs={"scale": 0.5})

    plain, stock, unloaded, ported = (loaded(saved) for _ in range(4))
    for pipe in (stock, unloaded, ported):
        pipe.load_lora_weights(lora, adapter_name="drawn")
    unloaded.unload_lora_weights()
    for pipe in (unloaded, ported):
        port_to(placement, pipe)
    want = [latents(plain), *scaled(stock)]
    assert min(relative_error(other, want[1]) for other in (want[0], want[2])) > 0.01
    for ours, theirs in zip([latents(unloaded), *scaled(ported)], want, strict=True):
        assert relative_error(ours, theirs) < 1e-4


@pytest.mark.parametrize(("network", "mesh"), [("known", None), ("known", (2, 4)), ("unknown", None)])
@pytest.mark.slow_cases("known-mesh1", "unknown-*")
def test_a_lora_loaded_merged_and_unloaded_after_porting(saved, network, mesh, tmp_path):
    def run(pipe):
        return latents(pipe) if network == "known" else latents(pipe, "image", **faces())

    stock, ported = (loaded(saved) if network == "known" else consisid() for _ in range(2))
    small_pipelines.save_lora(copy.deepcopy(stock), tmp_path)
    port(ported, mesh=make_mesh(*mesh) if mesh else None)
    wanted = [run(stock)]
    assert relative_error(run(ported), wanted[0]) < 1e-4
    for change in (
        lambda pipe: pipe.load_lora_weights(tmp_path, adapter_name="drawn"),
        lambda pipe: pipe.fuse_lora(lora_scale=0.5),
        lambda pipe: pipe.unfuse_lora(),
        lambda pipe: pipe.unload_lora_weights(),
    ):
        change(stock)
        change(ported)
        wanted.append(run(stock))
        assert relative_error(run(ported), wanted[-1]) < 1e-4
    assert min(relative_error(wanted[i], wanted[i + 1]) for i in range(2)) > 0.01
    assert all(runtime.on_jax(weight) for weight in ported.transformer.parameters())
    assert ported.transformer.mesh == (make_mesh(*mesh) if mesh else None)


def test_a_lora_that_does_not_fit_is_refused_and_leaves_the_pipeline_as_it_was(saved, lora):
    ported, file = port(loaded(saved)), lora / "pytorch_lora_weights.safetensors"
    want = latents(ported)
    save_file({name: torch.cat([value, value], dim=1) for name, value in load_file(file).items()}, file)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ported.load_lora_weights(lora)
    assert all(runtime.on_jax(weight) for weight in ported.transformer.parameters())
    ported.unload_lora_weights()
    assert torch.equal(latents(ported), want)


@pytest.mark.parametrize("network", ["known", "unknown"])
def test_an_adapter_of_the_transformer_alone_is_added_and_saved_after_porting(saved, network, tmp_path):
    pipe, other = (loaded(saved) if network == "known" else consisid() for _ in range(2))
    transformer, name = port(pipe).transformer, "pytorch_lora_weights.safetensors"
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "added")
    assert all(runtime.on_jax(weight) for weight in transformer.parameters())
    transformer.save_lora_adapter(tmp_path, adapter_name="added")
    other.transformer.load_lora_adapter(tmp_path, prefix=None, weight_name=name)
    added, read = (
        [runtime.to_torch(value) for name, value in model.named_parameters() if "lora_" in name]
        for model in (transformer, other.transformer)
    )
    assert added
    assert all(torch.equal(*pair) for pair in zip(added, read, strict=True))
