"""The backends, which are ways to run the VAE, as a table. A new backend is an entry in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.directions import ENCODE, Direction

# Packages that import torch or Flax are imported where they are used: the list of names needs neither.
if TYPE_CHECKING:
    import torch
    from jax.sharding import Mesh

Recorder = Callable[["torch.Tensor", Any], tuple[dict[str, "torch.Tensor"], Any]]
"""A function that runs a chunk and records layers: (chunk, cache) -> (outputs, next cache).

The outputs are those of the layers, as plain tensors, by the layers' names in diffusers. The cache is None
for a video's first chunk.
"""


class BackendError(ValueError):
    """An error for a backend that is unknown or not installed; the message says what to do."""


@dataclass(frozen=True)
class Backend:
    """A backend; `load`, `from_native` and `of` return it with a VAE to run.

    Attributes:
        name: by which it is chosen.
        stock: whether it runs diffusers' own modules.
        on_jax: whether JAX compiles it, so that it runs on a mesh too.
        is_flax: whether it is the Flax build; all others run PyTorch's modules.
        vae: the model, with diffusers' interface: `encode(x).latent_dist` and `decode(z).sample`, in NCTHW;
            None before one is loaded.
    """

    name: str
    stock: bool = False
    on_jax: bool = True
    is_flax: bool = False
    vae: Any = None

    @property
    def model_class(self) -> Any:
        """The class that loads a model; `ImportError` if its packages are not installed."""
        if self.is_flax:
            from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines as model_class
        else:
            from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX as model_class
        return model_class

    def load(self, model: str, dtype: "torch.dtype", mesh: "Mesh | None" = None) -> "Backend":
        """Load a VAE, alone or from a whole pipeline, and run it on a mesh if there is one.

        Args:
            model: a local directory or a hub id.
            dtype: the dtype of the weights.
            mesh: a mesh of `make_mesh`, or None.

        Raises:
            ModelError: a file is missing or wrong; this `ValueError` says what to do.
        """
        vae = self.model_class.from_pretrained(locate_vae(model), torch_dtype=dtype)
        if mesh is not None:
            vae.place_on(mesh)
        return self.of(vae)

    def from_native(self, native: Any) -> "Backend":
        """Return this backend with the weights of a VAE in PyTorch, of diffusers' class or ported."""
        from cogvideox_torchax.vae.torchax import autoencoder, networks

        convert = networks.stock_of if self.stock else autoencoder.port_vae
        return self.of(self.model_class.from_diffusers(native) if self.is_flax else convert(native))

    def of(self, vae: Any) -> "Backend":
        """Return this backend with a model of its class; where JAX compiles it, put its weights on JAX."""
        if self.on_jax:
            runtime.put_weights(vae)
        return replace(self, vae=vae)

    def put(self, x: "torch.Tensor") -> "torch.Tensor":
        """Return a plain tensor where the model takes it: on JAX if its weights are tensors there."""
        return runtime.to_jax(x) if runtime.is_on_jax(self.vae) else x

    def run(self, direction: Direction, x: "torch.Tensor") -> "torch.Tensor":
        """Encode a video to its posterior, or decode latents; return a plain tensor."""
        placed = self.put(x)
        if direction == ENCODE:
            # The parameters of a posterior are its mean, then its log-variance, side by side in the channels.
            return runtime.to_torch(self.vae.encode(placed).latent_dist.parameters)
        return runtime.to_torch(self.vae.decode(placed).sample)

    def chunks(self, direction: Direction, x: "torch.Tensor") -> "Iterator[torch.Tensor]":
        """Return an iterator over the results of a video's chunks; the results stay on the device."""
        from cogvideox_torchax.vae import chunks, streaming
        from cogvideox_torchax.vae.torchax import networks

        inputs = streaming.frames_of_chunks(self.vae, direction, self.put(x))
        if self.stock:
            step = self._step(direction, networks.chunk_network(self.vae, direction))
            results = chunks.run(step, inputs)
        else:
            results = self.vae.results(direction, inputs)
        return map(streaming.as_tensor, results)

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        """Return the function that runs a chunk and records each layer for which `wanted(name)` is true."""
        from cogvideox_torchax.vae.streaming import as_tensor
        from cogvideox_torchax.vae.torchax import networks

        if self.is_flax:
            from cogvideox_torchax.vae.nnx.wrapper import to_array, to_tensor

            step = self.vae.flax_vae.step(direction, records=True)
        else:
            to_array, to_tensor = lambda chunk: chunk, as_tensor
            network = networks.RecordedLayers(networks.chunk_network(self.vae, direction), wanted)
            # The key differs from that of the direction's program that records nothing.
            step = self._step(f"{direction}, recorded", network)

        def record(chunk: "torch.Tensor", cache: Any) -> "tuple[dict[str, torch.Tensor], Any]":
            outputs, cache = step(to_array(chunk), cache)
            found = {name: to_tensor(output) for name, output in outputs.items() if wanted(name)}
            return {name: runtime.to_torch(output) for name, output in found.items()}, cache

        return record

    def _step(self, key: str, network: "torch.nn.Module") -> Any:
        """Return a network as a function (chunk, cache) -> (result, next cache).

        For weights on JAX it is compiled. The model keeps the program under `key`, so that a later call
        compiles nothing.
        """
        if not runtime.is_on_jax(self.vae):
            return network
        compiled = runtime.programs_of(self.vae).get(key, network, runtime.Program)
        return compiled.step(compiled.weights(network))


_TABLE = {
    entry.name: entry
    for entry in (
        Backend("torch", stock=True, on_jax=False),
        Backend("torchax-stock", stock=True),
        Backend("torchax"),
        Backend("flax", is_flax=True),
    )
}
NAMES = ("torch", "torchax", "flax")
"""The backends that the command line offers."""


def backend(name: str) -> Backend:
    """Return a backend by its name.

    Raises:
        BackendError: there is no such backend, or its packages are not installed.
    """
    if name not in _TABLE:
        raise BackendError(f"unknown backend {name!r}: one of {', '.join(_TABLE)}")
    try:
        _TABLE[name].model_class  # noqa: B018 - its packages may be missing
    except ImportError as error:
        install = "pip install 'cogvideox-torchax[flax]'" if name == "flax" else "install it again"
        raise BackendError(
            f"the {name} backend is not installed ({error}): {install}, or leave {name} out"
        ) from error
    return _TABLE[name]
