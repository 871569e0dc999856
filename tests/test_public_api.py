"""The public names and their signatures, as the reference documents them: a change of one is a change here.

`python -m tests.test_public_api` prints the list as it is.
"""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.blocks import PAGES, blocks
from tests.test_architecture import PACKAGES

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
ENTRY = re.compile(r"^::: (\S+)\n((?: .*\n)*)", re.MULTILINE)
MEMBER = re.compile(r"^ {8}- (\w+)$", re.MULTILINE)

SIGNATURES = """\
cogvideox_torchax.port(model_or_pipeline: Portable, *, mesh: Mesh | None=None, parallel: Parallel | None=None) -> Portable
cogvideox_torchax.load_pipeline(pretrained_model_name_or_path: str | Path, *, pipeline_class: type | None=None, mesh: Mesh | None=None, parallel: Parallel | None=None, torch_dtype: torch.dtype=torch.bfloat16, variant: str | None=None, **diffusers_options: Any) -> Any
cogvideox_torchax.make_mesh(dp: int=1, tp: int | None=None, *, devices: Any=None) -> Mesh
cogvideox_torchax.save_video(frames: Any, path: str | Path, fps: Fraction | float) -> None
cogvideox_torchax.enable() -> None
cogvideox_torchax.AutoencoderKLCogVideoX()
cogvideox_torchax.AutoencoderKLCogVideoX.from_pretrained(cls, pretrained_model_name_or_path: str | Path, *, subfolder: str | None=None, variant: str | None=None, torch_dtype: torch.dtype | None=None, **diffusers_options: Any) -> 'AutoencoderKLCogVideoX'
cogvideox_torchax.AutoencoderKLCogVideoX.encode_stream(self, frames: torch.Tensor | Iterable[torch.Tensor], num_frames: int | None=None, *, fetch: Fetch=runtime.to_torch) -> Iterator[DiagonalGaussianDistribution]
cogvideox_torchax.AutoencoderKLCogVideoX.decode_stream(self, z: torch.Tensor | Iterable[torch.Tensor], num_frames: int | None=None, *, output_dtype: torch.dtype | None=None, fetch: Fetch=runtime.to_torch) -> Iterator[torch.Tensor]
cogvideox_torchax.AutoencoderKLCogVideoX.tiled_encode(self, x: torch.Tensor) -> torch.Tensor
cogvideox_torchax.AutoencoderKLCogVideoX.tiled_decode(self, z: torch.Tensor, return_dict: bool=True) -> DecoderOutput | tuple[torch.Tensor]
cogvideox_torchax.AutoencoderKLCogVideoX.place_on(self, mesh: Mesh) -> None
cogvideox_torchax.AutoencoderKLCogVideoX.spatial_compression_ratio(self) -> int
data.Clip(id: str, source: video.Source, caption: str = '', frames: int | None = None, height: int | None = None, width: int | None = None)
data.ClipConfig(model: str, backend: str = 'torchax', dtype: str = 'float32', frames: int | None = None, fps: str | None = None, windows: bool = False, height: int | None = None, width: int | None = None, crop: bool = False, min_size: int | None = None, buckets: tuple[Bucket, ...] = (), keep: str = POSTERIOR, seed: int = 0, tiling: str | None = None, dp: int | None = None, tp: int | None = None)
data.ClipConfig.fixed_settings(self, model_sha256: str) -> dict[str, Any]
data.ClipConfig.load(self) -> Any
data.Bucket(frames: int, height: int, width: int)
data.Bucket.parse(cls, text: str) -> 'Bucket'
data.EncodeClip()
data.EncodeClip.__call__(self, clip: Clip) -> Latents
data.EncodeClip.windows(self, clip: Clip) -> Iterator[Latents]
data.DecodeClip()
data.DecodeClip.__call__(self, latents: Latents) -> torch.Tensor
data.ClipError()
data.clips(path: str | Path) -> list[Clip]
data.pack(directory: str | Path, output: str | Path, kind: str, shard_size: int=64) -> tuple[int, int]
data.Framing(height: int, width: int, crop: bool = False, resized: tuple[int, int] | None = None)
data.Framing.enlargement(self, info: VideoInfo) -> float
data.read_frames(source: Source, size: Framing, frames: int | Sequence[int]) -> Iterator[torch.Tensor]
data.writing(path: str | Path, fps: Fraction | float, source: SourceTiming | None=None) -> Iterator[Sink]
data.VideoError()
data.Latents(tensor: torch.Tensor, config: dict[str, Any], model: str, fps: Fraction, num_frames: int, logvar: torch.Tensor | None = None, sample: torch.Tensor | None = None, about: dict[str, Any] = field(default_factory=dict))
data.Latents.tensors(self) -> dict[str, torch.Tensor]
data.Latents.fields(self) -> dict[str, Any]
data.Latents.metadata(self) -> dict[str, str]
data.Latents.check_model(self, config: dict[str, Any]) -> None
data.load(path: str | Path, clip_id: str | None=None) -> Latents
data.loads(data: bytes, name: str | Path) -> Latents
data.save(latents: Latents, path: str | Path) -> None
data.backend(name: str) -> type[Backend]
data.Backend()
data.Backend.load(cls, model: str, dtype: torch.dtype, mesh: 'Mesh | None'=None) -> 'Backend'
data.Backend.run(self, direction: Direction, x: torch.Tensor) -> torch.Tensor
data.Backend.chunks(self, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]
data.Backend.put(self, x: torch.Tensor) -> torch.Tensor
data.Backend.wait(self, chunk: torch.Tensor) -> torch.Tensor
data.Backend.to_torch(self, chunk: torch.Tensor) -> torch.Tensor
data.to_jax(tensor: torch.Tensor) -> torch.Tensor
data.to_torch(tensor: torch.Tensor) -> torch.Tensor
data.without_torchax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any
data.differentiated(function: Function, *tensors: torch.Tensor) -> torch.Tensor
data.decoded_length(latent_frames: int, doublings: int=2) -> int
data.temporal_steps(compression_ratio: float) -> int
data.from_uint8(pixels: Any, dtype: str) -> Any
data.to_uint8(frames: Any) -> Any
data.relative_error(got: torch.Tensor, reference: torch.Tensor) -> float
flax.FlaxAutoencoderKLCogVideoX()
flax.FlaxAutoencoderKLCogVideoX.from_pretrained(cls, name: str | Path, *, subfolder: str | None=None, variant: str | None=None, dtype: DTypeLike=jnp.float32, param_dtype: DTypeLike=jnp.float32, revision: str | None=None, token: str | bool | None=None, cache_dir: str | Path | None=None, local_files_only: bool=False) -> 'FlaxAutoencoderKLCogVideoX'
flax.FlaxAutoencoderKLCogVideoX.from_state_dict(cls, config: FlaxAutoencoderKLCogVideoXConfig | Mapping[str, Any], state_dict: dict[str, Any], **dtypes: Any) -> 'FlaxAutoencoderKLCogVideoX'
flax.FlaxAutoencoderKLCogVideoX.save_pretrained(self, directory: str | Path) -> None
flax.FlaxAutoencoderKLCogVideoX.encode(self, x: jax.Array) -> Posterior
flax.FlaxAutoencoderKLCogVideoX.decode(self, z: jax.Array) -> jax.Array
flax.FlaxAutoencoderKLCogVideoX.decode_frame_by_frame(self, z: jax.Array) -> jax.Array
flax.FlaxAutoencoderKLCogVideoX.encode_stream(self, x: jax.Array) -> Iterator[Posterior]
flax.FlaxAutoencoderKLCogVideoX.decode_stream(self, z: jax.Array, *, output_dtype: DTypeLike | None=None) -> Iterator[jax.Array]
flax.FlaxAutoencoderKLCogVideoX.place_on(self, mesh: jax.sharding.Mesh) -> None
flax.FlaxAutoencoderKLCogVideoX.cast(self, dtype: DTypeLike) -> None
flax.FlaxAutoencoderKLCogVideoX.enable_gradient_checkpointing(self) -> None
flax.FlaxAutoencoderKLCogVideoX.disable_gradient_checkpointing(self) -> None
flax.Posterior(mean: jax.Array, logvar: jax.Array)
flax.Posterior.from_moments(cls, moments: jax.Array) -> 'Posterior'
flax.Posterior.mode(self) -> jax.Array
flax.Posterior.sample(self, key: jax.Array) -> jax.Array
flax.TileSettings(latent_height: int, latent_width: int, overlap_height: float = 1 / 6, overlap_width: float = 1 / 5)
flax.TileSettings.plan(self, direction: Direction, size: tuple[int, ...], scale: int, *, always: bool=False) -> TilePlan | None
flax.FlaxAutoencoderKLCogVideoXConfig(in_channels: int = 3, out_channels: int = 3, down_block_types: tuple[str, ...] = (DOWN_BLOCK,) * 4, up_block_types: tuple[str, ...] = (UP_BLOCK,) * 4, block_out_channels: tuple[int, ...] = (128, 256, 256, 512), latent_channels: int = 16, layers_per_block: int = 3, act_fn: str = 'silu', norm_eps: float = 1e-06, norm_num_groups: int = 32, temporal_compression_ratio: float = 4, sample_height: int = 480, sample_width: int = 720, scaling_factor: float = 1.15258426, shift_factor: float | None = None, latents_mean: tuple[float, ...] | None = None, latents_std: tuple[float, ...] | None = None, force_upcast: float = True, use_quant_conv: bool = False, use_post_quant_conv: bool = False, invert_scale_latents: bool = False)
flax.FlaxAutoencoderKLCogVideoXConfig.from_dict(cls, config: Mapping[str, Any]) -> 'FlaxAutoencoderKLCogVideoXConfig'
flax.FlaxAutoencoderKLCogVideoXConfig.from_file(cls, directory: str | Path) -> 'FlaxAutoencoderKLCogVideoXConfig'
flax.FlaxAutoencoderKLCogVideoXConfig.to_dict(self) -> dict[str, Any]
flax.FlaxVAEForPipelines()
flax.FlaxVAEForPipelines.from_pretrained(cls, pretrained_model_name_or_path: str | Path, *, subfolder: str | None=None, variant: str | None=None, torch_dtype: torch.dtype | None=None, **hub_options: Any) -> 'FlaxVAEForPipelines'
flax.FlaxVAEForPipelines.from_diffusers(cls, vae: torch.nn.Module, torch_dtype: torch.dtype | None=None) -> 'FlaxVAEForPipelines'
flax.FlaxVAEForPipelines.place_on(self, mesh: jax.sharding.Mesh) -> None
flax.FlaxVAEForPipelines.to(self, *args: Any, **kwargs: Any) -> 'FlaxVAEForPipelines'
flax.FlaxVAEForPipelines.state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]
flax.FlaxVAEForPipelines.load_state_dict(self, state_dict: Mapping[str, Any], strict: bool=True, assign: bool=False) -> Any
jax_kernels.conv3d(x: Float[Array, 'N T H W I'], kernel: Float[Array, 'kt kh kw I O'], bias: Float[Array, ' O'] | None=None, cache: Float[Array, 'N kt-1 H W I'] | None=None, *, residual: Float[Array, 'N T H W O'] | None=None, start: Start='replicate', implementation: Implementation | None=None, split: Split=WHOLE) -> tuple[Float[Array, 'N T H W O'], Float[Array, 'N kt-1 H W I'] | None]
jax_kernels.group_norm(x: Float[Array, 'N *rest'], weight: Float[Array, ' C'] | None, bias: Float[Array, ' C'] | None, *, num_groups: int, eps: float=1e-06, channel_axis: int=1, activation: Activation | None=None, split: Split=WHOLE) -> Float[Array, 'N *rest']
jax_kernels.spatial_norm(x: Float[Array, 'N T H W C'], zq: Float[Array, 'N t h w Z'], weight: Float[Array, ' C'], bias: Float[Array, ' C'], kernel_y: Float[Array, 'Z C'], bias_y: Float[Array, ' C'], kernel_b: Float[Array, 'Z C'], bias_b: Float[Array, ' C'], *, num_groups: int, eps: float=1e-06, activation: Activation | None=None, first_frame_alone: bool=False, implementation: Implementation | None=None, split: Split=WHOLE) -> Float[Array, 'N T H W C']
jax_kernels.norm_conv3d(x: Float[Array, 'N T H W I'], norm: NormParams, kernel: Float[Array, 'kt kh kw I O'], bias: Float[Array, ' O'] | None=None, cache: Float[Array, 'N kt-1 H W I'] | None=None, moments: ColumnMoments | None=None, *, num_groups: int, eps: float=1e-06, first_frame_alone: bool=False, residual: Float[Array, 'N T H W O'] | None=None, split: Split=WHOLE) -> tuple[Float[Array, 'N T H W O'], Float[Array, 'N kt-1 H W I'] | None, ColumnMoments | None]
jax_kernels.NormParams(weight: Any, bias: Any, zq: Any = None, kernel_y: Any = None, bias_y: Any = None, kernel_b: Any = None, bias_b: Any = None)
jax_kernels.ColumnMoments(mean: Float[Array, 'N T W C'], m2: Float[Array, 'N T W C'])
jax_kernels.upsample(x: Float[Array, 'N T H W I'], kernel: Float[Array, 'kh kw I O'], bias: Float[Array, ' O'] | None, *, expand_time: bool, first_frame_alone: bool=False, split: Split=WHOLE) -> Float[Array, 'N T2 2*H 2*W O']
jax_kernels.downsample(x: Float[Array, 'N T H W I'], kernel: Float[Array, 'kh kw I O'], bias: Float[Array, ' O'] | None, *, compress_time: bool, first_frame_alone: bool=False, split: Split=WHOLE) -> Float[Array, 'N T2 H2 W2 O']
jax_kernels.attention(q: Float[Array, 'N S H D'], k: Float[Array, 'N K H D'], v: Float[Array, 'N K H D'], *, scale: float | None=None, num_keys: int | None=None, implementation: Implementation | None=None) -> Float[Array, 'N S H D']
jax_kernels.attention_transposed(q: Float[Array, 'N H D S'], k: Float[Array, 'N H D K'], v: Float[Array, 'N H D K'], *, scale: float | None=None, num_keys: int | None=None, implementation: Implementation | None=None) -> Float[Array, 'N H D S']
jax_kernels.qk_norm_rope(x: Float[Array, 'N S C'], weight: Float[Array, ' D'] | None=None, bias: Float[Array, ' D'] | None=None, cos: Float[Array, 'S D'] | None=None, sin: Float[Array, 'S D'] | None=None, *, heads: int, scale: float=1.0, eps: float=1e-06) -> Float[Array, 'N H D S']
jax_kernels.apply_rotary(x: Float[Array, 'N S H D'], cos: Float[Array, 'P D'], sin: Float[Array, 'P D']) -> Float[Array, 'N S H D']
jax_kernels.linear(x: Float[Array, '*batch I'], weight: Float[Array, 'O I'], bias: Float[Array, ' O'] | None=None, *, rounded_parts: bool=False) -> Float[Array, '*batch O']
jax_kernels.split_linear(x: Float[Array, 'S I'], weight: Float[Array, 'O I'], bias: Float[Array, ' O'] | None=None, *, parts: int) -> Float[Array, 'parts S O/parts']
jax_kernels.linear_gelu(x: Float[Array, 'N S I'], weight: Float[Array, 'O I'], bias: Float[Array, ' O'] | None=None) -> Float[Array, 'N S O']
jax_kernels.gated_linear(x: Float[Array, 'N S_or_I I_or_S'], weight: Float[Array, 'O I'], bias: Float[Array, ' O'] | None, residual: Float[Array, 'N S O'], gate: Float[Array, 'N 2 O'], first: Int[Array, ''] | int, *, transposed: bool=False) -> Float[Array, 'N S O']
jax_kernels.layer_norm(x: Float[Array, '*batch C'], weight: Float[Array, ' C'] | None, bias: Float[Array, ' C'] | None, eps: float=1e-05) -> Float[Array, '*batch C']
jax_kernels.adaptive_layer_norm(x: Float[Array, 'N S C'], weight: Float[Array, ' C'] | None, bias: Float[Array, ' C'] | None, scale: Float[Array, 'N 2 C'], shift: Float[Array, 'N 2 C'], first: Int[Array, ''] | int, eps: float=1e-05) -> Float[Array, 'N S C']
jax_kernels.gated_residual(x: Float[Array, 'N S C'], y: Float[Array, 'N S C'], gate: Float[Array, 'N 2 C'], first: Int[Array, ''] | int) -> Float[Array, 'N S C']
jax_kernels.silu(x: Float[Array, '*any'], *, time_axis: int | None=None) -> Float[Array, '*any']
jax_kernels.gelu(x: Float[Array, '*any']) -> Float[Array, '*any']
"""


