"""FlaxVAEForPipelines: the Flax build behind diffusers' PyTorch interface.

Axis letters: N videos, C channels, T frames, H rows, W columns. Tensors are NCTHW, as diffusers has them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from flax import nnx

from cogvideox_torchax import runtime
from cogvideox_torchax.vae import tiling
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX
from cogvideox_torchax.vae.torchax.networks import frames_of_chunks


@jax.jit
def _channels_last(x_NCTHW: jax.Array) -> jax.Array:
    return jnp.transpose(x_NCTHW, (0, 2, 3, 4, 1))


@jax.jit
def _channels_first(x_NTHWC: jax.Array) -> jax.Array:
    return jnp.transpose(x_NTHWC, (0, 4, 1, 2, 3))


class FlaxVAEForPipelines(AutoencoderKLCogVideoX):
    """The Flax build where diffusers expects its own class: `pipe.vae = FlaxVAEForPipelines(flax_vae)`.

    Plain torch tensors give plain torch tensors, torchax tensors give torchax tensors; everything that
    diffusers' class promises holds (`encode(...).latent_dist`, `decode(...).sample`, `config`, tiling,
    slicing), and so do the streams of `cogvideox_torchax.AutoencoderKLCogVideoX`. The weights are the Flax
    model's: this module has no torch parameters, and `.to(...)` moves nothing.

    Args:
        flax_vae: the model to run.

    Attributes:
        flax_vae: the same.
    """

    def __init__(self, flax_vae: FlaxAutoencoderKLCogVideoX):
        # The torch networks are built without memory, for the attributes around them, and dropped.
        runtime.without_torchax(self._build_on_meta, flax_vae.config.to_dict())
        self.encoder = self.decoder = self.quant_conv = self.post_quant_conv = None
        del vars(self)["__module__"]  # diffusers has no class of this name
        self.flax_vae = flax_vae
        self.eval()

    def _build_on_meta(self, config: dict[str, Any]) -> None:
        with torch.device("meta"):
            super().__init__(**config)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        torch_dtype: torch.dtype | None = None,
        **hub_options: Any,
    ) -> "FlaxVAEForPipelines":
        """Loads diffusers' weights from a directory or from the hub.

        Args:
            pretrained_model_name_or_path: a local directory or a hub id.
            subfolder: where the VAE lies in it, "vae" for a whole pipeline.
            variant: of the weight files, such as "fp16".
            torch_dtype: to store and to compute in; float32 where None.
            hub_options: `revision`, `token`, `cache_dir`, `local_files_only`.

        Raises:
            ModelError: a `ValueError` that says what is missing or wrong, and what to do.
        """
        dtype = runtime.jax_dtype(torch_dtype or torch.float32)
        return cls(
            FlaxAutoencoderKLCogVideoX.from_pretrained(
                pretrained_model_name_or_path,
                subfolder=subfolder,
                variant=variant,
                dtype=dtype,
                param_dtype=dtype,
                **hub_options,
            )
        )

    @classmethod
    def from_diffusers(
        cls, vae: torch.nn.Module, torch_dtype: torch.dtype | None = None
    ) -> "FlaxVAEForPipelines":
        """From a loaded diffusers VAE, whose weights are copied; `torch_dtype` is its own where None."""
        native: Any = vae
        dtype = runtime.jax_dtype(torch_dtype or native.dtype)
        state_dict = {name: runtime.to_torch(tensor) for name, tensor in native.state_dict().items()}
        return cls(
            FlaxAutoencoderKLCogVideoX.from_state_dict(
                dict(native.config), state_dict, dtype=dtype, param_dtype=dtype
            )
        )

    def layer_recorder(
        self, kind: str, wanted: Callable[[str], Any]
    ) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
        """A pass over a video that gives each chunk's layers as plain tensors; see `LayerRecorder`."""
        from cogvideox_torchax.vae.nnx.recording import LayerRecorder

        record = LayerRecorder(self.flax_vae, kind, wanted)

        def run(chunk: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = record(_channels_last(runtime.array_of(runtime.to_jax(chunk))))
            return {
                name: runtime.to_torch(runtime.tensor_of(_channels_first(output)))
                for name, output in outputs.items()
            }

        return run

    def save_pretrained(self, save_directory: str | Path, **diffusers_options: Any) -> None:  # pyright: ignore
        """Writes diffusers' format in one safetensors file; diffusers' options have no effect."""
        self.flax_vae.save_pretrained(save_directory)

    # What torch modules and diffusers' models have besides; the weights are the Flax model's.

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # pyright: ignore
        """The weights by diffusers' names, as plain tensors of their own."""
        if args or kwargs:
            raise ValueError("state_dict of the Flax build takes no options: it gives every weight, by name")
        held = weights.state_dict(nnx.state(self.flax_vae, nnx.Param))
        return {name: runtime.plain_tensor(np.array(value)) for name, value in held.items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes the weights of a torch state dict over, all or none; `assign` has no meaning here.

        Raises:
            ModelError: a tensor that is missing, left over or of another shape, by name.
            ValueError: not `strict`.
        """
        if not strict:
            raise ValueError("load_state_dict of the Flax build is strict: give every weight, and no other")
        plain = {name: runtime.to_torch(tensor) for name, tensor in state_dict.items()}
        self.flax_vae.load_tensors(weights.from_torch(plain))
        return super().load_state_dict({})  # torch's word that all is there

    def to(self, *args: Any, **kwargs: Any) -> "FlaxVAEForPipelines":
        """Casts the weights to a dtype. The model stays on JAX's devices: moving it to "jax", "cuda" or "cpu"
        does nothing.

        Raises:
            ValueError: a dtype that JAX does not compute in by default.
        """
        _, dtype = runtime.device_and_dtype(args, kwargs)
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"got {dtype}: the Flax build takes float32, bfloat16 or float16")
        if dtype is not None:
            self.flax_vae.cast(runtime.jax_dtype(dtype))
        return self

    def half(self) -> "FlaxVAEForPipelines":
        """As `to(torch.float16)`."""
        return self.to(torch.float16)

    def bfloat16(self) -> "FlaxVAEForPipelines":
        """As `to(torch.bfloat16)`."""
        return self.to(torch.bfloat16)

    def float(self) -> "FlaxVAEForPipelines":
        """As `to(torch.float32)`."""
        return self.to(torch.float32)

    def double(self) -> "FlaxVAEForPipelines":
        """As `to(torch.float64)`: refused."""
        return self.to(torch.float64)

    def type(self, dst_type: torch.dtype) -> "FlaxVAEForPipelines":  # pyright: ignore
        """As `to(dst_type)`."""
        return self.to(dst_type)

    def requires_grad_(self, requires_grad: bool = True) -> "FlaxVAEForPipelines":
        """Nothing requires a gradient here.

        Raises:
            ValueError: asked for one.
        """
        if requires_grad:
            self.enable_gradient_checkpointing()
        return self

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the weights are."""
        return sum(weight.size for weight in jax.tree.leaves(nnx.state(self.flax_vae, nnx.Param)))

    def compile_last_chunk(self, shape: tuple[int, ...], *, kind: str = "decode") -> Any:
        """Refused: the Flax build names no layers for a report to tell apart.

        Raises:
            ValueError: always.
        """
        raise ValueError("a report tells the layers of the torchax build apart: port diffusers' model for it")

    def enable_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the wrapper passes no gradients on.

        Raises:
            ValueError: always.
        """
        raise ValueError("the wrapper passes no gradients on: take them of `flax_vae` with jax.grad")

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in, and what it takes and gives."""
        return getattr(torch, self.flax_vae.dtype.name)

    @property
    def device(self) -> torch.device:
        """Where plain tensors go in and come out: the host. The model itself runs on JAX's devices."""
        return torch.device("cpu")

    @property
    def mesh(self) -> Any:
        """The mesh that the Flax model runs on; None for one device."""
        return self.flax_vae.mesh

    def place_on(self, mesh: Any) -> None:
        """As `FlaxAutoencoderKLCogVideoX.place_on`; `port(vae, mesh=mesh)` calls it."""
        self.flax_vae.place_on(mesh)

    # Running chunks; the checks, the plans and the streams are inherited.

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        self._check_video(x)
        return _together(self._run_chunks("encode", frames_of_chunks(self, "encode", x), x.shape[3:]), x)

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        self._check_latents(z)
        pieces = frames_of_chunks(self, "decode", z)
        frames = _together(self._run_chunks("decode", pieces, z.shape[3:]), z)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def _tiled(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        plan = self._tiles.plan(kind, x.shape[3:], self.spatial_scale)
        return _together(self._run_tiles(kind, frames_of_chunks(self, kind, x), plan), x)

    def _run(self, kind: str) -> Any:
        return self._on_arrays(kind, None)

    def _run_tiles(
        self, kind: str, pieces: Iterable[torch.Tensor], plan: tiling.TilePlan
    ) -> Iterator[torch.Tensor]:
        return map(self._on_arrays(kind, plan), pieces)

    def _on_arrays(self, kind: Any, plan: tiling.TilePlan | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """The Flax model's run over a video: torch tensors in, torchax tensors being computed out."""
        run = self.flax_vae.run(kind, plan)

        def call(piece: torch.Tensor) -> torch.Tensor:
            if runtime.on_jax(piece):
                chunk = _channels_last(runtime.array_of(piece))
            else:
                chunk = np.moveaxis(runtime.host_array(piece), 1, -1)
            return runtime.tensor_of(_channels_first(run(chunk)))

        return call

    def _check_backend_and_dtype(
        self, what: str, x: torch.Tensor, follow_weights: bool, extra: tuple[torch.dtype, ...] = ()
    ) -> None:
        if x.dtype not in (self.dtype, *extra):
            raise ValueError(
                f"got {what} of {x.dtype} for weights of {self.dtype}: pass them .to({self.dtype})"
            )


def _together(parts: Iterator[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The parts of a video in one tensor, on the host where `like` is plain; all are computed before any is
    fetched."""
    computed = list(parts)
    if runtime.on_jax(like):
        return runtime.concatenate(computed, axis=2)
    for part in computed:
        runtime.fetch_async(part)
    return torch.cat([runtime.to_torch(part) for part in computed], dim=2)
