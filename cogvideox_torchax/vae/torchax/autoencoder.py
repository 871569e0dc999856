"""The ported class of diffusers' VAE: a subclass that runs on JAX for torchax tensors.

A chunk's *network* and its *step* are functions (chunk, cache) -> (result, next cache). A *program* is a
network that is compiled. *Moments* are the encoder's result, the means and log-variances of the latents. An
accelerator is a device of JAX, by torchax, or the device of TorchTPU, PyTorch's own support of TPUs.

Axis letters: N videos, C channels, T frames, H rows, W columns. Tensors are NCTHW.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from jax.sharding import Mesh

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.arrays.forks import check_not_forked
from cogvideox_torchax.files.models import saved_from_host
from cogvideox_torchax.runtime.models import PortedModel, class_of, save_as_stock
from cogvideox_torchax.runtime.trees import change_in
from cogvideox_torchax.sharding import check_mesh
from cogvideox_torchax.vae import checkpoint, tiling
from cogvideox_torchax.vae.chunks import Step, run
from cogvideox_torchax.vae.directions import NCTHW, Direction
from cogvideox_torchax.vae.placement import Placement, VideoPlacement
from cogvideox_torchax.vae.streaming import ChunkedVAE
from cogvideox_torchax.vae.torchax import gradients
from cogvideox_torchax.vae.torchax.modules import port_modules
from cogvideox_torchax.vae.torchax.networks import ChunkNetwork, chunk_network

OPTIONS = {"revision", "token", "cache_dir", "local_files_only", "force_download", "torch_dtype"}
"""The options of diffusers' `from_pretrained` that only the search for the files and their dtype needs."""

NO_GRADIENT_IN_TILES = "gradients do not pass through tiles on JAX: call disable_tiling() before"


# This runs at import, because an unpickled model has called nothing of this module.
upstream.hand_over(PortedModel)