def listed() -> str:
    """Return a line for each documented function, class, method and property."""
    lines = []
    for page in sorted(REFERENCE.glob("*.md")):
        for entry in ENTRY.finditer(page.read_text() + "\n"):
            module, _, name = entry[1].rpartition(".")
            value = getattr(importlib.import_module(module), name)
            lines += [f"{page.stem}.{line}\n" for line in signatures(value, MEMBER.findall(entry[2]))]
    return "".join(lines)


def signatures(value: Any, members: list[str]) -> Iterator[str]:
    """Yield the source's signature of a function, or of a class and its methods: those listed, or all."""
    if not inspect.isclass(value):
        yield signature(definition(value, value.__name__))
        return
    own = definition(value, value.__name__)
    methods = [node.name for node in own.body if isinstance(node, ast.FunctionDef)]
    fields = [node for node in own.body if isinstance(node, ast.AnnAssign)]
    yield f"{value.__name__}({', '.join(ast.unparse(field) for field in fields)})"
    for name in members or [name for name in methods if name == "__init__" or not name.startswith("_")]:
        owner = next(base for base in value.__mro__ if name in vars(base))
        found = next(
            node for node in definition(owner, owner.__name__).body if getattr(node, "name", "") == name
        )
        yield f"{value.__name__}.{signature(found)}"


