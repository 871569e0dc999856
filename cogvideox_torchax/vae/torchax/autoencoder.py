"""AutoencoderKLCogVideoX: diffusers' class, ported: encode, decode, and their streams.

Axis letters: N videos, C channels, T frames, H rows, W columns. Public tensors are NCTHW.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import nn

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files.models import saved_from_host
from cogvideox_torchax.runtime.models import PortedModel, save_as_stock
from cogvideox_torchax.vae import checkpoint, chunks, tiling
from cogvideox_torchax.vae.checks import NCTHW, check_finite, check_shape
from cogvideox_torchax.vae.torchax.modules import LAYERS, port_modules
from cogvideox_torchax.vae.torchax.networks import (
    EncoderChunk,
    chunk_network,
    frames_a_chunk,
    frames_of_chunks,
    stock_of,
)
from cogvideox_torchax.vae.torchax.streams import Fetch, by_video, gathered, overlapped, posteriors, with_time
from cogvideox_torchax.vae.torchax.tiles import run_tiles

if TYPE_CHECKING:
    from cogvideox_torchax.sharding import Placement

HUB_OPTIONS = {"revision", "token", "cache_dir", "local_files_only", "force_download"}
"""Of diffusers' `from_pretrained`, those that are huggingface_hub's."""


class DifferentiablePosterior(DiagonalGaussianDistribution):
    """diffusers' posterior with its gradients on JAX, where those of torch's own split and clamp are lost."""

    def __init__(self, parameters: torch.Tensor):
        self.parameters, self.deterministic = parameters, False
        self.mean = runtime.differentiated(lambda moments: moments[:, : moments.shape[1] // 2], parameters)
        self.logvar = runtime.differentiated(_clamped_logvar, parameters)
        self.std, self.var = torch.exp(0.5 * self.logvar), torch.exp(self.logvar)


def _clamped_logvar(moments: Any) -> Any:
    return moments[:, moments.shape[1] // 2 :].clip(-30.0, 20.0)


def _hand_over(make: Callable[..., Any], kind: type, pipeline: Any, **options: Any) -> Any:
    """diffusers' `from_pipe`, to which a ported part is as good as the stock one."""
    parts = upstream.parts_for(kind, pipeline)
    ported = {name: part for name, part in parts.items() if isinstance(part, PortedModel)}
    if not ported:
        return make(kind, pipeline, **options)
    with runtime.active():  # it casts what it takes over
        return make(kind, pipeline, **{**ported, **options})


# At import: a model that was unpickled has called nothing of this package.
upstream.around_from_pipe(_hand_over)


