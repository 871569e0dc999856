"""Several processes on one mesh: they connect, and join their parts of a result.

Every process runs the same program on its own devices. It passes inputs as arrays of the whole shape; only
the columns of its own devices are read (`Placement.put`). A result is spread over the devices of all
processes: each process writes its part to a file, and a process that needs the whole reads all files
(`Exchange`). No device ever holds the whole.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files.whole import EXCHANGE, OutputError, hidden, reserved, whole_file

if TYPE_CHECKING:
    import torch

TIMEOUT = 60
"""Seconds to wait for a process that does not join, or that sends no sign of life."""


CALL_TIMEOUT = 600
"""Seconds to wait for a process that is alive and has not made the same call: it may still load weights."""

_CALLS: Counter[str] = Counter()
"""The number of calls that were checked so far, by the name of their processes."""


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
    multihost_utils.sync_global_devices("cogvideox_torchax")


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


def check_same(mesh: Mesh | None, call: Mapping[str, Any]) -> None:
    """Check that all processes of a mesh make the same call; without other processes do nothing.

    Every process must call this. It waits `CALL_TIMEOUT` seconds for each of the others.

    Args:
        mesh: the mesh; None for one device.
        call: what must be the same in all processes, in a form that JSON has, by the name that an error says.

    Raises:
        ProcessError: a process differs, or does not come; it is raised in every process.
    """
    if mesh is None or not runtime.of_several_processes(mesh):
        return
    own, store = jax.process_index(), upstream.process_store()
    processes = sorted({device.process_index for device in mesh.devices.flat})
    name = f"cogvideox_torchax/{processes}"
    _CALLS[name] += 1
    store.key_value_set(f"{name}/{_CALLS[name]}/{own}", json.dumps(call))
    for process in processes:
        try:
            text = store.blocking_key_value_get(f"{name}/{_CALLS[name]}/{process}", 1000 * CALL_TIMEOUT)
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(
                f"process {process} has not made the call of process {own} within {CALL_TIMEOUT} s: every "
                "process must make it"
            ) from error
        other = json.loads(text)
        differing = [key for key in {**call, **other} if call.get(key) != other.get(key)]
        if differing:
            raise ProcessError(
                f"process {process} has another {', '.join(differing)} than process {own}: every process "
                "must make the same call"
            )
    # All have read the texts of the call before, as each has come here after it.
    if _CALLS[name] > 1:
        store.key_value_delete(f"{name}/{_CALLS[name] - 1}/{own}")


def exit_at_once(code: int) -> None:
    """Exit with a code after a failure, if this process has joined others; return if it is alone.

    A clean exit would first wait for the other processes, which wait for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Exchange:
    """Copies chunks from the devices of all processes to the host, through files that all processes see.

    Its methods must be called in the same order in every process.

    Args:
        directory: directory of the files; the same for all processes, and of this run alone.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._chunks = 0  # number of chunks written so far; chunks are numbered from 1
        # The file that this process wrote in its last `fetch_to_all`; other processes may be reading it.
        self._previous_file: Path | None = None

    def fetch_to_all(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return a chunk, of which each process holds a part, as a plain tensor in every process."""
        array = self._write(tensor)  # counts the chunk
        whole = self._join(array)
        # `_join` has read the files of all processes. A process writes its file of this chunk only after it
        # has read all earlier chunks, so nobody needs this process's file of the earlier chunk any more.
        if self._previous_file is not None:
            self._previous_file.unlink()
        self._previous_file = self._path(self._chunks, jax.process_index())
        return whole

    def fetch_to_first(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return a chunk as a plain tensor in the first process, a tensor of no frames in other processes."""
        array = self._write(tensor)  # (N, C, T, H, W), of which this process has a part
        if not is_first():
            return runtime.plain_tensor(np.zeros((*array.shape[:2], 0, *array.shape[3:]), array.dtype))
        whole = self._join(array)
        for process in range(jax.process_count()):  # no other process reads this chunk's files
            self._path(self._chunks, process).unlink()
        return whole

    def leave(self) -> None:
        """Announce that this process reads no more files; the first process waits until all have done so."""
        (self.directory / f"{jax.process_index()}.left").touch()
        if is_first():
            for process in range(jax.process_count()):
                self._wait(self.directory / f"{process}.left")

    def _path(self, chunk: int, process: int) -> Path:
        return self.directory / f"{chunk:06}.{process}"

    def _write(self, tensor: "torch.Tensor") -> jax.Array:
        """Write this process's part of a chunk to its file, whole or not at all; return the chunk's array."""
        self._chunks += 1
        array = runtime.array_of(tensor)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        path = self._path(self._chunks, jax.process_index())
        temporary = path.with_name(f"{path.name}.writing")
        with temporary.open("wb") as file:
            for device, _index in shards_by_process(array)[jax.process_index()]:
                file.write(np.ascontiguousarray(shards[device]).tobytes())
        os.replace(temporary, path)
        return array

    def _join(self, array: jax.Array) -> "torch.Tensor":
        """Return the whole of `array`, the last chunk, from the files of all processes."""
        whole = np.empty(array.shape, array.dtype)
        for process, shards in shards_by_process(array).items():
            with self._wait(self._path(self._chunks, process)).open("rb") as file:
                for _device, index in shards:
                    shard = whole[index]  # a view: filling it fills `whole`
                    shard[...] = np.fromfile(file, array.dtype, shard.size).reshape(shard.shape)
        return runtime.plain_tensor(whole)

    def _wait(self, path: Path) -> Path:
        """Wait for a file, and return its path; raise `RuntimeError` if a process has failed."""
        # If a process has died, JAX's runtime ends this one.
        pause = 0.001  # seconds until the next check: doubled after each one, up to 0.1
        while not path.exists():
            for failure in self.directory.glob("*.failed"):
                # The file may have come since the check above, before its process failed.
                if path.exists():
                    return path
                raise RuntimeError(f"process {failure.stem} failed: {failure.read_text()}")
            if not self.directory.exists():
                raise RuntimeError("the first process failed, and has cleared up")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return path


def shards_by_process(array: jax.Array) -> dict[int, list[tuple[Any, tuple[slice, ...]]]]:
    """Return, for each process, the (device, index into `array`) of each shard that it holds.

    If several devices hold copies of a shard, only the first copy is returned.
    """
    by_process: dict[int, list[tuple[Any, tuple[slice, ...]]]] = {}
    # The indices of the shards so far, as text: slices have no hash before Python 3.12.
    listed_indices: set[str] = set()
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        if str(index) not in listed_indices:
            listed_indices.add(str(index))
            by_process.setdefault(device.process_index, []).append((device, index))
    return by_process


@contextlib.contextmanager
def exchanging(output: str | Path) -> Iterator[Exchange]:
    """Exchange chunks through a directory beside `output` that every process sees; remove it afterwards."""
    directory = hidden(output, EXCHANGE)  # its path, which is the same in every process
    # In the first process `reserved` makes this directory, empty and locked, and removes it after the block.
    with reserved(output, EXCHANGE) if is_first() else contextlib.nullcontext():
        wait_for_all()  # until the first process has made the directory
        # A network's file system may not show the new directory to this machine yet. Then this call makes it;
        # otherwise it does nothing.
        directory.mkdir(exist_ok=True)
        try:
            exchange = Exchange(directory)
            yield exchange
            exchange.leave()  # the first process waits here until no process reads files any more
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            failed = directory / f"{jax.process_index()}.failed"
            # The other processes find this file in `_wait`. If the first process failed too, the directory is
            # gone and the file cannot be written, but the first error is the one to raise.
            with contextlib.suppress(OSError, OutputError), whole_file(failed) as temporary:
                temporary.write_text(reason)
            raise
