"""Public programs built on CogVideoX, small: the same call in PyTorch, ported, and over a mesh.

    PYTHONPATH=. python scripts/programs_of_others.py aether=~/Aether das=~/DiffusionAsShader consisid

Each program comes from a checkout that the caller has; nothing of it is in this repository. Its pipeline is
built again for each run from the same seeds, with random weights in float32: first for PyTorch, then for
`port` on one CPU device, and on a mesh of 2 x 4. The result is a Markdown table, and with `-o FILE` JSON, of
which `python -m benchmarks draw` draws the table in docs/pipelines.md. The programs need `einops` beside this
package's requirements.
"""

import argparse
import contextlib
import importlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import diffusers
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler
from torch import nn
from transformers import T5Config, T5EncoderModel

from benchmarks import draw
from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.files import reports
from cogvideox_torchax.versions import versions
from examples.small_pipeline import T5, tokenizer
from tests import reference, small_pipelines

HEIGHT, WIDTH, FRAMES, STEPS = 8, 16, 9, 3
TRANSFORMER = {
    **small_pipelines.TRANSFORMER,
    **{"use_rotary_positional_embeddings": True, "temporal_compression_ratio": 4},
    **{"sample_height": HEIGHT // 4, "sample_width": WIDTH // 4, "sample_frames": FRAMES},
}
Program = tuple[Any, dict[str, Any]]
"""A pipeline, and the arguments of its call."""


def imported(checkout: Path, name: str, *absent: str) -> ModuleType:
    """Import a checkout's module; packages that it imports and does not use for this call may be absent."""
    package = name.split(".")[0]
    for other in [key for key in sys.modules if key.split(".")[0] == package]:
        del sys.modules[other]  # another checkout's package of the same name
    sys.path.insert(0, str(checkout))
    missing = {key: ModuleType(key) for key in absent if key not in sys.modules}
    for key, module in missing.items():
        sys.modules[key] = module
        if "." in key:
            setattr(sys.modules[key.rpartition(".")[0]], key.rpartition(".")[2], module)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(checkout))
        for key in missing:
            del sys.modules[key]


def bare(name: str, folder: Path, **names: Any) -> None:
    """Put a package in place whose `__init__`, which imports every model of the program, does not run."""
    package = ModuleType(name)
    vars(package).update(__path__=[str(folder)], **names)
    sys.modules[name] = package


def drawn(module: nn.Module, seed: int = 0) -> Any:
    """Draw every weight: these programs leave some zero, and some as the memory was."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter.data, std=parameter[0].numel() ** -0.5)
    return reference.randomized(module).requires_grad_(False)


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(text_width: int = T5["d_model"]) -> dict[str, Any]:
    """Return the components that are the same in every program: all but the transformer."""
    torch.manual_seed(0)
    text = T5EncoderModel(T5Config(**{**T5, "d_model": text_width}, feed_forward_proj="gated-gelu")).eval()
    return {
        "tokenizer": tokenizer(),
        "text_encoder": text,
        "vae": reference.small_vae(layers_per_block=0, block_out_channels=(8, 8, 8)),
        "scheduler": small_pipelines.scheduler(CogVideoXDPMScheduler),
    }


def call(**others: Any) -> dict[str, Any]:
    """Return the arguments that most of the calls share."""
    shared = {"prompt": "a panda plays a guitar", "max_sequence_length": 16, "output_type": "np"}
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": STEPS}
    return {**shared, **size, **others}


def aether(checkout: Path) -> Program:
    """Build Aether: a subclass of the image pipeline. Where it fixes bfloat16, it is given float32."""
    module = imported(checkout, "aether.pipelines.aetherv1_pipeline_cogvideox")
    transformer = small_pipelines.transformer("5b", **{**TRANSFORMER, "in_channels": 96, "out_channels": 56})
    pipe = module.AetherV1PipelineCogVideoX(**parts(), transformer=transformer)
    pipe.empty_prompt_embeds = pipe.empty_prompt_embeds.float()
    prepare = pipe.preprocess_inputs
    pipe.preprocess_inputs = lambda **given: [x if x is None else x.float() for x in prepare(**given)]
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": 17, "num_inference_steps": STEPS}
    return pipe, {"image": small_pipelines.picture(), "fps": 12, **size}


def das(checkout: Path) -> Program:
    """Build Diffusion-as-Shader: a subclass of the transformer, with more blocks and one argument more."""
    module = imported(checkout, "models.cogvideox_tracking")
    transformer = drawn(module.CogVideoXTransformer3DModelTracking(num_tracking_blocks=1, **TRANSFORMER))
    pipe = module.CogVideoXPipelineTracking(**parts(), transformer=transformer)
    return pipe, call(tracking_maps=noise(1, 3, 16, HEIGHT // 4, WIDTH // 4))


def controlnet(checkout: Path) -> Program:
    """Build a ControlNet's pipeline. It gets prepared frames, since it sends its own to CUDA."""
    module = imported(checkout, "controlnet_pipeline", "torchvision", "torchvision.transforms")
    custom = imported(checkout, "cogvideo_transformer").CustomCogVideoXTransformer3DModel
    shape = ("num_attention_heads", "attention_head_dim", "time_embed_dim")
    sizes = {name: TRANSFORMER[name] for name in shape}
    control = module.CogVideoXControlnet(
        num_layers=1, downscale_coef=4, use_rotary_positional_embeddings=True, **sizes
    )
    transformer = drawn(custom(**{**TRANSFORMER, "text_embed_dim": 4096}))  # the network's own fixed width
    shared = parts(text_width=4096)
    pipe = module.ControlnetCogVideoXPipeline(**shared, transformer=transformer, controlnet=drawn(control))
    return pipe, call(controlnet_latents=noise(2, FRAMES, 3, HEIGHT, WIDTH), controlnet_weights=0.5)


