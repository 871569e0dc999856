"""Several processes on one mesh: how they meet, and how a result's parts come together.

Every process runs the same program on its own devices. What it puts in it gives as an array of the whole
shape, of which its own columns alone are looked at (`Placement.put`). What comes out lies on the devices of
all: each process writes its part to a file, and whoever wants the whole reads the others' (`Exchange`). No
device ever holds it.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cogvideox_torchax import runtime
from cogvideox_torchax.files.whole import EXCHANGE, OutputError, hidden, reserved, whole_file

TIMEOUT = 60
"""Seconds after which the others give up on a process that does not come, or that has gone silent."""


class ProcessError(ValueError):
    """Processes that cannot meet as asked; the message says what to change."""


def connect(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    timeout: int = TIMEOUT,
) -> None:
    """Join this process to the others, once, before anything has touched a device.

    Args:
        coordinator: host and port of the first process; `JAX_COORDINATOR_ADDRESS` if None.
        count, index: number of processes, and this one's index from 0. If both are None, they and the
            coordinator come from the environment: a TPU pod, Slurm, Open MPI, Kubernetes.
        timeout: seconds to wait for the others to join, and seconds of silence after which a process counts
            as dead and every process ends with an error.

    Raises:
        ProcessError: one of `count` and `index` without the other, or an environment that names neither.
        RuntimeError: the others did not join.
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
    """Return whether this process writes what is written once; a single process does."""
    return jax.process_index() == 0


def wait_for_all() -> None:
    """Wait until every process has come here.

    The first process keeps the others' connection, and may not end before them.
    """
    multihost_utils.sync_global_devices("cogvideox_torchax")


def check_all_take_part(mesh: Mesh) -> None:
    """Raise `ProcessError` if a process has none of a mesh's devices."""
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise ProcessError(
            f"the mesh has {mesh.size} of {jax.device_count()} devices, and none of processes "
            f"{', '.join(map(str, sorted(idle)))}: take all of them, or start fewer processes"
        )


def abandon(code: int) -> None:
    """End a process that has failed among others, at once; do nothing if it runs by itself.

    A clean exit would first wait for the others, which wait for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Exchange:
    """Brings chunks from the devices of all processes to the host, in files that all of them see.

    Its methods have to be called in the same order in every process.

    Attributes:
        directory: where the files go; the same for all, and of this run alone.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._chunks = 0
        self._read: list[Path] = []

    def fetch_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the chunk as a plain tensor in every process."""
        whole = self._join(self._write(tensor))
        # All processes have written this chunk, so all have read the one before.
        for path in self._read:
            path.unlink()
        self._read = [self._path(self._chunks, jax.process_index())]
        return whole

    def fetch_to_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the chunk as a plain tensor in the first process, a tensor of no frames in the others."""
        array = self._write(tensor)
        if not is_first():
            return runtime.plain_tensor(np.zeros((*array.shape[:2], 0, *array.shape[3:]), array.dtype))
        whole = self._join(array)
        for process in range(jax.process_count()):
            self._path(self._chunks, process).unlink()
        return whole

    def leave(self) -> None:
        """Announce that this process reads no more; the first process waits for all, and cleans up."""
        mark = lambda process: self.directory / f"{process}.left"  # noqa: E731
        mark(jax.process_index()).touch()
        if is_first():
            for process in range(jax.process_count()):
                self._wait(mark(process))

    def _path(self, chunk: int, process: int) -> Path:
        """Return the file of a process's part of a chunk."""
        return self.directory / f"{chunk:06}.{process}"

    def _write(self, tensor: torch.Tensor) -> jax.Array:
        """Write this process's part: the file is whole, or absent."""
        self._chunks += 1
        array = runtime.array_of(tensor)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        path = self._path(self._chunks, jax.process_index())
        temporary = path.with_name(f"{path.name}.writing")
        with temporary.open("wb") as file:
            for device, _ in parts(array)[jax.process_index()]:
                file.write(np.ascontiguousarray(shards[device]).tobytes())
        os.replace(temporary, path)
        return array

    def _join(self, array: jax.Array) -> torch.Tensor:
        """Return the whole array, joined from the files of all processes."""
        whole = np.empty(array.shape, array.dtype)
        for process, shards in parts(array).items():
            values = np.frombuffer(self._wait(self._path(self._chunks, process)).read_bytes(), array.dtype)
            offset = 0
            for _, index in shards:
                size = math.prod(whole[index].shape)
                whole[index] = values[offset : offset + size].reshape(whole[index].shape)
                offset += size
        return runtime.plain_tensor(whole)

    def _wait(self, path: Path) -> Path:
        """Return the file once it exists. If its process has died, the runtime ends this one in time."""
        pause = 0.001
        while not path.exists():
            for failure in self.directory.glob("*.failed"):
                if path.exists():  # the file came before its process failed
                    return path
                raise RuntimeError(f"process {failure.stem} failed: {failure.read_text()}")
            if not self.directory.exists():
                raise RuntimeError("the first process failed, and has cleared up")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return path


def parts(array: jax.Array) -> dict[int, list[tuple[Any, tuple[slice, ...]]]]:
    """Return the shards of an array that each process holds, by device; of equal shards only the first."""
    by_process: dict[int, list[tuple[Any, tuple[slice, ...]]]] = {}
    seen: set[str] = set()
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        if str(index) not in seen:
            seen.add(str(index))
            by_process.setdefault(device.process_index, []).append((device, index))
    return by_process


@contextlib.contextmanager
def exchanging(output: str | Path) -> Iterator[Exchange]:
    """Exchange chunks through a directory beside `output` that every process sees; remove it afterwards."""
    directory = hidden(output, EXCHANGE)
    with reserved(output, EXCHANGE) if is_first() else contextlib.nullcontext():
        wait_for_all()  # until the first process has emptied the directory
        directory.mkdir(exist_ok=True)
        try:
            exchange = Exchange(directory)
            yield exchange
            exchange.leave()
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            failed = directory / f"{jax.process_index()}.failed"
            # Errors are suppressed: if the first process failed too, the directory is gone.
            with contextlib.suppress(OSError, OutputError), whole_file(failed) as temporary:
                temporary.write_text(reason)
            raise
