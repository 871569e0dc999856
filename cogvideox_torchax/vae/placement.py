"""The sharding of a VAE's arrays on a mesh, and the padding of sizes that do not divide.

One video is split by width over both mesh axes. A batch whose size "dp" divides is split by video over "dp",
and by width over "tp". Any other batch is split as one video is: to pad the batch would cost each device the
work of a video, while to pad a width costs a few columns. Time is never split, and every device has all
weights.

A width that does not divide is padded on entry (`PaddedChunk`): 90 latent columns over 8 devices become 96,
12 a device. Each of the decoder's three upsamplings doubles the width, so a device then has 24, 48 and 96
columns. Kernels get the number of columns that belong to the frame (`jax_kernels.common.columns.Split`), and
the padding is cut off a user's results. Without this XLA would pad each width separately, 180 columns to 8 x
23 and 360 to 8 x 45, and move columns between devices each time.

The letters of axes are N (videos), C (channels), T (frames), H (rows) and W (columns).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cogvideox_torchax.sharding.mesh import AXES, MeshPlace, spread
from cogvideox_torchax.vae.directions import HWNTC, NCTHW, Axes
from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import store_columns_last

if TYPE_CHECKING:
    from torch import nn


class OnColumns:
    """A mixin of modules that pass the sharding of the width, `split`, to their kernels.

    Its value `WHOLE` stands for one device. A program for a mesh traces a copy of the modules, and sets the
    `split` of the copy.
    """

    split: Split = WHOLE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PaddedChunk:
    """A chunk that is padded to split evenly, and its shape without the padding.

    `shape` is static: JAX compiles a program for each shape, even if the padded arrays have one shape.
    """

    array: Any
    shape: tuple[int, ...] = field(metadata={"static": True})


@dataclass(frozen=True)
class Placement(MeshPlace):
    """The sharding of a VAE's chunks, caches and results on a mesh.

    Attributes:
        axes: the order of axes of chunks, activations and results.
        unit: number of columns of a chunk for each column of latents: 1 for latents, 8 for frames. These
            columns stay on one device.
    """

    axes: Axes = NCTHW
    unit: int = 1

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        return self._spec_along(shape, self.axes.index("W"))

    def _spec_along(self, shape: tuple[int, ...], axis: int) -> PartitionSpec:
        """Return the spec of an array that is split by video over "dp", and along `axis` over "tp"."""
        # If "dp" does not divide the number of videos, `axis` is split over all devices, and videos are not.
        video_axis = self.axes.index("N")
        by_video = shape[video_axis] % self.mesh.shape["dp"] == 0
        # By the number of an array's axis, the mesh axes that split it; AXES is ("dp", "tp").
        mesh_axes = {video_axis: "dp", axis: "tp"} if by_video else {axis: AXES}
        return PartitionSpec(*(mesh_axes.get(array_axis) for array_axis in range(len(shape))))

    def padding(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the padding (before, after) of each axis that makes all shards equal, at all resolutions.

        The width of a shard becomes a multiple of `self.unit`, so that each shard has whole latent columns.
        """
        divisors = self.parts(self.spec(shape))
        divisors[self.axes.index("W")] *= self.unit
        # `-size % divisor` is what `size` lacks to the next multiple.
        return [(0, -size % divisor) for size, divisor in zip(shape, divisors, strict=True)]

    def result_without_padding(self, x: jax.Array, split: Split = WHOLE) -> jax.Array:
        """Return a traced result without the padding columns, sharded by `result_spec`.

        Args:
            x: the padded result.
            split: tells how many of its columns belong to the frame; by default all do.
        """
        width_axis = self.axes.index("W")
        width = split.real_columns(x.shape[width_axis])
        # The padded result is constrained to a split by width first. `result_spec` splits by rows or channels
        # if the devices do not divide the width without padding. XLA would otherwise propagate such a split
        # back into earlier layers, and gather their inputs.
        result = jax.lax.slice_in_dim(self.constrain(x), 0, width, axis=width_axis)
        return jax.lax.with_sharding_constraint(
            result, NamedSharding(self.mesh, self.result_spec(result.shape))
        )

    def trace(self, run: Callable[..., Any], inputs: PaddedChunk, cache: Any) -> tuple[jax.Array, Any]:
        """Return `run(array, cache, split=split)`, sharded on the mesh, with the result's padding cut off.

        Args:
            run: returns (result, next cache). `split` tells how the columns are sharded, and how many of them
                belong to the frame.
            inputs: the chunk.
            cache: what the previous chunk's call returned; None for the first chunk of a video.
        """
        video_axis, channel_axis, width_axis = map(self.axes.index, "NCW")
        spec = self.spec(inputs.shape)
        width_axes = spec[width_axis]  # the name of the mesh axis that splits the width, or a tuple of names
        split = Split(
            real=inputs.shape[width_axis],  # columns without padding
            padded=inputs.array.shape[width_axis],
            videos=spec[video_axis],  # the mesh axis that splits videos, or None
            columns=(width_axes,) if isinstance(width_axes, str) else width_axes,
        )
        # Kernels read the mesh that this block sets, and map themselves over its devices.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            result, cache = run(inputs.array, cache, split=split)
            # `columns_last_on` changes no value. With it a TPU stores the result with columns in the lanes of
            # its tiles. The last kernel has the channels there, so few that most lanes are empty.
            result = dispatch(columns_last_on, jnp.moveaxis(result, channel_axis, -1), split=split)
            result = self.result_without_padding(jnp.moveaxis(result, -1, channel_axis), split)
            return result, jax.tree.map(Placement(self.mesh, HWNTC).constrain, cache)

    def watching(self, network: "nn.Module", *, split: Split) -> contextlib.AbstractContextManager[Any]:
        """Give `split`, the sharding of the width, to the modules of a network; return an empty context."""
        for module in network.modules():
            if isinstance(module, OnColumns):  # a layer that passes its `split` to its kernel
                module.split = split
        return super().watching(network)

    def put(self, array: Any) -> PaddedChunk:
        """Return a chunk, a NumPy or a JAX array, padded and sharded over the mesh.

        If there are several processes, each passes an array of the whole shape, of which only the columns of
        its own devices are read.
        """
        shape, sharding = tuple(array.shape), self.sharding(array.shape)
        padding = self.padding(shape)
        if any(after for _, after in padding):  # (before, after) of each axis; nothing is padded before
            array = (jnp.pad if isinstance(array, jax.Array) else np.pad)(array, padding)
        return PaddedChunk(spread(array, sharding), shape)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> PaddedChunk:
        padded_shape = tuple(
            size + after for size, (_before, after) in zip(shape, self.padding(shape), strict=True)
        )
        return PaddedChunk(jax.ShapeDtypeStruct(padded_shape, dtype, sharding=self.sharding(shape)), shape)

    def cache_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        # The axes of the convolutions' caches are in the order that a TPU computes in.
        return Placement(self.mesh, HWNTC).sharding(shape)

    def result_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the spec of a result, which is stored without padding.

        The result is split by width. If the number of devices does not divide the width, it is split by rows,
        and if that number does not divide the rows either, by channels.

        Raises:
            ValueError: the number of devices divides none of the three; the message says what would work.
        """
        width_axis, height_axis, channel_axis = map(self.axes.index, "WHC")
        devices = self.parts(self.spec(shape))[width_axis]  # number of devices that split the width
        for axis in (width_axis, height_axis, channel_axis):
            if shape[axis] % devices == 0:
                return self._spec_along(shape, axis)
        raise ValueError(
            f"got a result of {shape[height_axis]} x {shape[width_axis]} pixels (height x width), "
            f"{shape[channel_axis]} channels: it cannot be split over {devices} devices; make its height or "
            f"width a multiple of {devices}, or the mesh smaller"
        )


@dataclass(frozen=True)
class VideoPlacement(MeshPlace):
    """The sharding of a VAE whose layers cannot split a width: each device runs whole videos, NCTHW.

    A batch is split over "dp" if that divides it; other devices repeat the work.
    """

    def trace(self, run: Callable[..., Any], inputs: Any, cache: Any) -> Any:
        videos = "dp" if inputs.shape[0] % self.mesh.shape["dp"] == 0 else None

        def spec(axes: Axes) -> PartitionSpec:
            return PartitionSpec(*(videos if axis == "N" else None for axis in axes))

        result, cache = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(spec(NCTHW), spec(HWNTC)),
            out_specs=(spec(NCTHW), spec(HWNTC)),
            check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
        )(inputs, cache)
        return jax.lax.with_sharding_constraint((result, cache), self.replicated)


def columns_last_on(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x` unchanged; a TPU stores it with columns, not its few channels, in the lanes of tiles.

    `dispatch` passes `target`: the platform that the operation is traced for, and the sharding of columns.
    """
    return map_shards(target, store_columns_last, (x_NTHWC,))
