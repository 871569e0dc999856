"""The VAE in Flax NNX, which encodes and decodes a chunk at a time.

Each chunk gives a *cache* to the next one: the last input frames of each causal convolution. A *network* runs
one chunk, (chunk, cache) -> (result, next cache). The encoder's results are called *moments*: the means of
the latents, then their log-variances, along the channels. `split` is the sharding of the width over devices.
If it does not divide the width, there are padding columns, which have to be zero for the kernels.

Axis letters: N videos, T frames, H rows, W columns, C channels; t, h and w are the sizes of latents. Arrays
are NTHWC.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from cogvideox_torchax.arrays import places, values
from cogvideox_torchax.sharding import check_mesh, spread
from cogvideox_torchax.vae import checkpoint, chunks, tiling
from cogvideox_torchax.vae.checks import check_shape, check_values, integers_refused
from cogvideox_torchax.vae.directions import DECODE, ENCODE, NTHWC, Direction
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.modules import Context, Conv, Decoder3D, Encoder3D, LayerConfig, run_layers
from cogvideox_torchax.vae.pixels import from_uint8, to_uint8
from cogvideox_torchax.vae.placement import Placement
from jax_kernels.common.columns import WHOLE, Split, with_clear_padding
from jax_kernels.common.frames import frames_first, pixels_first
from jax_kernels.common.tiles import pallas_mode


class Posterior(NamedTuple):
    """A diagonal Gaussian over latents (N, t, h, w, C)."""

    mean: jax.Array
    logvar: jax.Array

    @classmethod
    def from_moments(cls, moments: jax.Array) -> "Posterior":
        """Return the posterior of moments (N, t, h, w, 2 C), with log-variances clamped as in diffusers."""
        mean, logvar = jnp.split(moments, 2, axis=-1)
        return cls(mean, jnp.clip(logvar, -30.0, 20.0))

    def mode(self) -> jax.Array:
        """Return the mode of the latents, which is the mean."""
        return self.mean

    def sample(self, key: jax.Array) -> jax.Array:
        """Draw latents from the posterior; the same key draws the same latents."""
        return self.mean + jnp.exp(0.5 * self.logvar) * jax.random.normal(
            key, self.mean.shape, self.mean.dtype
        )


LAYERS = {ENCODE: ("encoder", "quant_conv"), DECODE: ("post_quant_conv", "decoder")}
"""The model's modules that run in a direction, in order. The convolutions are None in most models."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A direction's network of one chunk without its weights, as a `places.ArrayProgram` takes it.

    Networks of an equal structure are equal, and share a program.

    Attributes:
        direction: the direction, which also names the program.
        structure: the tree structure of the modules that run; its leaves are the weights.
        dtype: the dtype to compute in.
        as_uint8: whether decoded frames are bytes, and not floats in [-1, 1].
        records: whether the result is the outputs of all layers, by diffusers' names.
        pallas: the setting that turns Pallas kernels on or off, as a change of it gives another program.
        weights: `jax.ShapeDtypeStruct`s, to compile ahead of time; None if a program gets weights at a call.
    """

    direction: Direction
    structure: Any
    dtype: Any
    as_uint8: bool = False
    records: bool = False
    pallas: str = dataclasses.field(default_factory=pallas_mode)
    weights: list[Any] | None = dataclasses.field(default=None, compare=False)

    @property
    def name(self) -> str:
        return "EncoderChunk" if self.direction == ENCODE else "DecoderChunk"

    def __call__(
        self, _place: places.Place, weights: list[Any], chunk: jax.Array, cache: Any, split: Split = WHOLE
    ) -> tuple[Any, Any]:
        """Run a chunk on `weights`; the caches that come in and go out have the axes HWNTC."""
        # A program passes `_place` to every network; this one does not need it.
        modules = zip(LAYERS[self.direction], jax.tree.unflatten(self.structure, weights), strict=True)
        layers = {name: module for name, module in modules if module is not None}
        if chunk.dtype == jnp.uint8:
            # `from_uint8` turns the zeros of padding columns into -1, and the kernels need zeros there.
            chunk = with_clear_padding(from_uint8(chunk, "float32"), split)
        context = Context({}, split)
        # `frames_first` turns HWNTC into the NTHWC of the network, and `pixels_first` turns it back. A TPU
        # computes in HWNTC. With caches in another order, each program would rearrange them twice.
        cache = jax.tree.map(frames_first, cache)
        result, cache = run_layers(layers, chunk.astype(self.dtype), cache, context)
        result = to_uint8(result) if self.as_uint8 else result
        return context.outputs if self.records else result, jax.tree.map(pixels_first, cache)


compiled = functools.lru_cache(maxsize=256)(places.ArrayProgram)
"""Return the program of a `Network` and a placement; equal networks of one placement share it.

