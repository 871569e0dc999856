"""What a backend is: a VAE, and how it is loaded, run, looked into and planned."""

import abc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.axes import NCTHW
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.directions import ENCODE, Direction

Recorder = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""From one chunk of a video to its layers' outputs, plain, by diffusers' names. It carries the cache."""


class Backend(abc.ABC):
    """A VAE on one backend.

    Attributes:
        vae: the model, by diffusers' interface: `encode(x).latent_dist`, `decode(z).sample`, NCTHW.
    """

    has_layers = True
    """Whether `recorder` gives them."""
    runs_on_mesh = True
    axes = NCTHW
    """Of the chunks that `program` takes."""
    compiled_by_jax = True
    """Whether JAX's own clock says how long its programs took to lower and to compile."""

    def __init__(self, vae: Any):
        self.vae = vae

    @classmethod
    @abc.abstractmethod
    def model_class(cls) -> Any:
        """The class whose `from_pretrained` loads a model for this backend."""

    @classmethod
    def load(cls, model: str, dtype: torch.dtype, mesh: Any = None) -> "Backend":
        """A model ready to run: of a directory or a hub id, of a VAE or of a whole pipeline.

        Args:
            model: the directory or the id.
            dtype: of the weights.
            mesh: of `make_mesh`, or None.

        Raises:
            ModelError: a `ValueError` that says what is missing or wrong, and what to do.
        """
        vae = cls.model_class().from_pretrained(locate_vae(model), torch_dtype=dtype)
        if mesh is not None:
            vae.place_on(mesh)
        return cls(cls.placed(vae))

    @classmethod
    def placed(cls, vae: Any) -> Any:
        """The model of `model_class`, where this backend runs it."""
        return vae

    @classmethod
    @abc.abstractmethod
    def around(cls, native: Any) -> "Backend":
        """A backend around a model that is in PyTorch, diffusers' or ported, whose weights it takes."""

    @classmethod
    def program(cls, vae: Any, kind: Direction) -> Any:
        """The chunk program of a direction, for the config, dtype and mesh of a weightless model."""
        raise NotImplementedError(f"{cls.__name__} compiles nothing ahead of time")

    @classmethod
    def device(cls) -> str:
        """What it runs on."""
        import jax

        devices = jax.devices()
        kind = devices[0].device_kind
        return f"{len(devices)} x {kind}" if len(devices) > 1 else kind

    # A whole video

    def run(self, kind: Direction, x: torch.Tensor) -> torch.Tensor:
        """The posterior's moments of a video, or the frames of latents, as a plain tensor."""
        placed = self.put(x)
        if kind == ENCODE:
            return self.to_torch(self.vae.encode(placed).latent_dist.parameters)
        return self.to_torch(self.vae.decode(placed).sample)

    # Chunk by chunk

    def chunks(self, kind: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """The results of a video's chunks, left where they are computed."""
        from cogvideox_torchax.vae.streaming import frames_of_chunks  # imports JAX, which the list does not

        return self.vae.results(kind, frames_of_chunks(self.vae, kind, self.put(x)))

    @abc.abstractmethod
    def recorder(self, kind: Direction, wanted: Callable[[str], Any]) -> Recorder:
        """A pass over a video that gives the layers whose names are `wanted`."""

    @property
    def program_counts(self) -> dict[str, int]:
        """How many programs have been compiled for each half; none where the backend does not count."""
        return {}

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """A plain tensor, where the model takes it."""
        return x

    def wait(self, chunk: torch.Tensor) -> torch.Tensor:
        """The result of a chunk, when it has been computed."""
        return runtime.wait(chunk)

    def to_torch(self, chunk: torch.Tensor) -> torch.Tensor:
        """A result as a plain tensor."""
        return runtime.to_torch(chunk)
