"""The dp x tp mesh, devices in a grid of two axes, and a program's arrays on it, whole or split.

A *spec* is a `PartitionSpec`: it names, for each axis of an array, the mesh axes that split it. An
*activation* is an array between layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cogvideox_torchax.arrays.places import Place
from cogvideox_torchax.upstream import is_traced

AXES = ("dp", "tp")
"""The names of the mesh's axes; "dp" is data parallel, "tp" tensor parallel."""

Parallel = Literal["context", "tensor"]
"""The dimension that a transformer splits over "tp": its tokens, or its weights' channels."""


def make_mesh(
    dp: int | None = None,
    tp: int | None = None,
    *,
    guided: bool = False,
    heads: int | None = None,
    devices: Any = None,
) -> Mesh:
    """Make a mesh with the axes "dp" and "tp", for `port(..., mesh=mesh)`.

    Args:
        dp: number of devices that split a batch; None for 1, or with guidance for 2 where there are as many.
        tp: number of devices that split a width; None for all devices over `dp`, or with `heads` for as many
            of them as divide these.
        guided: whether a pipeline is called with classifier-free guidance, so that each video is twice in a
            batch. Without it the devices of an axis "dp" would do the same work.
        heads: number of the transformer's attention heads, `config["num_attention_heads"]`.
        devices: devices in order, of which the first dp * tp are used; None for `jax.devices()`.

    Raises:
        ValueError: sizes below one, more devices than there are, or a dp that does not divide them.
    """
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    if dp is None:
        dp = 2 if guided and devices.size % (2 * (tp or 1)) == 0 else 1
    if any(not isinstance(size, int) or size < 1 for size in (dp, 1 if tp is None else tp)):
        raise ValueError(f"got a mesh of dp={dp!r}, tp={tp!r}: both must be whole numbers of at least 1")
    if tp is None and devices.size % dp:
        raise ValueError(
            f"got dp={dp} for {devices.size} devices: it does not divide them; pass tp, or a dp of "
            f"{[divisor for divisor in range(1, devices.size + 1) if devices.size % divisor == 0]}"
        )
    if tp is None and heads:
        tp = max(size for size in range(1, devices.size // dp + 1) if heads % size == 0)
    tp_size = devices.size // dp if tp is None else tp
    size = dp * tp_size
    if size > devices.size:
        more_cpus = f", or try it on a CPU with XLA_FLAGS=--xla_force_host_platform_device_count={size} set"
        raise ValueError(
            f"got a mesh of dp={dp} x tp={tp_size}, {size} devices, where there are {devices.size}: "
            f"make dp * tp no larger{more_cpus if devices[0].platform == 'cpu' else ''}"
        )
    # Auto: from the sharding of inputs and results XLA's partitioner derives that of all other arrays.
    return Mesh(devices[:size].reshape(dp, tp_size), AXES, axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Any) -> Mesh:
    """Return `mesh`, if `make_mesh` could have made it.

    Raises:
        ValueError: not a mesh; a mesh whose axes are not `AXES`, or not of type Auto.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"got a mesh of type {type(mesh).__name__}: make one with make_mesh(dp, tp)")
    if mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"got a mesh with axes {mesh.axis_names} of types {mesh.axis_types}: it takes {AXES}, both "
            "AxisType.Auto; make one with make_mesh(dp, tp)"
        )
    return mesh


@dataclass(frozen=True)
class MeshPlace(Place):
    """The devices of a program on a mesh; a subclass chooses the sharding of an activation by its shape.

    Attributes:
        mesh: the mesh, from `make_mesh`.
    """

    mesh: Mesh

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the sharding of an activation of this shape."""
        raise NotImplementedError

    def parts(self, spec: PartitionSpec) -> list[int]:
        """Return, for each axis of a spec, the number of devices that split it."""
        # In a spec an axis has the name of a mesh axis, a tuple of several names, or None.
        names_by_axis = [(names,) if isinstance(names, str) else names or () for names in spec]
        return [math.prod(self.mesh.shape[name] for name in names) for names in names_by_axis]

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an activation of this shape on the mesh."""
        return NamedSharding(self.mesh, self.spec(shape))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def input_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        return self.replicated

    def weight(self, name: str, array: Any) -> jax.Array:
        """Return a weight, a NumPy or a JAX array, on the mesh; the same array if it is there already."""
        return spread(array, self.weight_sharding(name, array.shape))

    def put(self, array: Any) -> Any:
        return spread(array, self.replicated)

    def constrain(self, x: jax.Array) -> jax.Array:
        """Return `x`, a traced array, constrained to `sharding(x.shape)`."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape))


@dataclass(frozen=True)
class BatchPlacement(MeshPlace):
    """The sharding of a network that this package does not know: its batch is split over "dp".

    XLA's partitioner then splits the operations. Inputs and results are whole on every device outside the
    program, and so are weights unless they are `split`.

    Attributes:
        split: whether a weight is split over the whole mesh, along its first axis that the devices divide.
            XLA gathers it where it is used.
    """

    split: bool = False

    SMALLEST = 4096
    """Number of elements from which on a weight is split: to split a smaller one saves next to no memory."""

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the spec of an input, whose first axis, the batch, is split over "dp" if that divides it."""
        # A vector stays whole: it may have other values than one for each video, and is small.
        return (
            PartitionSpec("dp")
            if len(shape) > 1 and shape[0] % self.mesh.shape["dp"] == 0
            else PartitionSpec()
        )

    def weight_sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        divisible_axes = (axis for axis, size in enumerate(shape) if size % self.mesh.size == 0)
        is_split = self.split and math.prod(shape) >= self.SMALLEST
        axis = next(divisible_axes, None) if is_split else None
        if axis is None:
            return self.replicated
        # None for each axis before the split one, which is split over both axes of the mesh.
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXES))

    def trace(self, run: Callable[..., Any], inputs: Any, cache: Any) -> Any:
        # XLA cannot split a kernel. So kernels read the mesh that this block sets, and map themselves over
        # its devices.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            inputs = jax.tree.map(lambda x: self.constrain(x) if isinstance(x, jax.Array) else x, inputs)
            result, cache = run(inputs, cache)
        return jax.lax.with_sharding_constraint(result, self.replicated), cache


def spread(array: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array with a sharding, or the array itself if it has that sharding already.

    Args:
        array: a NumPy or JAX array, even a traced one. If there are several processes, each of them passes
            either the whole array, of which it places its own shards, or a JAX array that is on the devices
            of all processes.
        sharding: the sharding of the result.
    """
    if is_traced(array):
        return jax.device_put(array, sharding)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    # JAX can place it if all devices are this process's, or the array is on all processes' devices already.
    if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, sharding)
    # A local array goes to the devices of several processes: JAX asks for this process's shards alone.
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
