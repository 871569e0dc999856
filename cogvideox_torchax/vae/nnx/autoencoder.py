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
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from cogvideox_torchax import runtime
from cogvideox_torchax.sharding import check_mesh, spread
from cogvideox_torchax.vae import checkpoint, chunks, tiling
from cogvideox_torchax.vae.axes import NTHWC
from cogvideox_torchax.vae.checks import check_shape, check_values, integers_refused
from cogvideox_torchax.vae.columns import OnColumns
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.nnx import weights
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.modules import Cache, Conv3d, Decoder3D, Encoder3D, LayerConfig
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


class EncoderChunk(OnColumns, nnx.Module):
    """The network that encodes a chunk (N, T, H, W, 3), floats in [-1, 1] or uint8, to its moments."""

    def __init__(self, vae: "FlaxAutoencoderKLCogVideoX"):
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv
        self.dtype = vae.dtype
        # The setting that turns Pallas kernels on or off. It is not read here, but programs are kept by the
        # values of the network's attributes, so a change of the setting gives a new program.
        self.pallas = pallas_mode()

    def __call__(self, x: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
        if x.dtype == jnp.uint8:
            # `from_uint8` turns the zeros of padding columns into -1, and the kernels need zeros there.
            x = with_clear_padding(from_uint8(x, "float32"), self.split)
        moments, cache = self.encoder(x.astype(self.dtype), cache)
        return moments if self.quant_conv is None else self.quant_conv(moments), cache


class DecoderChunk(nnx.Module):
    """The network from a chunk of latents to frames, floats in [-1, 1] or with `as_uint8` bytes."""

    def __init__(
        self, vae: "FlaxAutoencoderKLCogVideoX", *, as_uint8: bool = False, frame_by_frame: bool = False
    ):
        self.decoder = vae.decoder
        self.post_quant_conv = vae.post_quant_conv
        self.dtype = vae.dtype
        self.as_uint8 = as_uint8
        self.frame_by_frame = frame_by_frame  # whether each chunk has one latent frame
        # The setting that turns Pallas kernels on or off. It is not read here, but programs are kept by the
        # values of the network's attributes, so a change of the setting gives a new program.
        self.pallas = pallas_mode()

    def __call__(self, z: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
        z = z.astype(self.dtype)
        if self.post_quant_conv is not None:
            z = self.post_quant_conv(z)
        # `first_frame_alone` says whether the chunk's first frame stays single where the number of frames is
        # doubled. With None the decoder decides: it stays single if the number of frames is odd, which
        # otherwise only the video's first chunk has. With `frame_by_frame` all chunks have one frame, so the
        # later ones, which get a cache, need False.
        first_frame_alone = False if cache is not None and self.frame_by_frame else None
        frames, cache = self.decoder(z, cache, first_frame_alone=first_frame_alone)
        return to_uint8(frames) if self.as_uint8 else frames, cache


class RecordedLayers(nnx.Module):
    """A network that runs another network, and returns the outputs of its layers, by diffusers' names.

    Args:
        network: the network to run. A call swaps the classes of its layers, so it can be called only once.
        wanted: returns whether a layer of this name is recorded.
    """

    def __init__(self, network: EncoderChunk | DecoderChunk, wanted: Callable[[str], Any]):
        self.network = network
        self._wanted = wanted

    def __call__(self, chunk_NTHWC: jax.Array, cache: Cache | None) -> tuple[dict[str, jax.Array], Cache]:
        outputs: dict[str, jax.Array] = {}
        for path, layer in list(nnx.iter_modules(self.network)):
            name = ".".join(map(str, path))
            # The decoder's `norm_out` applies the activation too, so its output differs from diffusers'.
            if self._wanted(name) and name != "decoder.norm_out":
                # Calls of the layer will call `_record`, which stores the output under the layer's name. The
                # `__setattr__` of NNX would make these attributes a part of the module's state.
                object.__setattr__(layer, "__class__", _recording_class(type(layer)))
                object.__setattr__(layer, "_record", functools.partial(outputs.__setitem__, name))
        _, cache = self.network(chunk_NTHWC, cache)
        return outputs, cache


@functools.cache
def _recording_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return a subclass of a layer's class whose calls pass their output, without a cache, to `_record`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        self._record(result[0] if isinstance(result, tuple) else result)
        return result

    return type(kind.__name__, (kind,), {"__call__": call})


@dataclasses.dataclass(frozen=True)
class Network:
    """A Flax network without its weights, in the form that a `runtime.ArrayProgram` takes.

    `graph` is the graph that `nnx.split` returns, and `state` is the tree structure of the weights. A program
    takes the weights as a list, which JAX flattens faster than the tree. `weights` are
    `jax.ShapeDtypeStruct`s, to compile ahead of time; None if the program gets its weights at each call.
    """

    graph: nnx.GraphDef
    state: Any
    name: str
    # Not compared: networks of one graph are equal, and share a program.
    weights: list[Any] | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def split(cls, module: nnx.Module) -> tuple["Network", list[Any]]:
        """Return a module as a network without `weights`, and the module's weights."""
        graph, state = nnx.split(module)
        weights, structure = jax.tree.flatten(state)
        return cls(graph, structure, type(module).__name__), weights

    def __call__(
        self, _place: runtime.Place, weights: list[Any], chunk: jax.Array, cache: Any, split: Split = WHOLE
    ) -> tuple[jax.Array, Cache]:
        """Run a chunk on `weights`; the caches that come in and go out have the axes HWNTC."""
        # A program passes `_place` to every network; this one does not need it.
        network: Any = nnx.merge(self.graph, jax.tree.unflatten(self.state, weights))
        if split != WHOLE:
            network.set_attributes(split=split)  # of all modules that have this attribute
        # `frames_first` turns HWNTC into the NTHWC of the network, and `pixels_first` turns it back. A TPU
        # computes in HWNTC. With caches in another order, each program would rearrange them twice.
        result, cache = network(chunk, jax.tree.map(frames_first, cache))
        return result, jax.tree.map(pixels_first, cache)


compiled = functools.lru_cache(maxsize=256)(runtime.ArrayProgram)
"""Return the program of a `Network` and a placement; models of one graph and placement share it.

The limit of 256 frees the programs of models that are gone.
"""


class CachedProgram(NamedTuple):
    """A chunk's program, which a model keeps because Flax takes long to split a module.

    `attributes` are the values of the attributes of the program's network and of all modules in it. A network
    with the same objects as attributes is the same, and may use the program. `variables` hold the weights, in
    the order in which the program takes them.
    """

    attributes: list[Any]
    program: runtime.ArrayProgram
    variables: list[nnx.Variable]

    @classmethod
    def of(cls, module: nnx.Module, attributes: list[Any], placement: Placement | None) -> "CachedProgram":
        """Return the program of `module`, a network whose `attributes` are those of `_attributes(module)`."""
        network, _weights = Network.split(module)
        # `reduce` follows each path of names and list indices from the module down to its variable.
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(module))]
        variables = [functools.reduce(_child, path, module) for path in paths]
        # `compiled` builds a program, or finds that of another model of the same graph and placement.
        return cls(attributes, compiled(network, placement), variables)

    def is_for(self, attributes: list[Any]) -> bool:
        """Return whether the program is that of a network with these attributes: the same objects."""
        have_equal_length = len(attributes) == len(self.attributes)
        return have_equal_length and all(map(operator.is_, attributes, self.attributes))