class AutoencoderKLCogVideoX(ChunkedVAE):
    """CogVideoX's VAE, by diffusers' own names, which runs in PyTorch and on JAX.

    `vae.to("jax")` moves the weights to JAX, and `x.to("jax")` moves an input. A torchax tensor runs on JAX
    chunk by chunk, by two compiled programs for a video of any length. A plain torch tensor runs in PyTorch.
    """

    @functools.wraps(DiffusersAutoencoder.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        save_as_stock(self)  # a saved pipeline names diffusers' class, and loads without this package
        port_modules(self)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        dtype: torch.dtype | str | None = None,
        **diffusers_options: Any,
    ) -> "AutoencoderKLCogVideoX":
        """Load a model from a directory or from the hub.

        Args:
            pretrained_model_name_or_path: a local directory or a hub id.
            subfolder: the VAE's folder: "vae" for a whole pipeline.
            variant: the variant of the weight files, such as "fp16".
            dtype: the dtype of the weights, or its name; "auto" for that of the files, None for float32.
            diffusers_options: further options of diffusers' `from_pretrained`, such as `revision` and
                `torch_dtype`, the older name of `dtype`. `use_safetensors` has no effect, because a pickle is
                never loaded.

        Raises:
            ModelError: a file is missing or wrong; this `ValueError` says what to do.
        """
        name = pretrained_model_name_or_path
        diffusers_options.pop("use_safetensors", None)  # it is always on, below
        # `locate_with_dtype` downloads the files, so only it gets `OPTIONS`, the options of the download and
        # `torch_dtype`. `super` loads from the local directory.
        options = {option: diffusers_options.pop(option) for option in OPTIONS & diffusers_options.keys()}
        directory, dtype_name = checkpoint.locate_with_dtype(name, subfolder, variant, dtype, options)
        try:
            loaded: Any = super().from_pretrained(
                directory,
                variant=variant,
                torch_dtype=getattr(torch, dtype_name),  # every release of diffusers takes this name
                use_safetensors=True,
                output_loading_info=True,
                **diffusers_options,
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise checkpoint.ModelError(f"cannot load {name}: {reason}") from error
        vae, info = loaded
        checkpoint.check_loading_info(info, name)
        return vae.eval()

    save_pretrained = saved_from_host(DiffusersAutoencoder.save_pretrained)

    # Running chunks

    def results(
        self,
        direction: Direction,
        chunks: Iterable[torch.Tensor],
        plan: tiling.TilePlan | None = None,
        as_uint8: bool = False,
    ) -> Iterator[Any]:
        """Return the results, by compiled programs for weights on an accelerator, else by PyTorch.

        The arguments are those of `ChunkedVAE.results`.
        """
        # Tiles are blended as floats: `tiled_step` converts the blended frames to bytes.
        network = chunk_network(self, direction, as_uint8 and plan is None)
        on_jax = runtime.is_on_jax(self)
        step: Step = network  # without an accelerator PyTorch runs it
        if on_jax or runtime.is_on_torchtpu(self):
            program = self._program_of(network)
            with self.in_use():  # the step keeps its weights, even if another network begins before its end
                step = program.step(program.weights(network))
        if plan is not None:
            placement = Placement(self.mesh) if on_jax and self.mesh is not None else None
            step = tiling.tiled_step(step, plan, NCTHW, placement, as_uint8)
        # On JAX a step takes and returns arrays; elsewhere it takes and returns tensors.
        return run(step, map(runtime.as_array, chunks) if on_jax else chunks)

    def _run(self, direction: Direction, x: torch.Tensor, *, in_tiles: bool = False) -> torch.Tensor:
        """Return the joined results of all chunks, with gradients if torch records them.

        In training mode the forward pass keeps what the backward pass needs. In evaluation mode it keeps only
        the input, and a backward pass recomputes the rest, because most users who forget `torch.no_grad()`
        never call `backward()`. Under TorchTPU, and in tiles, a backward pass raises an error.
        """
        network = chunk_network(self, direction)
        plan = self._tile_plan(direction, x.shape[2:], in_tiles=in_tiles)
        on_torchtpu = runtime.is_on_torchtpu(self)
        forward_pass = functools.partial(super()._run, direction, x, in_tiles=in_tiles)
        if on_torchtpu or plan is not None:
            # On an accelerator, a backward pass from this result raises an error with the message. A plain
            # tensor's result is returned unchanged, and torch's own backward pass goes through the tiles.
            message = runtime.NO_GRADIENT if on_torchtpu else NO_GRADIENT_IN_TILES
            return runtime.without_gradient(network, [x], forward_pass(), message)
        if not runtime.wants_gradient(network, x):
            return forward_pass()
        program = self._program_of(network)
        lengths = [len(chunk) for chunk in direction.chunks(self, x.shape[2])]
        return gradients.differentiable(
            functools.partial(program.run_video, lengths=lengths),
            network,
            program.weights(network),
            x,
            # In evaluation mode the forward pass gives the result, and a backward pass runs `run_video`. In
            # training `run_video` runs now, and all that a backward pass needs is kept.
            run=None if self.training else forward_pass,
        )

    @functools.wraps(DiffusersAutoencoder.enable_gradient_checkpointing)
    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any = None) -> None:
        super().enable_gradient_checkpointing(gradient_checkpointing_func or gradients.rematerialized)

    def program(self, direction: Direction, as_uint8: bool = False) -> Any:
        """Return a direction's chunk program.

        The program is built at the first call, and again after a change of the modules, hooks or attributes.
        """
        return self._program_of(chunk_network(self, direction, as_uint8))

    def _program_of(self, network: ChunkNetwork) -> Any:
        # `get` compares the network with those of the programs that it has. If none is equal, it calls
        # `_compile_for`.
        kind = network.direction, network.as_uint8
        return runtime.programs_of(self).get(kind, network, self._compile_for)

    def compile_ahead(self, direction: Direction, shape: torch.Size | tuple[int, ...]) -> None:
        """Start to compile a direction's programs for an input of this shape (N, C, T, H, W), in threads.

        A call that needs the programs waits for them. Nothing is compiled for a model that is not on JAX, or
        for an input that would run in tiles.
        """
        if not runtime.is_on_jax(self) or self._tile_plan(direction, shape[2:]) is not None:
            return
        program = self.program(direction)
        videos = 1 if self.use_slicing else shape[0]
        previous = None
        for chunk in direction.chunks(self, shape[2])[:2]:  # all later chunks have the second one's program
            inputs = (videos, shape[1], len(chunk), *shape[3:]), runtime.jax_dtype(self.dtype)
            program.compile_ahead(inputs, before=previous)  # the second chunk takes the first one's cache
            previous = inputs

    def _compile_for(self, network: Any) -> Any:
        """Return a program of a chunk's network, for the device or the mesh that the model is on."""
        change = change_in(network)
        if change is not None:
            on_mesh = "" if self.mesh is None else ", and a mesh splits videos alone, not their width"
            slower = "so what is around it runs by diffusers' own forward, and takes longer"
            runtime.warn_once(self, f"vae: {change}, {slower}{on_mesh}")
        if runtime.is_on_torchtpu(network):
            return runtime.TorchTPUProgram(network)
        if self.mesh is None:
            return runtime.Program(network)
        if change is not None:
            # Diffusers' own operations do not keep the padding of a split width zero.
            return runtime.Program(network, VideoPlacement(self.mesh))
        # The input columns of a latent pixel, 8 or 1, must be on one device.
        unit = network.direction.scale(self.spatial_compression_ratio)
        return runtime.Program(network, Placement(self.mesh, NCTHW, unit))

    def place_on(self, mesh: Mesh) -> None:
        """Run on another mesh from now on, and drop the programs that were compiled so far.

        Raises:
            ValueError: the mesh was not made by `make_mesh`.
        """
        if check_mesh(mesh) != self._mesh:
            self._mesh = mesh
            runtime.forget_programs(self)

    def _check_place(self, name: str, x: torch.Tensor, for_stream: bool) -> None:
        """Raise `ValueError` if only one of an input and the weights is on an accelerator."""
        if runtime.is_on_jax(self):
            check_not_forked()
        given, held = x.device.type, self.device.type  # "jax", "tpu", or a device of PyTorch's own
        # A stream moves plain tensors to the weights' accelerator by itself.
        if given != held and not (for_stream and held in ("jax", "tpu")):
            raise ValueError(
                f'got {name} on {given} for weights on {held}: move the tensor .to("{held}"), or the model, '
                f'vae.to("{given}")'
            )