def definition(value: Any, name: str) -> Any:
    """Return the node of a function or a class; of an overloaded function the last one."""
    tree = ast.parse(Path(inspect.getfile(inspect.unwrap(value))).read_text())
    return [node for node in tree.body if getattr(node, "name", None) == name][-1]


def signature(node: ast.FunctionDef) -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){result}"


def test_public_names_and_signatures_are_those_of_the_list():
    assert listed() == SIGNATURES


def sources() -> Iterator[tuple[str, str]]:
    """Yield the Python code that users read, by its place: examples, nodes, notebook, pages."""
    for path in (*(ROOT / "examples").glob("*.py"), *(ROOT / "comfyui").glob("*.py")):
        yield path.name, path.read_text()
    notebook = json.loads((ROOT / "examples" / "torchax_or_flax.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield "the notebook", "".join(cell["source"])
    for page in PAGES:
        yield from ((page, block.text) for block in blocks(page) if block.language == "python")


def imports(code: str) -> Iterator[str]:
    """Yield the names of this project that code imports, with their modules."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_public(name: str) -> bool:
    """Return whether the reference documents a name, or names of the module that it is."""
    entries = [
        entry[1] for page in REFERENCE.glob("*.md") for entry in ENTRY.finditer(page.read_text() + "\n")
    ]
    if any(entry.startswith(f"{name}.") for entry in entries):
        return True
    module, _, own = name.rpartition(".")
    value = getattr(importlib.import_module(module), own, None)  # a module that nothing has imported is none
    return any(
        entry.endswith(f".{own}") and getattr(importlib.import_module(entry.rpartition(".")[0]), own) is value
        for entry in entries
    )


def test_users_code_imports_public_names_alone():
    private = [
        f"{where}: {name}" for where, code in sources() for name in imports(code) if not is_public(name)
    ]
    assert private == []
    assert not is_public("cogvideox_torchax.vae.pixels._cast")
    assert not is_public("cogvideox_torchax.cli.common")


if __name__ == "__main__":
    print(listed(), end="")