def _child(node: Any, key: Any) -> Any:
    """Return what a module has under a key of a path: an entry of a list, or an attribute."""
    return node[key] if isinstance(key, int) else getattr(node, key)


def _attributes(node: Any) -> Iterator[Any]:
    """Yield the values of all attributes of a module and of the modules in it."""
    # By these values `CachedProgram.is_for` tells a changed network from the one that was compiled.
    for name, value in vars(node).items():
        if not name.startswith("_pytree__"):  # Flax itself adds attributes with such names
            yield value
            # A variable holds a weight. Its value is left out, as a program takes new weights as arguments.
            if isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Variable):
                yield from _attributes(value)


_PROGRAMS: weakref.WeakKeyDictionary[nnx.Module, dict[Any, CachedProgram]] = weakref.WeakKeyDictionary()
"""The chunk programs of each model, by (direction, placement, options of the network)."""


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

    num_sample_frames_batch_size = chunks.SAMPLE_FRAMES_A_CHUNK
    num_latent_frames_batch_size = chunks.LATENT_FRAMES_A_CHUNK

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
        self.quant_conv = Conv3d(2 * channels, 2 * channels, layers) if config.use_quant_conv else None
        self.post_quant_conv = Conv3d(channels, channels, layers) if config.use_post_quant_conv else None
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
    def from_tensors(
        cls,
        config: FlaxAutoencoderKLCogVideoXConfig,
        tensors: Iterable[tuple[str, Any]],
        *,
        source: object = "the state dict",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> "FlaxAutoencoderKLCogVideoX":
        """Build a model from diffusers' tensors, which are given as for `load_tensors`.

        Raises:
            ModelError: a tensor is missing, left over or of another shape.
        """
        model = cls.weightless(config, dtype=dtype, param_dtype=param_dtype)
        model.load_tensors(tensors, source=source)
        return model

    @classmethod
    def from_state_dict(
        cls,
        config: FlaxAutoencoderKLCogVideoXConfig | Mapping[str, Any],
        state_dict: dict[str, Any],
        **dtypes: Any,
    ) -> "FlaxAutoencoderKLCogVideoX":
        """Build a model from a torch state dict; `dtypes` are the class's `dtype` and `param_dtype`."""
        if not isinstance(config, FlaxAutoencoderKLCogVideoXConfig):
            config = FlaxAutoencoderKLCogVideoXConfig.from_dict(config)
        return cls.from_tensors(config, weights.from_torch(state_dict), **dtypes)

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
        return cls.from_tensors(
            FlaxAutoencoderKLCogVideoXConfig.from_file(directory),
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
        return Posterior.from_moments(self._joined_results(ENCODE, x))

    def decode(self, z: jax.Array) -> jax.Array:
        """Decode latents (N, t, h, w, C), not scaled by `scaling_factor`, to frames in about [-1, 1].

        Raises:
            ValueError: the latents have another rank or number of channels, or a NaN or Inf.
        """
        return self._joined_results(DECODE, z)

    def decode_frame_by_frame(self, z: jax.Array) -> jax.Array:
        """Decode latents in chunks of one latent frame, which takes about half the memory of `decode`.

        **The frames differ from those of `decode`.** GroupNorm's statistics span the frames of a chunk, and
        the network was trained on chunks of two. docs/accuracy.md has the measured difference. The first
        latent frame gives one frame and each later one gives four, so the result has 4 t - 3 frames. For an
        even t, `decode` gives 4 t.
        """
        return self._joined_results(DECODE, z, frame_by_frame=True)

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

    def _joined_results(
        self, direction: Direction, x: jax.Array, *, frame_by_frame: bool = False
    ) -> jax.Array:
        return runtime.concatenate(list(self._stream(direction, x, frame_by_frame=frame_by_frame)), 1)

    def _stream(
        self, direction: Direction, x: jax.Array, *, frame_by_frame: bool = False, **options: bool
    ) -> Iterator[jax.Array]:
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
        check_values(direction, runtime.largest_of(x), lambda: runtime.first_nonfinite_of(x), NTHWC)
        frame_ranges = chunks.plan(x.shape[1], 1) if frame_by_frame else direction.chunks(self, x.shape[1])
        # If `x` is a NumPy array, only one chunk's frames at a time go to the device.
        cut_chunks = (runtime.take(x, 1, frames.start, len(frames)) for frames in frame_ranges)
        tile_plan = None if self.tiles is None else self.tiles.plan(direction, x.shape[2:4], scale)
        step = self.step(direction, tile_plan, frame_by_frame=frame_by_frame, **options)
        return chunks.run(step, cut_chunks)

    def step(
        self,
        direction: Direction,
        plan: tiling.TilePlan | None = None,
        as_uint8: bool = False,
        frame_by_frame: bool = False,
    ) -> chunks.Step:
        """Return the step of a direction on arrays of JAX or NumPy, with the weights as they are now.

        `plan` has the tiles of a frame; None for whole frames. The other options are those of a
        `DecoderChunk`. The program is taken from an earlier call if the network has not changed since.
        """
        placement = self.placement(direction)
        # Tiles are blended as floats: `tiled_step` converts the blended frames.
        options = {"as_uint8": as_uint8 and plan is None, "frame_by_frame": frame_by_frame}
        network = self.chunk(direction, **options)
        attributes = [*_attributes(network)]  # the same objects as in an earlier call if nothing has changed
        programs = _PROGRAMS.setdefault(self, {})  # of this model
        key = direction, placement, *options.values()
        cached = programs.get(key)
        if cached is None or not cached.is_for(attributes):
            cached = programs[key] = CachedProgram.of(network, attributes, placement)
        # New weights need no new program: the arrays that the variables hold now are passed to it.
        step = cached.program.step([variable.get_raw_value() for variable in cached.variables])
        return step if plan is None else tiling.tiled_step(step, plan, NTHWC, placement, as_uint8)

    def chunk(self, direction: Direction, **options: bool) -> EncoderChunk | DecoderChunk:
        """Return a direction's network; `options` are those of a `DecoderChunk`."""
        return EncoderChunk(self) if direction == ENCODE else DecoderChunk(self, **options)

    def build_program(self, direction: Direction) -> runtime.ArrayProgram:
        """Return a chunk's program, to compile it ahead of time; the model must be `weightless`."""
        network, structs = Network.split(self.chunk(direction))
        return runtime.ArrayProgram(dataclasses.replace(network, weights=structs), self.placement(direction))

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
        self.set_attributes(rematerialize=True)  # of every `Block3D`

    def disable_gradient_checkpointing(self) -> None:
        """Make a backward pass keep all activations, which is the default."""
        self.set_attributes(rematerialize=False)
