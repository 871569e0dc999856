"""AutoencoderKLCogVideoX: diffusers' class, ported: encode, decode, and their streams.

Axis letters: N videos, C channels, T frames, H rows, W columns. Public tensors are NCTHW.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from torch import nn

from cogvideox_torchax import checkpoint, chunks, runtime, tiling
from cogvideox_torchax.modules import port_modules
from jax_kernels.columns import with_clear_padding

if TYPE_CHECKING:
    from cogvideox_torchax.sharding import Placement

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""From a torchax tensor that may still be being computed to a plain one."""

ROW_AXIS = 3
TORCH_ARRAYS = tiling.ArrayLibrary(
    concatenate=lambda parts, axis: torch.cat(list(parts), dim=axis),
    asarray=lambda array, like: torch.as_tensor(array, device=like.device),
)


class EncoderChunk(nn.Module):
    """One chunk of frames to its moments: float frames in [-1, 1], or uint8."""

    def __init__(self, vae: DiffusersAutoencoder):
        super().__init__()
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv

    def forward(self, x: torch.Tensor, conv_cache: Any) -> tuple[torch.Tensor, Any]:
        if x.dtype == torch.uint8:
            x = from_uint8(x, self.encoder.conv_in.conv.weight.dtype)
        moments, conv_cache = self.encoder(x, conv_cache=conv_cache)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        return moments, conv_cache


class DecoderChunk(nn.Module):
    """One chunk of latents to its frames, in [-1, 1], or as uint8."""

    def __init__(self, vae: DiffusersAutoencoder, as_uint8: bool = False):
        super().__init__()
        self.decoder = vae.decoder
        self.post_quant_conv = vae.post_quant_conv
        self.as_uint8 = as_uint8

    def forward(self, z: torch.Tensor, conv_cache: Any) -> tuple[torch.Tensor, Any]:
        if self.post_quant_conv is not None:
            z = self.post_quant_conv(z)
        frames, conv_cache = self.decoder(z, conv_cache=conv_cache)
        return to_uint8(frames) if self.as_uint8 else frames, conv_cache


