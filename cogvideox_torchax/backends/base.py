"""The interface of a backend: a VAE, and how it is loaded, run, inspected and planned."""

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
"""A step, (chunk, cache) -> (outputs, next cache), whose outputs are those of layers: plain tensors by name.

The names are diffusers'. The first chunk of a video has the cache None.
"""


class Backend(abc.ABC):
    """A VAE on one backend.

    Attributes:
        vae: the model, by diffusers' interface: `encode(x).latent_dist`, `decode(z).sample`, NCTHW.
    """

    model_class = cast(Any, None)
    """The class whose `from_pretrained` loads a model; each backend has one."""
    runs_on_mesh = True
    """True if a model can be split over a mesh."""
    axes = NCTHW
    """Layout of the chunks that `program` takes."""
    compiled_by_jax = True
    """True if JAX compiles it, so that `jax.monitoring` has the times to lower and to compile."""

    def __init__(self, vae: Any):
        self.vae = vae

    @classmethod
    def load(cls, model: str, dtype: torch.dtype, mesh: "Mesh | None" = None) -> "Backend":
        """Load a model, ready to run, from a directory or a hub id, of a VAE or of a whole pipeline.

        Args:
            model: the directory or the id.
            dtype: dtype of the weights.
            mesh: a mesh of `make_mesh`, or None.

        Raises:
            ModelError: a `ValueError` that says what is missing or wrong, and what to do.
        """
        vae = cls.model_class.from_pretrained(locate_vae(model), torch_dtype=dtype)
        if mesh is not None:
            vae.place_on(mesh)
        return cls(vae)

    @classmethod
    @abc.abstractmethod
    def from_native(cls, native: Any) -> "Backend":
        """Return a backend with the weights of a PyTorch model, diffusers' or ported."""

    @classmethod
    def program(cls, vae: Any, direction: Direction) -> Any:
        """Return the chunk program of a direction, to compile ahead of time.

        Args:
            vae: a model without weights (`plan.models`), whose config, dtype and mesh the program gets.
            direction: `ENCODE` or `DECODE`.
        """
        raise NotImplementedError(f"{cls.__name__} compiles nothing ahead of time")

    @classmethod
    def device(cls) -> str:
        """Return the name of the device, with the number of devices if there are several."""
        import jax

        devices = jax.devices()
        kind = devices[0].device_kind
        return f"{len(devices)} x {kind}" if len(devices) > 1 else kind

    # A whole video

    def run(self, direction: Direction, x: torch.Tensor) -> torch.Tensor:
        """Encode a video to its posterior's moments, or decode latents to frames; return a plain tensor."""
        placed = self.put(x)
        if direction == ENCODE:
            return self.to_torch(self.vae.encode(placed).latent_dist.parameters)
        return self.to_torch(self.vae.decode(placed).sample)

    # Chunk by chunk

    def chunks(self, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the results of a video's chunks, left on the device that computed them."""
        # Imported here, since it imports JAX, which the list of backends does without.
        from cogvideox_torchax.vae.streaming import frames_of_chunks

        return self.vae.results(direction, frames_of_chunks(self.vae, direction, self.put(x)))

    @abc.abstractmethod
    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        """Return the step of a chunk whose result is the outputs of its layers.

        Args:
            direction: whether the video is encoded, or latents are decoded.
            wanted: predicate of a layer's name: whether its output is returned.
        """

    @property
    def program_counts(self) -> dict[str, int]:
        """Number of compiled programs for each direction; empty if the backend does not count."""
        return {}

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor as the model takes it; the base class leaves it unchanged."""
        return x

    def wait(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a chunk's result once it has been computed."""
        return runtime.wait(chunk)

    def to_torch(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a chunk's result as a plain tensor."""
        return runtime.to_torch(chunk)