def videox_fun(checkout: Path) -> Program:
    """Build VideoX-Fun: a transformer and a pipeline of its own, with the VAE of diffusers."""
    root = checkout / "videox_fun"
    bare("videox_fun", root)
    bare("videox_fun.dist", root / "dist")
    fuser = importlib.import_module("videox_fun.dist.fuser")
    bare("videox_fun.dist", root / "dist", **vars(fuser))
    bare("videox_fun.models", root / "models")
    kernels = {"_sparse_linear_attention": None, "get_block_map": None}  # of Triton, not used by CogVideoX
    bare("videox_fun.models.attention_kernel", root, **kernels)
    model = importlib.import_module("videox_fun.models.cogvideox_transformer3d").CogVideoXTransformer3DModel
    text = {"T5EncoderModel": T5EncoderModel, "T5Tokenizer": type(tokenizer())}
    names = {"AutoencoderKLCogVideoX": AutoencoderKLCogVideoX, "CogVideoXTransformer3DModel": model}
    bare("videox_fun.models", root / "models", **names, **text)
    bare("videox_fun.pipeline", root / "pipeline")
    pipeline = importlib.import_module("videox_fun.pipeline.pipeline_cogvideox_fun").CogVideoXFunPipeline
    return pipeline(**parts(), transformer=drawn(model(**TRANSFORMER))), call(
        output_type="pil"
    )  # which gives an array


def consisid(checkout: Path | None) -> Program:
    """Build ConsisID, of diffusers itself: a transformer that attends to features of a face."""
    from diffusers import ConsisIDTransformer3DModel
    from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # the other asks for OpenCV

    names = ("id_dim", "vit_dim", "depth", "dim_head", "num_heads", "num_id_token", "num_querie", "num_scale")
    face = {f"LFE_{name}": size for name, size in zip(names, (24, 16, 2, 8, 2, 2, 4, 2), strict=True)}
    heads = {"cross_attn_dim_head": 16, "cross_attn_num_heads": 2, "LFE_output_dim": 85}  # 128 / 3 * 2
    sizes = {**TRANSFORMER, "in_channels": 32, **face, **heads}
    transformer = drawn(ConsisIDTransformer3DModel(**sizes, is_train_face=True))
    pipe = ConsisIDPipeline(**parts(), transformer=transformer)
    seen = {"id_cond": noise(1, 24), "id_vit_hidden": [noise(1, 5, 16, seed=i) for i in range(2)]}
    return pipe, call(image=small_pipelines.picture(), **seen)


PROGRAMS: dict[str, tuple[str, Callable[..., Program]]] = {
    "aether": ("Aether: a subclass of the image pipeline", aether),
    "das": ("Diffusion-as-Shader: a subclass of the transformer", das),
    "controlnet": ("cogvideox-controlnet: a network beside the transformer", controlnet),
    "videox-fun": ("VideoX-Fun: a transformer of its own", videox_fun),
    "consisid": ("ConsisID: diffusers' own, with cross attention", consisid),
}


def frames(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """Call the pipeline, with noise of the same seed each time, and return its frames on the host."""
    result = pipe(**arguments, generator=torch.Generator().manual_seed(0))
    video = next(iter(result.values()))
    return torch.as_tensor(video.cpu() if isinstance(video, torch.Tensor) else video)


def measured(pipe: Any, arguments: dict[str, Any], expected: torch.Tensor, mesh: Any) -> dict[str, Any]:
    """Port the pipeline, call it twice, and return a row's figures, or the error as `failed`."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            port(pipe, mesh=mesh)
        start = time.perf_counter()
        frames(pipe, arguments)
        first = time.perf_counter() - start
        with reference.compilations() as compiled:
            start = time.perf_counter()
            got = frames(pipe, arguments)
            second = time.perf_counter() - start
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}", "said": said.getvalue()}
    off = ((got - expected).abs().max() / expected.abs().max()).item()
    networks = [(name, part) for name, part in pipe.components.items() if isinstance(part, nn.Module)]
    on_host = [name for name, part in networks if any(p.device.type == "cpu" for p in part.parameters())]
    about = {"said": said.getvalue().splitlines(), "left_on_host": on_host}
    return {**about, "error": off, "first_s": first, "second_s": second, "compiled": len(compiled)}


def commit_of(checkout: Path, name: str) -> str:
    """Return the commit of a checkout; of ConsisID the version of diffusers."""
    if name == "consisid":
        return f"diffusers {diffusers.__version__}"
    command = ("git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "programs", nargs="+", metavar="NAME=CHECKOUT", help=f"{', '.join(PROGRAMS)}; consisid alone"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the figures there as JSON")
    args = parser.parse_args()
    given = [program.partition("=")[::2] for program in args.programs]
    if unknown := [name for name, _ in given if name not in PROGRAMS]:
        parser.error(f"got {', '.join(unknown)}: the programs are {', '.join(PROGRAMS)}")
    rows = []
    for name, checkout in given:
        title, build = PROGRAMS[name]
        folder = Path(checkout).expanduser()
        expected = frames(*build(folder))
        for devices, mesh in (("one", None), ("2 x 4", make_mesh(2, 4))):
            row = {"program": title, "commit": commit_of(folder, name), "devices": devices}
            rows.append(row | measured(*build(folder), expected, mesh))
    document = {
        "format": draw.PROGRAMS,
        "versions": versions("torch", "torchax", "jax", "diffusers"),
        "rows": rows,
    }
    print(draw.programs(document))
    if args.output:
        reports.write_json(args.output, document)


if __name__ == "__main__":
    main()
