"""The Flax build with the interface that a diffusers pipeline expects of a VAE.

Axis letters: N videos, C channels, T frames, H rows, W columns. Tensors are NCTHW, as in diffusers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - from_pretrained of a pipeline looks here
from flax import nnx

from cogvideox_torchax import runtime
from cogvideox_torchax.vae import checkpoint
from cogvideox_torchax.vae.chunks import run
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX
from cogvideox_torchax.vae.streaming import ChunkedVAE
from cogvideox_torchax.vae.tiling import TilePlan


def to_array(x: torch.Tensor) -> Any:
    """Return a tensor (NCTHW) as an array with the channels last; a plain tensor becomes a NumPy array."""
    array = runtime.as_array(x)
    return (np if isinstance(array, np.ndarray) else jnp).moveaxis(array, 1, -1)


def to_tensor(array: jax.Array) -> torch.Tensor:
    """Return an array with the channels last as a tensor (NCTHW) on JAX."""
    return runtime.tensor_of(jnp.moveaxis(array, -1, 1))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"got {dtype}: the Flax build takes float32, bfloat16 or float16")


class FlaxVAEForPipelines(ChunkedVAE):
    """The Flax build where diffusers expects its own class: `pipe.vae = FlaxVAEForPipelines(flax_vae)`.

    A plain torch tensor gives a plain torch tensor, and a torchax tensor gives a torchax tensor. The wrapper
    is a diffusers VAE (`encode(...).latent_dist`, `decode(...).sample`, `config`, tiling, slicing), and has
    the streams of `cogvideox_torchax.AutoencoderKLCogVideoX`. It has no torch parameters, so `.to(...)` moves
    nothing.

    Args:
        flax_vae: the model to run, which stays an attribute of this name.
    """

    _supports_gradient_checkpointing = False

    def __init__(self, flax_vae: FlaxAutoencoderKLCogVideoX):
        # Diffusers' constructor sets the config and the attributes of tiling and slicing. Its modules, which
        # it makes without memory, are dropped.
        with torch.device("meta"):
            super().__init__(**flax_vae.config.to_dict())
        del self.encoder, self.decoder, self.quant_conv, self.post_quant_conv
        self.flax_vae = flax_vae
        self.eval()

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        dtype: torch.dtype | str | None = None,
        **hub_options: Any,
    ) -> "FlaxVAEForPipelines":
        """Load diffusers' weights from a directory or from the hub.

        Args:
            pretrained_model_name_or_path: a local directory or a hub id.
            subfolder: the VAE's folder: "vae" for a whole pipeline.
            variant: the variant of the weight files, such as "fp16".
            dtype: the dtype of the weights and of the computation, or its name; "auto" for that of the files,
                None for float32.
            hub_options: `revision`, `token`, `cache_dir`, `local_files_only`, or `torch_dtype`, the older
                name of `dtype`.

        Raises:
            ModelError: a file is missing or wrong; this `ValueError` says what to do.
        """
        directory, dtype_name = checkpoint.locate_with_dtype(
            pretrained_model_name_or_path, subfolder, variant, dtype, hub_options
        )
        _check_dtype(getattr(torch, dtype_name))
        return cls(
            FlaxAutoencoderKLCogVideoX.from_pretrained(
                directory, variant=variant, dtype=dtype_name, param_dtype=dtype_name
            )
        )

    @classmethod
    def from_diffusers(cls, vae: torch.nn.Module, dtype: torch.dtype | None = None) -> "FlaxVAEForPipelines":
        """Return a model with a copy of a diffusers VAE's weights, in the VAE's dtype or another one."""
        diffusers_vae: Any = vae  # because type checkers do not know the `dtype` and `config` of a module
        jax_dtype = runtime.jax_dtype(dtype or diffusers_vae.dtype)
        return cls(
            FlaxAutoencoderKLCogVideoX.from_state_dict(
                dict(diffusers_vae.config), diffusers_vae.state_dict(), dtype=jax_dtype, param_dtype=jax_dtype
            )
        )

    def save_pretrained(self, save_directory: str | Path, **diffusers_options: Any) -> None:  # pyright: ignore
        """Write the model in diffusers' format, in one file of weights; diffusers' options have no effect."""
        self.flax_vae.save_pretrained(save_directory)

    # Methods of torch modules and of diffusers' models, on the Flax model's weights

    def state_dict(self) -> dict[str, torch.Tensor]:  # pyright: ignore
        """Return copies of the weights as plain tensors, by diffusers' names."""
        return {
            name: runtime.plain_tensor(np.array(value))
            for name, value in weights.state_dict(nnx.state(self.flax_vae, nnx.Param)).items()
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load all tensors of a torch state dict, or none if one does not fit; the options have no effect.

        Raises:
            ModelError: a tensor is missing, left over or of another shape.
        """
        self.flax_vae.load_tensors(weights.from_torch(state_dict))
        # The wrapper has no torch weights, so an empty load returns what torch returns for a complete one.
        return super().load_state_dict({})

    def to(self, *args: Any, **kwargs: Any) -> "FlaxVAEForPipelines":
        """Cast the weights to a dtype, if one is given as torch's `to` takes it; return the model.

        A device has no effect, because the model stays on JAX's devices.

        Raises:
            ValueError: the Flax build does not compute in this dtype.
        """
        _device, dtype = runtime.device_and_dtype(args, kwargs)
        return self._apply(lambda tensor: tensor.to(dtype or tensor.dtype))

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "FlaxVAEForPipelines":
        """Cast the weights; torch's `half()`, `float()` and the like call this with their cast as `fn`."""
        dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype  # an empty tensor shows what `fn` casts to
        if dtype != self.dtype:
            _check_dtype(dtype)
            self.flax_vae.cast(runtime.jax_dtype(dtype))
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "FlaxVAEForPipelines":
        """Return the model, none of whose weights requires a gradient.

        Raises:
            ValueError: `requires_grad` is true.
        """
        if requires_grad:
            raise ValueError("the wrapper passes no gradients on: take them of `flax_vae` with jax.grad")
        return self

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters; diffusers' options have no effect."""
        return sum(parameter.size for parameter in jax.tree.leaves(nnx.state(self.flax_vae, nnx.Param)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation, of inputs and of results."""
        return getattr(torch, self.flax_vae.dtype.name)

    @property
    def device(self) -> torch.device:
        """The CPU, where plain inputs and results are; the model itself runs on JAX's devices."""
        return torch.device("cpu")

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that the Flax model runs on; None for one device."""
        return self.flax_vae.mesh

    def place_on(self, mesh: jax.sharding.Mesh) -> None:
        """Run on a mesh of `cogvideox_torchax.make_mesh` from now on; `port(vae, mesh=mesh)` calls this."""
        self.flax_vae.place_on(mesh)

    def results(
        self,
        direction: Direction,
        chunks: Iterable[torch.Tensor],
        plan: TilePlan | None = None,
        as_uint8: bool = False,
    ) -> Iterator[jax.Array]:
        """Return the results of the Flax model; the arguments are those of `ChunkedVAE.results`."""
        step = self.flax_vae.step(direction, plan, as_uint8=as_uint8)
        return (jnp.moveaxis(result, -1, 1) for result in run(step, map(to_array, chunks)))


VAEForPipelines = FlaxVAEForPipelines
"""The name by which diffusers before 0.40 asks for the class: when it loads a pipeline, it strips `Flax`."""
