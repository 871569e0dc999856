"""Offload: models whose weights are on the devices while a model is used, and else in the host's memory."""

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from cogvideox_torchax import upstream
from cogvideox_torchax.pipelines import sharding
from cogvideox_torchax.runtime.bridge import array_of
from cogvideox_torchax.runtime.host import HOST_MEMORY, is_in_host_memory, on_jax
from cogvideox_torchax.runtime.weights import named_tensors, put_weights

logger = logging.getLogger("cogvideox_torchax")

GIB = 2**30


class Offload:
    """The models of a pipeline: those that take turns are on the devices one at a time; safe in any thread.

    A model that takes no turns, such as one that is called in each step beside the transformer, comes to the
    devices when it is first used, and stays there until `free`.

    Attributes:
        is_on: once it is false, no model goes to the host any more.
    """

    def __init__(self) -> None:
        self.is_on = True
        # Held while a model of this object is called, so that no other thread takes its weights away.
        self._lock = threading.RLock()
        self._takes_turns: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()  # the models that are on the devices wholly
        self._running: list[Any] = []  # the models whose calls run now, one inside of the other

    def add(self, model: Any, *, takes_turns: bool = True) -> None:
        """Have a ported model move with the others from now on; its weights stay where they are."""
        self._takes_turns[model] = takes_turns
        model.offload = self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offload":
        memo[id(self)] = copied = Offload()  # without models: `add_copy` adds the copy of each
        copied.is_on = self.is_on
        return copied

    def add_copy(self, model: Any, copied: Any) -> None:
        """Have a deep copy of a model move with the copies of the others; its weights go to the host."""
        copied.offload.add(copied, takes_turns=self._takes_turns[model])
        copied.offload.put(copied)

    @contextlib.contextmanager
    def using(self, model: Any) -> Iterator[None]:
        """Bring a model's weights to the devices for a `with` block; those of others go to the host before.

        Nothing moves if this model was the last one.
        """
        with self._lock:
            if model not in self._loaded:
                if self._takes_turns.setdefault(model, True):
                    others = [other for other, takes_turns in self._takes_turns.items() if takes_turns]
                    self._store(other for other in others if other is not model)
                put_weights(model, model.put_weight)
                self._loaded.add(model)
            self._running.append(model)
            try:
                yield
            finally:
                self._running.pop()

    def free(self) -> None:
        """Move the weights of all models to the host."""
        with self._lock:
            self._store(self._takes_turns)

    def put(self, model: Any) -> None:
        """Put those weights of a model on JAX that are not there, on the devices if the rest of it is."""
        with self._lock:
            waits = self.is_on and model not in self._loaded

            def place(name: str, array: Any) -> Any:
                # A NumPy array may be that of a tensor which is not on JAX yet.
                stays = waits and isinstance(array, jax.Array) and is_in_host_memory(array)
                return array if stays else model.put_weight(name, array)

            put_weights(model, place)
            if waits:
                self._store([model])

    def _store(self, models: Any) -> None:
        """Move models to the host, and wait until their devices' memory is free."""
        for model in [*models] if self.is_on else ():
            if model in self._running:
                continue
            self._loaded.discard(model)  # first: an interrupt may come at any time
            # A tensor that is not on JAX is the user's, as after `to("cpu")`.
            tensors = [tensor for tensor in named_tensors(model).values() if on_jax(tensor)]
            moving = [tensor for tensor in tensors if not is_in_host_memory(array_of(tensor))]
            if moving:
                smallest = array_of(min(moving, key=lambda tensor: array_of(tensor).nbytes))
                for tensor in moving:
                    upstream.replace_array(tensor, _to_host)
                # A program that still runs keeps its weights. Devices run programs in their order: so this
                # one, a copy, ends after it.
                jax.block_until_ready((jnp.copy(smallest), [array_of(tensor) for tensor in moving]))


def _to_host(array: jax.Array) -> Any:
    """Return an array in the host's memory."""
    if array.is_fully_replicated:  # one copy is enough
        array = array.addressable_shards[0].data
    return jax.device_put(array, array.sharding.with_memory_kind(HOST_MEMORY))


def offload_models(models: dict[str, Any], mesh: Any, sequence: str | None, *, wanted: bool) -> None:
    """Have ported models take turns on the devices: if it is `wanted`, or some do so, or all do not fit.

    Args:
        models: the models, by name; of several calls for a pipeline the last has all.
        mesh: the mesh that they are on; None for one device, or for the mesh of an earlier port.
        sequence: the names of those that take turns, as in diffusers' `model_cpu_offload_seq`; None for all.
        wanted: whether the user has asked for it.
    """
    offloads = (model.offload for model in models.values() if model.offload and model.offload.is_on)
    offload = next(offloads, None)
    sizes = {name: _device_bytes_of(model) / GIB for name, model in models.items()}
    memory = (sharding.memory_of(mesh) or math.inf) / GIB
    if offload is None and not wanted:
        if sum(sizes.values()) <= memory:
            return
        logger.warning(
            "%.2f GiB of weights for %.2f GiB of a device: they wait on the host between uses, as by "
            "pipe.enable_model_cpu_offload(), which needs %.2f GiB beside a program's temporaries",
            *(sum(sizes.values()), memory, max(sizes.values())),
        )
    offload = offload or Offload()
    for name, model in models.items():
        if model.offload is not offload:
            offload.add(model, takes_turns=sequence is None or name in sequence.split("->"))


def _device_bytes_of(model: Any) -> int:
    """Return the bytes that a model's weights take on a device: on a mesh, its shards of them."""
    placement = getattr(model, "placement", None)  # None, too, for a VAE: each device has all of its weights
    weights = named_tensors(model)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if placement is not None:
        shapes = {n: placement.weight_sharding(n, shape).shard_shape(shape) for n, shape in shapes.items()}
    return sum(math.prod(shapes[name]) * weight.element_size() for name, weight in weights.items())