class AutoencoderKLCogVideoX(PortedModel, DiffusersAutoencoder):
    """CogVideoX's VAE on torchax, by diffusers' own names.

    A plain torch tensor runs natively in PyTorch; a torchax tensor runs on JAX, a chunk of frames at a time,
    two compiled programs for a video of any length. `vae.to("jax")` moves the weights, `x.to("jax")` an
    input.
    """

    @functools.wraps(DiffusersAutoencoder.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        save_as_stock(self)
        port_modules(self)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        torch_dtype: torch.dtype | None = None,
        **diffusers_options: Any,
    ) -> "AutoencoderKLCogVideoX":
        """Loads a model from a directory or from the hub, whether or not torchax is already enabled.

        Args:
            pretrained_model_name_or_path: a local directory or a hub id.
            subfolder: where the VAE lies in it, "vae" for a whole pipeline.
            variant: of the weight files, such as "fp16".
            torch_dtype: of the loaded weights; float32 where None.
            diffusers_options: further options of diffusers' `from_pretrained` (`revision`, `token`,
                `cache_dir`, `local_files_only`, ...). `use_safetensors` is always on: a pickle is never
                loaded.

        Raises:
            ModelError: a `ValueError` that says what is missing or wrong, and what to do.
        """
        name = pretrained_model_name_or_path
        hub_options = {
            option: diffusers_options.pop(option) for option in HUB_OPTIONS & diffusers_options.keys()
        }
        directory = checkpoint.locate_vae(name, subfolder, variant, **hub_options)
        options = {**diffusers_options, "variant": variant, "torch_dtype": torch_dtype or torch.float32}
        load = functools.partial(
            super().from_pretrained, directory, use_safetensors=True, output_loading_info=True, **options
        )
        try:
            vae, info = runtime.without_torchax(load)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise checkpoint.ModelError(f"cannot load {name}: {reason}") from error
        checkpoint.check_loading_info(info, name)
        return vae.eval()

    save_pretrained = saved_from_host(DiffusersAutoencoder.save_pretrained)

    # Encoding

    @functools.wraps(DiffusersAutoencoder.encode)
    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        with self._running(x):
            (posterior,) = super().encode(x, return_dict=False)
            if runtime.on_jax(x) and posterior.parameters.requires_grad:
                posterior = DifferentiablePosterior(posterior.parameters)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        self._check_video(x)
        return self._whole("encode", x)

    def encode_stream(
        self,
        frames: torch.Tensor | Iterable[torch.Tensor],
        num_frames: int | None = None,
        *,
        fetch: Fetch = runtime.to_torch,
    ) -> Iterator[DiagonalGaussianDistribution]:
        """Encodes a video that need not fit into memory; the next chunk is computed while one is taken.

        Args:
            frames: a video (N, C, T, H, W), or an iterable of its frames (N, C, H, W); floats in [-1, 1], or
                uint8. They may be plain tensors whatever the backend, which is where the weights are.
            num_frames: how many frames an iterable will give. The first chunk takes what does not divide by
                8, so the length has to be known before the first frame is encoded. Of a video it is its own.
            fetch: what brings a chunk's moments from where they are computed to the host; a method of
                `sharding.Exchange` on a mesh over several processes.

        Returns:
            An iterator over the posteriors of the chunks, as plain torch tensors without gradients; their
            `mode()`s, concatenated on axis 2, are those of `encode`. Where the source of the frames fails,
            what has been computed comes first, then the failure.

        Raises:
            ValueError: a bad video or first frame, or no `num_frames` for an iterable, at once; a bad later
                frame, or more or fewer frames than announced, when it is their turn.
        """
        if isinstance(frames, torch.Tensor):
            self._check_video(frames, follow_weights=True)
            if num_frames not in (None, frames.shape[2]):
                raise ValueError(
                    f"encode_stream got a video of {frames.shape[2]} frames where {num_frames} were "
                    "announced: leave num_frames out, or cut the video"
                )
            size = frames.shape[3:]
            pieces = frames_of_chunks(self, "encode", frames)
        else:
            if num_frames is None:
                raise ValueError("encode_stream got an iterable of unknown length: pass num_frames")
            if num_frames < 1:
                raise ValueError(f"encode_stream got num_frames={num_frames}: at least one frame is needed")
            iterator = iter(frames)
            first = next(iterator, None)
            if first is None:
                raise ValueError(f"encode_stream got no frame where {num_frames} were announced")
            self._check_video(with_time(first), follow_weights=True)
            size = first.shape[-2:]
            pieces = self._gather("encode", first, iterator, num_frames)
        return posteriors(self._stream("encode", pieces, size, fetch))

    @torch.no_grad()
    def _stream(
        self, kind: str, pieces: Iterable[torch.Tensor], size: torch.Size, fetch: Fetch
    ) -> Iterator[torch.Tensor]:
        run = self._run_chunks if not self.use_slicing else self._run_slices
        yield from overlapped(run(kind, pieces, size), fetch)

    def _gather(
        self, kind: str, first: torch.Tensor, rest: Iterator[torch.Tensor], num_frames: int
    ) -> Iterator[torch.Tensor]:
        what, check = ("video", self._check_video) if kind == "encode" else ("latents", self._check_latents)
        return gathered(what, first, rest, chunks.plan(num_frames, frames_a_chunk(self, kind)), check)

    # Decoding

    @functools.wraps(DiffusersAutoencoder.decode)
    def decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        with self._running(z):
            return super().decode(z, return_dict)

    def forward(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As diffusers': encodes, draws of the posterior or takes its mode, decodes."""
        with self._running(sample):
            return super().forward(sample, *args, **kwargs)

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        self._check_latents(z)
        frames = self._whole("decode", z)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def decode_stream(
        self,
        z: torch.Tensor | Iterable[torch.Tensor],
        num_frames: int | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        fetch: Fetch = runtime.to_torch,
    ) -> Iterator[torch.Tensor]:
        """Decodes chunk by chunk; the next chunk is computed while one is taken, and no more than two are
        held.

        Args:
            z: latents (N, C, T, H, W), not scaled by `scaling_factor`; on JAX or plain, whatever the backend,
                which is where the weights are. Or an iterable of such pieces of them, plain, of any lengths.
            num_frames: how many latent frames an iterable will give in all.
            output_dtype: torch.uint8 for bytes (0 to 255); None for the model's dtype, in about [-1, 1].
            fetch: what brings a chunk from where it is computed to the host; a method of `sharding.Exchange`
                on a mesh over several processes.

        Returns:
            An iterator over frames (N, C, t, H, W), plain torch tensors without gradients; together they are
            those of `decode`.

        Raises:
            ValueError: bad latents or a bad first piece, another output dtype, or no `num_frames` for an
                iterable, at once; a bad later piece, or more or fewer frames than announced, when it is their
                turn.
        """
        if output_dtype not in (None, torch.uint8):
            raise ValueError(f"decode_stream got output_dtype {output_dtype}: None or torch.uint8")
        kind = "decode" if output_dtype is None else "decode_uint8"
        if isinstance(z, torch.Tensor):
            self._check_latents(z, follow_weights=True)
            return self._stream(kind, frames_of_chunks(self, "decode", z), z.shape[3:], fetch)
        if num_frames is None or num_frames < 1:
            raise ValueError(
                f"decode_stream got an iterable and num_frames={num_frames}: pass how many it gives"
            )
        iterator = iter(z)
        first = next(iterator, None)
        if first is None:
            raise ValueError(f"decode_stream got no latents where {num_frames} frames were announced")
        self._check_latents(first, follow_weights=True)
        return self._stream(kind, self._gather("decode", first, iterator, num_frames), first.shape[3:], fetch)

    # Tiling: the plan of `tiling.py` in place of diffusers' own

    def tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        """As diffusers' `tiled_encode`, of the right size for any tile size; tiles even where one would
        do."""
        return self._tiled("encode", x)

    def tiled_decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """As diffusers' `tiled_decode`, of the right size for any tile size; tiles even where one would
        do."""
        frames = self._tiled("decode", z)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def _tiled(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        def run() -> torch.Tensor:
            plan = self._tiles.plan(kind, x.shape[3:], self.spatial_scale)
            return runtime.concatenate(list(self._run_tiles(kind, frames_of_chunks(self, kind, x), plan)), 2)

        return self._recorded(kind, x, run, in_tiles=True)

    @property
    def spatial_scale(self) -> int:
        """Sample pixels to a latent pixel, along one axis."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)

    @property
    def _tiles(self) -> tiling.TileSettings:
        return tiling.TileSettings(
            self.tile_latent_min_height,
            self.tile_latent_min_width,
            self.tile_overlap_factor_height,
            self.tile_overlap_factor_width,
        )

    # Running chunks

    def _run_chunks(
        self, kind: str, pieces: Iterable[torch.Tensor], size: torch.Size
    ) -> Iterator[torch.Tensor]:
        """Runs every chunk through the network, in tiles where tiling is on, the convolutions' cache carried
        along."""
        if self.use_tiling and self._tiles.cuts(kind, size, self.spatial_scale):
            yield from self._run_tiles(kind, pieces, self._tiles.plan(kind, size, self.spatial_scale))
            return
        run = self._run(kind)
        for piece in pieces:
            yield run(piece)

    def _run_slices(
        self, kind: str, pieces: Iterable[torch.Tensor], size: torch.Size
    ) -> Iterator[torch.Tensor]:
        """As `_run_chunks`, one video at a time within each chunk."""
        for parts in zip(*(self._run_chunks(kind, own, size) for own in by_video(pieces)), strict=True):
            yield runtime.concatenate(list(parts), 0)

    @contextlib.contextmanager
    def _running(self, x: torch.Tensor) -> Iterator[None]:
        """While a whole input is run: on JAX whether or not this thread has enabled torchax."""
        if not runtime.on_jax(x):
            yield
            return
        with runtime.active():
            yield

    def _whole(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        """All chunks of a video, or of latents, joined."""

        def run() -> torch.Tensor:
            pieces = frames_of_chunks(self, kind, x)
            return runtime.concatenate(list(self._run_chunks(kind, pieces, x.shape[3:])), 2)

        in_tiles = self.use_tiling and self._tiles.cuts(kind, x.shape[3:], self.spatial_scale)
        return self._recorded(kind, x, run, in_tiles=in_tiles)

    def _recorded(
        self, kind: str, x: torch.Tensor, run: Callable[[], torch.Tensor], *, in_tiles: bool
    ) -> torch.Tensor:
        """What `run` gives, for a backward pass where torch records one on JAX. In training mode the forward
        pass keeps what that needs; else the input alone, as most who decode without `torch.no_grad()` never
        ask for gradients."""
        network = chunk_network(self, kind)
        if not runtime.wants_gradient(network, x):
            return run()
        program = self._program(kind, network)
        lengths = [chunk.length for chunk in chunks.plan(x.shape[2], frames_a_chunk(self, kind))]
        whole = functools.partial(program.run_video, lengths=lengths)
        return runtime.differentiable(
            _refuse_gradients if in_tiles else whole,
            network,
            program.weights(network),
            x,
            run=None if self.training and not in_tiles else run,
        )

    @functools.wraps(DiffusersAutoencoder.enable_gradient_checkpointing)
    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any = None) -> None:
        super().enable_gradient_checkpointing(gradient_checkpointing_func or runtime.rematerialized)

    def _run_tiles(
        self, kind: str, pieces: Iterable[torch.Tensor], plan: tiling.TilePlan
    ) -> Iterator[torch.Tensor]:
        """Runs every chunk in tiles; on a mesh as many of one size at a time as it splits a batch over."""
        as_uint8 = kind == "decode_uint8"
        return run_tiles(
            pieces,
            plan,
            functools.partial(self._run, "decode" if as_uint8 else kind),
            dp=1 if self.mesh is None else self.mesh.shape["dp"],
            as_uint8=as_uint8,
            placement=self._placement,
            join_on_jax=runtime.is_on_jax(self),
        )

    def _run(self, kind: str) -> runtime.JaxRun | runtime.NativeRun:
        if runtime.is_on_jax(self):
            network = chunk_network(self, kind)
            return runtime.JaxRun(self._program(kind, network), network)
        return runtime.NativeRun(chunk_network(self, kind))

    def program(self, kind: str) -> runtime.ChunkProgram:
        """The compiled chunk program of "encode", "decode" or "decode_uint8": built when it is first asked
        for, and anew when modules, hooks or attributes are others than those it was traced from."""
        return self._program(kind, chunk_network(self, kind))

    def _program(self, kind: str, network: nn.Module) -> runtime.ChunkProgram:
        return runtime.programs_of(self).get(kind, network, self._compile_for)

    def build_program(self, kind: str, *, stock: bool = False) -> runtime.ChunkProgram:
        """A chunk program of its own, for one that only looks at what it compiles to.

        Args:
            kind: "encode", "decode" or "decode_uint8".
            stock: of diffusers' own modules instead of the ported ones.
        """
        return self._compile_for(chunk_network(stock_of(self) if stock else self, kind))

    def _compile_for(self, network: nn.Module) -> runtime.ChunkProgram:
        if self.mesh is None:
            return runtime.ChunkProgram(network)
        from cogvideox_torchax.sharding import ShardedProgram

        unit = self.spatial_scale if isinstance(network, EncoderChunk) else 1
        return ShardedProgram(network, self.mesh, LAYERS, unit)

    def compile_last_chunk(
        self, shape: tuple[int, ...], *, kind: str = "decode"
    ) -> tuple[runtime.ChunkProgram, Any]:
        """Compiles, without running it, the program of an input's last chunk: of every later one, where there
        are several. The model may be on torch's "meta" device.

        Args:
            shape: the whole input's (N, C, T, H, W): latents to decode, frames to encode.
            kind: "decode", "decode_uint8" or "encode".

        Returns:
            The program and what JAX compiled of it.
        """
        runtime.configure_compile_cache()
        plan = chunks.plan(shape[2], frames_a_chunk(self, kind))
        program = self.build_program(kind)
        dtype = runtime.jax_dtype(self.dtype)

        def structs(length: int) -> tuple[Any, Any]:
            return program.structs((*shape[:2], length, *shape[3:]), dtype)

        weights, chunk = structs(plan[-1].length)
        cache = program.cache_structs(*structs(plan[0].length)) if len(plan) > 1 else None
        return program, program.lower(weights, chunk, cache).compile()

    @property
    def _placement(self) -> "Placement | None":
        if self.mesh is None:
            return None
        from cogvideox_torchax.sharding import Placement

        return Placement(self.mesh)

    def place_on(self, mesh: Any) -> None:
        """Runs on another mesh from now on: the programs compiled so far are dropped.

        Raises:
            ValueError: a mesh that was not made by `make_mesh`.
        """
        from cogvideox_torchax.sharding import check_mesh

        if check_mesh(mesh) != self._mesh:
            self._mesh = mesh
            runtime.forget_programs(self)

    # Checks

    def _check_video(self, x: torch.Tensor, *, follow_weights: bool = False, first_frame: int = 0) -> None:
        channels = self.config["in_channels"]
        check_shape("video", tuple(x.shape), NCTHW, channels=channels, multiple=self.spatial_scale)
        bytes_too = (torch.uint8,) if follow_weights else ()
        self._check_backend_and_dtype("video", x, follow_weights, extra=bytes_too)
        check_finite("video", runtime.first_nonfinite(x), NCTHW, first_frame=first_frame)

    def _check_latents(self, z: torch.Tensor, *, follow_weights: bool = False, first_frame: int = 0) -> None:
        check_shape("latents", tuple(z.shape), NCTHW, channels=self.config["latent_channels"])
        self._check_backend_and_dtype("latents", z, follow_weights)
        check_finite("latents", runtime.first_nonfinite(z), NCTHW, first_frame=first_frame)

    def _check_backend_and_dtype(
        self, what: str, x: torch.Tensor, follow_weights: bool, extra: tuple[torch.dtype, ...] = ()
    ) -> None:
        weights_on_jax = runtime.is_on_jax(self)
        if runtime.on_jax(x) != weights_on_jax and not (follow_weights and weights_on_jax):
            tensor, model = ("jax", "in PyTorch") if runtime.on_jax(x) else (str(x.device), "on jax")
            move = 'vae.to("jax")' if runtime.on_jax(x) else 'the tensor .to("jax")'
            raise ValueError(f"got {what} on {tensor} for weights {model}: move {move}")
        autocast = not weights_on_jax and torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
        if x.dtype not in (self.dtype, *extra) and not autocast:
            raise ValueError(
                f"got {what} of {x.dtype} for weights of {self.dtype}: pass them .to({self.dtype})"
            )


def port_vae(vae: DiffusersAutoencoder) -> AutoencoderKLCogVideoX:
    """Gives diffusers' model and its modules their ported classes, in place; done twice, it is done once."""
    if not isinstance(vae, AutoencoderKLCogVideoX):
        vae.__class__ = _ported_class(type(vae))
        save_as_stock(vae)
        for module in vae.modules():  # that it was switched on for before
            if getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = runtime.rematerialized  # pyright: ignore
    port_modules(vae)
    return vae  # pyright: ignore[reportReturnType]


@functools.cache
def _ported_class(kind: type[DiffusersAutoencoder]) -> Any:
    """The ported class of diffusers' class, or of a subclass of it, whose methods come first."""
    if kind is DiffusersAutoencoder:
        return AutoencoderKLCogVideoX

    def reduce(self: Any, _protocol: Any) -> Any:
        return _revived, (kind,), self.__getstate__()

    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": reduce}
    return type(kind.__name__, (kind, AutoencoderKLCogVideoX), members)  # pyright: ignore


def _revived(kind: type[DiffusersAutoencoder]) -> Any:
    """What the pickle of a ported subclass begins with: its class was made here, and is found nowhere."""
    ported = _ported_class(kind)
    return ported.__new__(ported)


def _refuse_gradients(*_: Any) -> Any:
    raise ValueError("gradients do not pass through tiles on JAX: call disable_tiling() before")