def from_uint8(frames: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes (N, C, T, H, W) as frames in [-1, 1]; columns that pad a share of them stay zeros."""
    frames = (frames.to(torch.float32) / 127.5 - 1.0).to(dtype)
    return runtime.torch_view(with_clear_padding)(frames, 4) if runtime.on_jax(frames) else frames


def to_uint8(frames: torch.Tensor) -> torch.Tensor:
    """Frames in [-1, 1] as bytes, rounded as diffusers' VideoProcessor does."""
    return ((frames.to(torch.float32) * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


class AutoencoderKLCogVideoX(DiffusersAutoencoder):
    """CogVideoX's VAE on torchax, by diffusers' own names.

    A plain torch tensor runs natively in PyTorch; a torchax tensor runs on JAX, a chunk of frames at a time,
    two compiled programs for a video of any length. `vae.to("jax")` moves the weights, `x.to("jax")` an
    input.
    """

    @functools.wraps(DiffusersAutoencoder.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        port_modules(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_programs", None)  # compiled for this very object
        return state

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
        name = str(pretrained_model_name_or_path)
        directory = Path(name) / (subfolder or "")
        if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            checkpoint.check_directory(directory, variant)
        options = {
            **diffusers_options,
            "subfolder": subfolder,
            "variant": variant,
            "torch_dtype": torch_dtype or torch.float32,
        }
        load = functools.partial(
            super().from_pretrained, name, use_safetensors=True, output_loading_info=True, **options
        )
        try:
            vae, info = runtime.without_torchax(load)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise checkpoint.ModelError(f"cannot load {name}: {reason}") from error
        checkpoint.check_loading_info(info, name)
        return vae.eval()

    def save_pretrained(self, save_directory: str | Path, **diffusers_options: Any) -> None:  # pyright: ignore
        """As diffusers', in safetensors, from whichever backend the weights are on."""
        runtime.without_torchax(self._save, save_directory, **diffusers_options)

    def _save(self, save_directory: str | Path, **diffusers_options: Any) -> None:
        if not runtime.on_jax(next(self.parameters())):
            super().save_pretrained(save_directory, **diffusers_options)
            return
        native: Any = DiffusersAutoencoder.from_config(self.config)
        native.to(self.dtype)
        native.load_state_dict({name: runtime.to_torch(value) for name, value in self.state_dict().items()})
        native.save_pretrained(save_directory, **diffusers_options)

    # Encoding

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        self._check_video(x)
        return torch.cat(
            list(self._encoded(self._split(x, self.num_sample_frames_batch_size), x.shape[3:])), dim=2
        )

    @torch.no_grad()
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
                8, so the length has to be known before the first frame is encoded.
            fetch: what brings a chunk's moments from where they are computed to the host; a method of
                `sharding.Exchange` on a mesh over several processes.

        Yields:
            The posterior of each chunk as plain torch tensors; their `mode()`s, concatenated on axis 2, are
            those of `encode`.

        Raises:
            ValueError: a bad frame, no `num_frames` for an iterable, or more or fewer frames than announced.
        """
        if isinstance(frames, torch.Tensor):
            self._check_video(frames, follow_weights=True)
            size = frames.shape[3:]
            pieces = self._split(frames, self.num_sample_frames_batch_size)
        else:
            if num_frames is None:
                raise ValueError("encode_stream got an iterable of unknown length: pass num_frames")
            iterator = iter(frames)
            first = next(iterator, None)
            if first is None:
                raise ValueError(f"encode_stream got no frame where {num_frames} were announced")
            size = first.shape[-2:]
            pieces = self._gather(first, iterator, num_frames)
        for moments in _overlapped(self._encoded(pieces, size), fetch):
            yield DiagonalGaussianDistribution(moments)

    def _gather(
        self, first: torch.Tensor, rest: Iterator[torch.Tensor], num_frames: int
    ) -> Iterator[torch.Tensor]:
        """Chunks (N, C, t, H, W) out of single frames (N, C, H, W), each checked."""
        taken = 0
        for chunk in chunks.plan(num_frames, self.num_sample_frames_batch_size):
            buffer: list[torch.Tensor] = []
            while len(buffer) < chunk.length:
                frame = first if taken == 0 else next(rest, None)
                if frame is None:
                    raise ValueError(
                        f"the video ended after {taken} frames where {num_frames} were announced"
                    )
                if frame.shape != first.shape:
                    raise ValueError(
                        f"frame {taken} is {tuple(frame.shape)}, the ones before it {tuple(first.shape)}"
                    )
                buffer.append(frame)
                taken += 1
            piece = torch.stack(buffer, dim=2)
            self._check_video(piece, follow_weights=True, first_frame=chunk.start)
            yield piece
        if next(rest, None) is not None:
            raise ValueError(f"the video goes on after the {num_frames} frames that were announced")

    def _encoded(self, pieces: Iterable[torch.Tensor], size: torch.Size) -> Iterator[torch.Tensor]:
        return self._run_chunks("encode", pieces, size)

    # Decoding

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        self._check_latents(z)
        pieces = self._split(z, self.num_latent_frames_batch_size)
        frames = torch.cat(list(self._run_chunks("decode", pieces, z.shape[3:])), dim=2)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    @torch.no_grad()
    def decode_stream(
        self, z: torch.Tensor, *, output_dtype: torch.dtype | None = None, fetch: Fetch = runtime.to_torch
    ) -> Iterator[torch.Tensor]:
        """Decodes chunk by chunk; the next chunk is computed while one is taken, and no more than two are
        held.

        Args:
            z: latents (N, C, T, H, W), not scaled by `scaling_factor`; on JAX or plain, whatever the backend,
                which is where the weights are.
            output_dtype: torch.uint8 for bytes (0 to 255); None for the model's dtype, in about [-1, 1].
            fetch: what brings a chunk from where it is computed to the host; a method of `sharding.Exchange`
                on a mesh over several processes.

        Yields:
            Frames (N, C, t, H, W) as plain torch tensors; together they are those of `decode`.

        Raises:
            ValueError: bad latents or another output dtype.
        """
        if output_dtype not in (None, torch.uint8):
            raise ValueError(f"decode_stream got output_dtype {output_dtype}: None or torch.uint8")
        self._check_latents(z, follow_weights=True)
        pieces = self._split(z, self.num_latent_frames_batch_size)
        kind = "decode" if output_dtype is None else "decode_uint8"
        yield from _overlapped(self._run_chunks(kind, pieces, z.shape[3:]), fetch)

    # Tiling: the plan of `tiling.py` in place of diffusers' own

    def tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        """As diffusers' `tiled_encode`, of the right size for any tile size; tiles even where one would
        do."""
        return self._tiled("encode", x, self.num_sample_frames_batch_size)

    def tiled_decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """As diffusers' `tiled_decode`, of the right size for any tile size; tiles even where one would
        do."""
        frames = self._tiled("decode", z, self.num_latent_frames_batch_size)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def _tiled(self, kind: str, x: torch.Tensor, frames_a_chunk: int) -> torch.Tensor:
        plan = self._tile_plan(kind, x.shape[3:])
        return torch.cat(list(self._run_tiles(kind, self._split(x, frames_a_chunk), plan)), dim=2)

    @property
    def spatial_scale(self) -> int:
        """Sample pixels to a latent pixel, along one axis."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)

    def _tile_plan(self, kind: str, size: torch.Size) -> tiling.TilePlan:
        scales = (self.spatial_scale, 1) if kind == "encode" else (1, self.spatial_scale)
        plan = functools.partial(tiling.plan_axis, scale_in=scales[0], scale_out=scales[1])
        return tiling.TilePlan(
            plan(size[0], tile=self.tile_latent_min_height, overlap=self.tile_overlap_factor_height),
            plan(size[1], tile=self.tile_latent_min_width, overlap=self.tile_overlap_factor_width),
        )

    def _wants_tiles(self, kind: str, size: torch.Size) -> bool:
        if not self.use_tiling:
            return False
        scale = self.spatial_scale if kind == "encode" else 1
        return size[0] > self.tile_latent_min_height * scale or size[1] > self.tile_latent_min_width * scale

    # Running chunks

    def _split(self, x: torch.Tensor, frames_a_chunk: int) -> Iterator[torch.Tensor]:
        for chunk in chunks.plan(x.shape[2], frames_a_chunk):
            yield runtime.take_frames(x, chunk.start, chunk.length)

    def _run_chunks(
        self, kind: str, pieces: Iterable[torch.Tensor], size: torch.Size
    ) -> Iterator[torch.Tensor]:
        """Runs every chunk through the network, in tiles where tiling is on, the convolutions' cache carried
        along."""
        if self._wants_tiles(kind, size):
            yield from self._run_tiles(kind, pieces, self._tile_plan(kind, size))
            return
        run = self._run(kind)
        for piece in pieces:
            yield run(piece)

    def _run_tiles(
        self, kind: str, pieces: Iterable[torch.Tensor], plan: tiling.TilePlan
    ) -> Iterator[torch.Tensor]:
        as_uint8 = kind == "decode_uint8"
        network = "decode" if as_uint8 else kind
        runs = [[self._run(network) for _ in plan.columns.spans] for _ in plan.rows.spans]
        join = _jitted_join() if runtime.on_jax(next(self.parameters())) else _join
        for piece in pieces:
            cut = _jitted_cut() if runtime.on_jax(piece) else _cut
            outputs = [
                [run(tile) for run, tile in zip(*row, strict=True)]
                for row in zip(runs, cut(plan, piece), strict=True)
            ]
            yield join((plan, as_uint8, self._placement), outputs)

    def _run(self, kind: str) -> runtime.JaxRun | runtime.NativeRun:
        if runtime.on_jax(next(self.parameters())):
            return runtime.JaxRun(self.program(kind))
        return runtime.NativeRun(self._network(kind))

    def _network(self, kind: str) -> nn.Module:
        if kind == "encode":
            return EncoderChunk(self)
        return DecoderChunk(self, as_uint8=kind == "decode_uint8")

    def program(self, kind: str) -> runtime.ChunkProgram:
        """The compiled chunk program of "encode", "decode" or "decode_uint8"; built at the first call, then
        kept."""
        programs = self.__dict__.setdefault("_programs", {})
        if kind not in programs:
            programs[kind] = self.build_program(kind)
        return programs[kind]

    def build_program(self, kind: str) -> runtime.ChunkProgram:
        """A chunk program of its own, for one that only looks at what it compiles to."""
        network = self._network(kind)
        if self.mesh is None:
            return runtime.ChunkProgram(network)
        from cogvideox_torchax.sharding import ShardedProgram

        return ShardedProgram(network, self.mesh, unit=self.spatial_scale if kind == "encode" else 1)

    @property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh` that this model runs on, as given to `port`; None for a single device."""
        return self.__dict__.get("_mesh")

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

        self.__dict__["_mesh"] = check_mesh(mesh)
        self.__dict__.pop("_programs", None)

    # Checks

    def _check_video(self, x: torch.Tensor, *, follow_weights: bool = False, first_frame: int = 0) -> None:
        _check_rank_and_channels("video", x, self.config["in_channels"])
        scale = self.spatial_scale
        if x.shape[3] % scale or x.shape[4] % scale or 0 in x.shape:
            height, width = (max(size // scale * scale, scale) for size in x.shape[3:])
            raise ValueError(
                f"got a video of {x.shape[3]} x {x.shape[4]} pixels (height x width): both must be "
                f"multiples of {scale}; crop it to {height} x {width}"
            )
        self._check_backend_and_dtype(
            "video", x, follow_weights, extra=(torch.uint8,) if follow_weights else ()
        )
        _check_finite("video", x, first_frame)

    def _check_latents(self, z: torch.Tensor, *, follow_weights: bool = False) -> None:
        _check_rank_and_channels("latents", z, self.config["latent_channels"])
        self._check_backend_and_dtype("latents", z, follow_weights)
        _check_finite("latents", z)

    def _check_backend_and_dtype(
        self, what: str, x: torch.Tensor, follow_weights: bool, extra: tuple[torch.dtype, ...] = ()
    ) -> None:
        weights_on_jax = runtime.on_jax(next(self.parameters()))
        if runtime.on_jax(x) != weights_on_jax and not (follow_weights and weights_on_jax):
            tensor, model = ("jax", "in PyTorch") if runtime.on_jax(x) else (str(x.device), "on jax")
            move = 'vae.to("jax")' if runtime.on_jax(x) else 'the tensor .to("jax")'
            raise ValueError(f"got {what} on {tensor} for weights {model}: move {move}")
        if x.dtype not in (self.dtype, *extra):
            raise ValueError(
                f"got {what} of {x.dtype} for weights of {self.dtype}: pass them .to({self.dtype})"
            )


def _check_rank_and_channels(what: str, x: torch.Tensor, channels: int) -> None:
    if x.ndim != 5:
        raise ValueError(f"got {what} of rank {x.ndim}, shape {tuple(x.shape)}: it takes (N, C, T, H, W)")
    if x.shape[1] != channels:
        raise ValueError(
            f"got {what} of {x.shape[1]} channels, shape {tuple(x.shape)}: the model takes {channels}"
        )
    if 0 in x.shape:
        raise ValueError(f"got empty {what}, shape {tuple(x.shape)}")


def _check_finite(what: str, x: torch.Tensor, first_frame: int = 0) -> None:
    if not x.dtype.is_floating_point:
        return
    index = runtime.first_nonfinite(x)
    if index is not None:
        n, c, t, h, w = index
        raise ValueError(
            f"got NaN or Inf in the {what}: video {n}, frame {t + first_frame}, channel {c}, row {h}, "
            f"column {w}; find where they come from (float16 overflows: try bfloat16 or float32)"
        )


def _overlapped(results: Iterator[torch.Tensor], fetch: Fetch) -> Iterator[torch.Tensor]:
    """Each result on the host, asked for only when the next one is already being computed."""
    previous = None
    for result in results:
        runtime.fetch_async(result)
        if previous is not None:
            yield fetch(previous)
        previous = result
    if previous is not None:
        yield fetch(previous)


def _cut(plan: tiling.TilePlan, x: torch.Tensor) -> list[list[torch.Tensor]]:
    return tiling.cut(x, plan, row_axis=ROW_AXIS)


def _join(
    static: "tuple[tiling.TilePlan, bool, Placement | None]", outputs: list[list[torch.Tensor]]
) -> torch.Tensor:
    plan, as_uint8, placement = static
    frames = tiling.join(outputs, plan, TORCH_ARRAYS, row_axis=ROW_AXIS)
    frames = to_uint8(frames) if as_uint8 else frames
    return runtime.torch_view(placement.hand_out)(frames) if placement and runtime.on_jax(frames) else frames


@functools.cache
def _jitted_cut():
    return runtime.jit_torch(_cut)


@functools.cache
def _jitted_join():
    return runtime.jit_torch(_join)
