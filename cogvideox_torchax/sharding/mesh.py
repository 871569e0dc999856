"""The dp x tp mesh: devices in a grid of two axes."""

from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

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