def check_vae_class(model: Any) -> None:
    """Raise `ValueError` for a class that has the name of diffusers' VAE, but is of another package."""
    kind = type(model)
    if kind.__name__ == DiffusersAutoencoder.__name__ and not issubclass(kind, DiffusersAutoencoder):
        raise ValueError(
            f"got an {kind.__name__} of {kind.__module__}: port takes diffusers' class of that name. Load "
            "the weights into it, by AutoencoderKLCogVideoX.from_pretrained(the same directory) of "
            "cogvideox_torchax; frames may differ, as diffusers decodes 3, 2, 2, ... latents at a time"
        )


def port_vae(vae: Any, mesh: Mesh | None = None) -> Any:
    """Give a VAE of diffusers and its modules their ported classes, in place; return the model.

    A second call ports only modules that were added since the first call. Without a mesh the model stays
    where it is.
    """
    if not issubclass(type(vae), PortedModel):
        vae.__class__ = _ported_class(type(vae))
        save_as_stock(vae)  # a saved pipeline names diffusers' class, and loads without this package
        # If gradient checkpointing is on already, modules have torch's function for it. `rematerialized`
        # replaces it, which also takes tensors on JAX.
        for module in vae.modules():
            if getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = gradients.rematerialized  # pyright: ignore
    port_modules(vae)
    if mesh is not None:
        vae.place_on(mesh)
    return vae


@functools.cache
def _ported_class(kind: type[DiffusersAutoencoder]) -> Any:
    """Return the ported class of diffusers' VAE, or of a subclass of it.

    The methods that a subclass defines come before the ported ones.
    """
    if kind is DiffusersAutoencoder:
        return AutoencoderKLCogVideoX
    return class_of(_ported_class, kind, (kind, AutoencoderKLCogVideoX))
