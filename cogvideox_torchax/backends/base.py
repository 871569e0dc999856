"""The interface of a backend, which loads, runs and inspects a VAE, and gives its programs to `plan`."""

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.axes import NCTHW
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.directions import ENCODE, Direction

if TYPE_CHECKING:
    from jax.sharding import Mesh

Recorder = Callable[[torch.Tensor, Any], tuple[dict[str, torch.Tensor], Any]]
"""A function that runs a chunk and records layers: (chunk, cache) -> (outputs, next cache).

The outputs are those of the layers, as plain tensors, by the layers' names in diffusers. The cache is None
for a video's first chunk.
"""


class Backend(abc.ABC):
    """A VAE on one backend.

    Attributes:
        vae: the model, with diffusers' interface: `encode(x).latent_dist` and `decode(z).sample`, in NCTHW.
    """

    model_class = cast(Any, None)
    """The class whose `from_pretrained` loads a model."""
    runs_on_mesh = True
    """Whether a model can be split over a mesh."""
    axes = NCTHW
    """The order of the axes of the chunks that `program` takes."""
    compiled_by_jax = True
    """Whether JAX compiles the model, so that `jax.monitoring` has the times to lower and to compile."""

    def __init__(self, vae: Any):
        self.vae = vae

    @classmethod
    def load(cls, model: str, dtype: torch.dtype, mesh: "Mesh | None" = None) -> "Backend":
        """Load a VAE, alone or from a whole pipeline, and run it on a mesh if there is one.

        Args:
            model: a local directory or a hub id.
            dtype: the dtype of the weights.
            mesh: a mesh of `make_mesh`, or None.

        Raises:
            ModelError: a file is missing or wrong; this `ValueError` says what to do.
        """
        vae = cls.model_class.from_pretrained(locate_vae(model), torch_dtype=dtype)
        if mesh is not None:
            vae.place_on(mesh)
        return cls(vae)

    @classmethod
    @abc.abstractmethod
    def from_native(cls, native: Any) -> "Backend":
        """Return this backend with the weights of a VAE in PyTorch, of diffusers' class or ported."""

    @classmethod
    def program(cls, vae: Any, direction: Direction) -> Any:
        """Return the program of a direction's chunks, which `plan` compiles ahead of time.

        The program is for the config, dtype and mesh of `vae`, which has no weights (see `plan.jobs`).
        """
        raise NotImplementedError(f"{cls.__name__} compiles nothing ahead of time")

    @classmethod
    def device(cls) -> str:
        """Return the name of JAX's devices, such as "2 x TPU v6 lite"; one device has no number."""
        import jax

        devices = jax.devices()
        kind = devices[0].device_kind
        return f"{len(devices)} x {kind}" if len(devices) > 1 else kind

    # A whole video

    def run(self, direction: Direction, x: torch.Tensor) -> torch.Tensor:
        """Encode a video to its posterior, or decode latents; return a plain tensor."""
        placed = self.put(x)
        if direction == ENCODE:
            # The parameters of a posterior are its mean, then its log-variance, side by side in the channels.
            return self.to_torch(self.vae.encode(placed).latent_dist.parameters)
        return self.to_torch(self.vae.decode(placed).sample)

    # Chunk by chunk

    def chunks(self, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return an iterator over the results of a video's chunks; the results stay on the device."""
        # Imported here, because it imports JAX, which the list of backends does without.
        from cogvideox_torchax.vae.streaming import frames_of_chunks

        return self.vae.results(direction, frames_of_chunks(self.vae, direction, self.put(x)))

    @abc.abstractmethod
    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        """Return the function that runs a chunk and records each layer for which `wanted(name)` is true."""

    @property
    def program_counts(self) -> dict[str, int]:
        """The number of compiled programs of each direction; empty if the backend does not count them."""
        return {}

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor as the model takes it."""
        return x

    def to_torch(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a chunk's result as a plain tensor."""
        return runtime.to_torch(chunk)