The limit of 256 frees the programs of models that are gone.
"""


class FlaxAutoencoderKLCogVideoX(nnx.Module):
    """CogVideoX's VAE, which computes the same as diffusers' `AutoencoderKLCogVideoX`, on NTHWC arrays.

    Args:
        config: the sizes of the model.
        dtype: the dtype to compute in. The norms' statistics are always float32.
        param_dtype: the dtype to store the parameters in.
        rngs: the keys of random parameters.

    Attributes:
        mesh: the mesh that was given to `place_on`; None for one device.
        tiles: the settings of overlapping tiles, for frames larger than a tile; None for whole frames.
    """

    num_sample_frames_batch_size = 8  # frames of a chunk to encode, by diffusers' name
    num_latent_frames_batch_size = 2  # latent frames of a chunk to decode

    def __init__(
        self,
        config: FlaxAutoencoderKLCogVideoXConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.param_dtype = jnp.dtype(param_dtype)
        self.mesh = None
        self.encoder = Encoder3D(config, param_dtype=param_dtype, rngs=rngs)
        self.decoder = Decoder3D(config, param_dtype=param_dtype, rngs=rngs)
        # These two convolutions take latents, but diffusers sizes them by the channels of frames.
        channels = config.out_channels
        layers = LayerConfig(rngs, param_dtype=param_dtype)
        self.quant_conv = Conv(2 * channels, 2 * channels, layers) if config.use_quant_conv else None
        self.post_quant_conv = Conv(channels, channels, layers) if config.use_post_quant_conv else None
        self.tiles: tiling.TileSettings | None = None

    # Weights

    @classmethod
    def weightless(
        cls, config: FlaxAutoencoderKLCogVideoXConfig, **dtypes: Any
    ) -> "FlaxAutoencoderKLCogVideoX":
        """Return a model whose weights are `jax.ShapeDtypeStruct`s, which take no memory.

        `dtypes` are the class's `dtype` and `param_dtype`.
        """
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **dtypes))

    @classmethod
    def from_state_dict(
        cls,
        config: FlaxAutoencoderKLCogVideoXConfig | Mapping[str, Any],
        state_dict: Any,
        *,
        source: object = "the state dict",
        **dtypes: Any,
    ) -> "FlaxAutoencoderKLCogVideoX":
        """Build a model from diffusers' tensors.

        Args:
            config: the sizes of the model.
            state_dict: a torch state dict, or an iterable of pairs of a name and a NumPy array, which are
                read one at a time.
            source: what an error calls the weights.
            dtypes: the class's `dtype` and `param_dtype`.

        Raises:
            ModelError: a tensor is missing, left over or of another shape.
        """
        if not isinstance(config, FlaxAutoencoderKLCogVideoXConfig):
            config = FlaxAutoencoderKLCogVideoXConfig.from_dict(config)
        model = cls.weightless(config, **dtypes)
        tensors = weights.from_torch(state_dict) if isinstance(state_dict, Mapping) else state_dict
        model.load_tensors(tensors, source=source)
        return model

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "FlaxAutoencoderKLCogVideoX":
        """Load diffusers' weights from a directory or from the hub, tensor by tensor.

        Args:
            name: a local directory or a hub id.
            subfolder: the VAE's folder in `name`: "vae" for a whole pipeline.
            variant: the variant of the weight files, such as "fp16".
            dtype, param_dtype: the dtypes to compute in, and to store the parameters in.
            revision, token, cache_dir, local_files_only: the hub's options.

        Raises:
            ModelError: a file is missing or wrong; this `ValueError` says what to do.
        """
        directory = checkpoint.locate_vae(
            name,
            subfolder,
            variant,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        return cls.from_state_dict(
            checkpoint.read_config(directory),
            checkpoint.read_tensors(checkpoint.weight_files(directory, variant)),
            source=directory,
            dtype=dtype,
            param_dtype=param_dtype,
        )

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model as diffusers' `AutoencoderKLCogVideoX` loads it, in `param_dtype`."""
        weights.save(nnx.state(self, nnx.Param), self.config, directory)

    def load_tensors(self, tensors: Iterable[tuple[str, Any]], *, source: object = "the state dict") -> None:
        """Replace all weights by diffusers' tensors, or none of them if one does not fit.

        Args:
            tensors: pairs of a name and a NumPy array, which are read one at a time.
            source: what an error calls the weights.

        Raises:
            ModelError: a tensor is missing, left over or of another shape.
        """
        state = nnx.state(self, nnx.Param)
        nnx.update(self, weights.read_state(state, tensors, source=source, param_dtype=self.param_dtype))
        if self.mesh is not None:  # the new weights are on one device
            self.place_on(self.mesh)

    def cast(self, dtype: DTypeLike) -> None:
        """Store the parameters in another dtype, and compute in it."""
        self.dtype = self.param_dtype = jnp.dtype(dtype)
        nnx.update(self, jax.tree.map(lambda weight: weight.astype(dtype), nnx.state(self, nnx.Param)))

    # Encoding and decoding

    def encode(self, x: jax.Array) -> Posterior:
        """Return the posterior of videos (N, T, H, W, C), floats in [-1, 1] or uint8.

        Raises:
            ValueError: the videos have another rank, number of channels or size, or a NaN or Inf.
        """
        return Posterior.from_moments(values.concatenate(list(self._stream(ENCODE, x)), 1))

    def decode(self, z: jax.Array) -> jax.Array:
        """Decode latents (N, t, h, w, C), not scaled by `scaling_factor`, to frames in about [-1, 1].

        Raises:
            ValueError: the latents have another rank or number of channels, or a NaN or Inf.
        """
        return values.concatenate(list(self._stream(DECODE, z)), 1)

    def encode_stream(self, x: jax.Array) -> Iterator[Posterior]:
        """Encode chunk by chunk; a chunk is computed when its latents are asked for."""
        return map(Posterior.from_moments, self._stream(ENCODE, x))

    def decode_stream(self, z: jax.Array, *, output_dtype: DTypeLike | None = None) -> Iterator[jax.Array]:
        """Decode chunk by chunk; a chunk is computed when its frames are asked for.

        Args:
            z: latents, as for `decode`.
            output_dtype: jnp.uint8 for bytes (0 to 255); None for the model's dtype, in about [-1, 1].

        Raises:
            ValueError: `decode` does not take the latents, or the output dtype is another one.
        """
        if output_dtype is not None and jnp.dtype(output_dtype) != jnp.uint8:
            raise ValueError(f"decode_stream got output_dtype {output_dtype}: None or jnp.uint8")
        return self._stream(DECODE, z, as_uint8=output_dtype is not None)

    def _stream(self, direction: Direction, x: jax.Array, **options: bool) -> Iterator[jax.Array]:
        """Check an input, and return an iterator over its chunks' results; `options` are those of `step`."""
        if not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(
                f"got {type(x).__name__} where the model takes an array of JAX or NumPy: pass "
                "numpy.asarray(...) of a tensor, channels last, or the mode() of a posterior, or use "
                "FlaxVAEForPipelines"
            )
        scale = self.config.spatial_compression_ratio
        check_shape(direction, x.shape, NTHWC, vars(self.config), scale)
        if not jnp.issubdtype(x.dtype, jnp.floating) and (direction, x.dtype) != (ENCODE, jnp.uint8):
            raise integers_refused(direction, x.dtype)
        check_values(direction, values.largest_of(x), lambda: values.first_nonfinite_of(x), NTHWC)
        # If `x` is a NumPy array, only one chunk's frames at a time go to the device.
        cut_chunks = (
            values.take(x, 1, frames.start, len(frames)) for frames in direction.chunks(self, x.shape[1])
        )
        tile_plan = None if self.tiles is None else self.tiles.plan(direction, x.shape[2:4], scale)
        return chunks.run(self.step(direction, tile_plan, **options), cut_chunks)

    def step(self, direction: Direction, plan: tiling.TilePlan | None = None, **options: Any) -> chunks.Step:
        """Return the step of a direction on arrays of JAX or NumPy, with the weights as they are now.

        `plan` has the tiles of a frame; None for whole frames. `options` are those of a `Network`.
        """
        placement = self.placement(direction)
        if plan is None:
            network, weights = self.network(direction, **options)
            return compiled(network, placement).step(weights)
        # Tiles are blended as floats: `tiled_step` converts the blended frames.
        as_uint8 = options.pop("as_uint8", False)
        return tiling.tiled_step(self.step(direction, **options), plan, NTHWC, placement, as_uint8)

    def network(self, direction: Direction, **options: Any) -> tuple[Network, list[Any]]:
        """Return a direction's network and the weights that it takes; `options` are those of a `Network`."""
        weights, structure = jax.tree.flatten([getattr(self, name) for name in LAYERS[direction]])
        return Network(direction, structure, self.dtype, **options), weights

    # Several devices

    def place_on(self, mesh: jax.sharding.Mesh) -> None:
        """Run on a mesh of `cogvideox_torchax.make_mesh` from now on; the weights are copied to its devices.

        A single video is split by width over all devices. If "dp" divides the number of videos, the batch is
        split by video over "dp" and by width over "tp". Every width is valid. Inputs may be on any device;
        results are sharded.

        Raises:
            ValueError: the mesh was not made by `make_mesh`.
        """
        self.mesh = check_mesh(mesh)
        # `replicated` is the sharding in which each device has a whole copy.
        move = functools.partial(spread, sharding=Placement(mesh).replicated)
        nnx.update(self, jax.tree.map(move, nnx.state(self, nnx.Param)))

    def __copy__(self) -> "FlaxAutoencoderKLCogVideoX":
        """Return a model with the same modules, weights and mesh."""
        # Without this method `copy.copy` would use `__getstate__`, which leaves out the mesh.
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mesh": None}  # a mesh's devices cannot be pickled

    def placement(self, direction: Direction) -> Placement | None:
        """Return the sharding of a direction's arrays on the mesh; None for one device."""
        if self.mesh is None:
            return None
        return Placement(
            self.mesh,
            axes=NTHWC,
            # The input columns of a latent pixel, which must be on one device.
            unit=direction.scale(self.config.spatial_compression_ratio),
        )

    # Training

    def enable_gradient_checkpointing(self) -> None:
        """Make a backward pass recompute the activations of residual blocks, instead of keeping them."""
        self.set_attributes(rematerialize=True)  # of every `ResnetBlock3D`

    def disable_gradient_checkpointing(self) -> None:
        """Make a backward pass keep all activations, which is the default."""
        self.set_attributes(rematerialize=False)
