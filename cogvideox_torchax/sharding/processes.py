"""Several processes on one mesh: they connect, and check that they make the same call.

Every process runs the same program on its own devices. It passes inputs as arrays of the whole shape; only
the columns of its own devices are read (`Placement.put`). A result is spread over the devices of all
processes, and `runtime.to_torch` gathers it in each of them.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TIMEOUT = 60
"""Seconds to wait for a process that does not join, or that sends no sign of life."""
CALL_TIMEOUT = 600
"""Seconds to wait for a process that is alive and has not made the same call: it may still load weights."""


class ProcessError(ValueError):
    """Processes that cannot connect, or that do not make the same call; the message says what to change."""


def connect(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    timeout: int = TIMEOUT,
) -> None:
    """Join this process to the other processes, before anything uses a device; a second call does nothing.

    Args:
        coordinator: host and port of the first process; `JAX_COORDINATOR_ADDRESS` if None.
        count, index: number of processes, and this one's index from 0. If both are None, they and the
            coordinator come from the environment: a TPU pod, Slurm, Open MPI, Kubernetes.
        timeout: seconds to wait for all processes to join, and seconds of silence after which a process
            counts as dead and every process ends with an error.

    Raises:
        ProcessError: one of `count` and `index` without the other, or an environment that names neither.
        RuntimeError: the other processes did not join.
    """
    if (count is None) != (index is None):
        raise ProcessError(
            f"got a count of {count} processes and index {index}: pass both, or neither where a TPU pod, "
            "Slurm, Open MPI or Kubernetes names them"
        )
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout,
        )
    except ValueError as error:
        raise ProcessError(
            f"cannot join the other processes ({error}); pass a coordinator (host:port of the first "
            "process), how many processes there are, and which this is, from 0 on"
        ) from error


def is_first() -> bool:
    """Return whether this is the first process, which writes outputs that are written once."""
    return jax.process_index() == 0


def wait_for_all() -> None:
    """Wait until every process has called this function.

    Every process calls it before it ends: the first process serves the connection of all, and must end last.
    """
    # Not by `sync_global_devices`, which waits for one device a process: others may still print, by gloo.
    _gathered(jax.devices(), {})


def check_all_take_part(mesh: Mesh) -> None:
    """Raise `ProcessError` if a process has none of a mesh's devices."""
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise ProcessError(
            f"the mesh has {mesh.size} of {jax.device_count()} devices, and none of processes "
            f"{', '.join(map(str, sorted(idle)))}: take all of them, or start fewer processes"
        )


def check_one_slice(mesh: Mesh | None) -> None:
    """Raise `ProcessError` for a mesh with TPUs of several slices, which a pipeline does not run on."""
    tpus = [] if mesh is None else [device for device in mesh.devices.flat if device.platform == "tpu"]
    slices = {getattr(device, "slice_index", 0) for device in tpus}
    if len(slices) > 1:
        raise ProcessError(
            f"a pipeline runs on the chips of one slice, and the mesh has those of {len(slices)}: give "
            "make_mesh the devices of one, and each slice prompts of its own"
        )


def of_several_processes(mesh: Mesh | None) -> bool:
    """Return whether a mesh has devices of more than one process."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def check_same(mesh: Mesh | None, call: Mapping[str, Any]) -> None:
    """Check that all processes of a mesh make the same call; without other processes do nothing.

    Every process must call this. It waits `CALL_TIMEOUT` seconds for the others.

    Args:
        mesh: the mesh; None for one device.
        call: what must be the same in all processes, in a form that JSON has, by the name that an error says.

    Raises:
        ProcessError: a process differs, or does not come; it is raised in every process.
    """
    if mesh is None or not of_several_processes(mesh):
        return
    own, calls = jax.process_index(), _in_time(lambda: _gathered(mesh.devices.ravel().tolist(), call))
    for process, other in calls.items():
        differing = [key for key in {**call, **other} if call.get(key) != other.get(key)]
        if differing:
            raise ProcessError(
                f"process {process} has another {', '.join(differing)} than process {own}: every process "
                "must make the same call"
            )


def _gathered(some: Sequence[Any], call: Mapping[str, Any]) -> dict[int, Any]:
    """Return the calls of all processes that some devices are of, by the processes' numbers."""
    processes = {device.process_index for device in some}
    # All devices of these processes, which are the same in each, even if their meshes differ.
    devices = [each for each in jax.devices(some[0].platform) if each.process_index in processes]
    sharding = NamedSharding(Mesh(devices, "device"), PartitionSpec("device"))

    def of_all(row: np.ndarray) -> np.ndarray:
        """Return the rows of all devices: on its own ones, a process puts its `row`."""
        rows = jax.make_array_from_callback((len(devices), row.size), sharding, lambda _: row[None])
        return multihost_utils.process_allgather(rows, tiled=True)

    text = json.dumps(call).encode()
    longest = int(of_all(np.array([len(text)], np.int32)).max())  # as all rows have one length
    rows = of_all(np.frombuffer(text.ljust(longest), np.uint8))
    return {each.process_index: json.loads(row.tobytes()) for each, row in zip(devices, rows, strict=True)}


def _in_time(gather: Callable[[], dict[int, Any]]) -> dict[int, Any]:
    """Return `gather()`; raise `ProcessError` if it fails, or does not end within `CALL_TIMEOUT` seconds."""
    try:
        # JAX itself waits for ever. The thread of this pool is a daemon: neither the pool's end nor Python's
        # waits for it.
        with ThreadPool(1) as pool:
            return pool.apply_async(gather).get(CALL_TIMEOUT)
    except Exception as error:  # JAX has none of its own for a connection that ends
        raise ProcessError(
            f"another process has not made the call of process {jax.process_index()} within {CALL_TIMEOUT} "
            f"s, or has ended: every process must make it ({error})"
        ) from error


def exit_at_once(code: int) -> None:
    """Exit with a code after a failure, if this process has joined others; return if it is alone.

    A clean exit would first wait for the other processes, which wait for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
