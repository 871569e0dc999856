"""The backends, which are ways to run the VAE, as a table. A new backend is an entry in it.

A *build* is a file of this package: `modules` is of PyTorch's modules, diffusers' own or ported, and `flax`
is the Flax build. Each has the class that loads a model, and functions of the same names.
"""

import importlib
from collections.abc import Callable, Iterator, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.directions import ENCODE, Direction

if TYPE_CHECKING:
    import torch
    from jax.sharding import Mesh

Use = Literal["run", "verify"]
"""A use of a backend by the command line: to run a VAE, or to be compared by `verify`."""

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
        build: the file of this package that has the backend's functions.
        uses: what the backend may be used for.
        stock: whether it runs diffusers' own modules.
        on_jax: whether JAX compiles it, so that it runs on a mesh too.
        vae: the model, with diffusers' interface: `encode(x).latent_dist` and `decode(z).sample`, in NCTHW;
            None before one is loaded.
    """

    name: str
    build: str
    uses: AbstractSet[Use]
    stock: bool = False
    on_jax: bool = True
    vae: Any = None

    @property
    def functions(self) -> Any:
        """The file of the backend's build."""
        return importlib.import_module(f"{__name__}.{self.build}")

    def load(self, model: str, dtype: "torch.dtype", mesh: "Mesh | None" = None) -> "Backend":
        """Load a VAE, alone or from a whole pipeline, and run it on a mesh if there is one.

        Args:
            model: a local directory or a hub id.
            dtype: the dtype of the weights.
            mesh: a mesh of `make_mesh`, or None.

        Raises:
            ModelError: a file is missing or wrong; this `ValueError` says what to do.
        """
        vae = self.functions.VAE.from_pretrained(locate_vae(model), torch_dtype=dtype)
        if mesh is not None:
            vae.place_on(mesh)
        return self.of(vae)

    def from_native(self, native: Any) -> "Backend":
        """Return this backend with the weights of a VAE in PyTorch, of diffusers' class or ported."""
        return self.of(self.functions.from_native(native, self.stock))

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
        # Imported here, because it imports JAX, which the list of backends does without.
        from cogvideox_torchax.vae.streaming import frames_of_chunks

        chunks = frames_of_chunks(self.vae, direction, self.put(x))
        results = self.functions.stock_results if self.stock else type(self.vae).results
        return results(self.vae, direction, chunks)

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        """Return the function that runs a chunk and records each layer for which `wanted(name)` is true."""
        return self.functions.recorder(self.vae, direction, wanted)


_TABLE = {
    entry.name: entry
    for entry in (
        Backend("torch", "modules", {"run", "verify"}, stock=True, on_jax=False),
        Backend("torchax-stock", "modules", frozenset(), stock=True),
        Backend("torchax", "modules", {"run", "verify"}),
        Backend("flax", "flax", {"run", "verify"}),
    )
}


def names(use: Use) -> tuple[str, ...]:
    """Return the names of the backends that may be used for this."""
    return tuple(name for name, entry in _TABLE.items() if use in entry.uses)


def backend(name: str) -> Backend:
    """Return a backend by its name.

    Raises:
        BackendError: there is no such backend, or its packages are not installed.
    """
    if name not in _TABLE:
        raise BackendError(f"unknown backend {name!r}: one of {', '.join(_TABLE)}")
    try:
        _TABLE[name].functions  # noqa: B018 - imports the file, whose packages may be missing
    except ImportError as error:
        install = "pip install 'cogvideox-torchax[flax]'" if name == "flax" else "install it again"
        raise BackendError(
            f"the {name} backend is not installed ({error}): {install}, or leave {name} out"
        ) from error
    return _TABLE[name]
