"""Base classes of ported objects, which define their mesh, their copies and their pickles."""

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.bridge import is_on_jax, to_torch
from cogvideox_torchax.runtime.host import device_and_dtype, is_jax_device, on_default_device
from cogvideox_torchax.runtime.weights import put_weights, replace_weights


def save_as_stock(model: nn.Module) -> None:
    """Have a saved pipeline name the model's class of diffusers or transformers, not this package's."""
    # The model's first base class that another package defines. It has the name of the model's own class.
    this_package = __name__.partition(".")[0]
    stock_classes = (
        base for base in type(model).__mro__ if base.__module__.partition(".")[0] != this_package
    )
    # diffusers writes the package of a part's `__module__` into model_index.json, to import its class from.
    vars(model)["__module__"] = next(stock_classes).__module__


def class_of(make: Any, kind: type, bases: tuple[type, ...], **members: Any) -> Any:
    """Return a new class with the name of `kind`, these bases and these members.

    pickle cannot find it by its name, as it is not a module's attribute. So an instance is pickled as a call
    of `make(kind)`, a function of a module which returns the class, and the state that is set then.
    """
    of_kind: Any = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": lambda self, _protocol: (_revived, (make, kind), self.__getstate__()),
    }
    return type(kind.__name__, bases, of_kind | members)


def _revived(make: Any, kind: type) -> Any:
    """Return an instance without attributes of the class `make(kind)`; unpickling sets the attributes."""
    return object.__new__(make(kind))


PROGRAMS = "_compiled_programs"
"""The attribute of a model that has its compiled programs (`programs_of`)."""
DERIVED_ATTRIBUTES = frozenset({PROGRAMS, upstream.COMPILED_CALL})
"""Attributes that a copy must not have: programs, and torch.compile's call, run the original's modules."""
UNTRACED_ATTRIBUTES = DERIVED_ATTRIBUTES | upstream.CACHE_STATE | {"offload"}
"""Attributes that tracing a program does not read. A copy has all of them but `DERIVED_ATTRIBUTES`."""


class CopiesWithoutPrograms:
    """Mixin of ported classes: a copy is ported as well, and compiles its own programs."""

    def _state(self) -> dict[str, Any]:
        """Return the attributes that a copy has."""
        attributes = vars(self).copy()  # in one step: another thread may add its first program meanwhile
        return {name: value for name, value in attributes.items() if name not in DERIVED_ATTRIBUTES}

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(self._state())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(self._state(), memo))
        return copied


class PortedModel(CopiesWithoutPrograms, nn.Module):
    """Mixin of ported models, which have a mesh. A copy has the same mesh.

    A pickle has neither the mesh nor the state of diffusers' caches. An unpickled model has its weights in
    PyTorch.
    """

    _mesh: Any = None
    offload: Any = None
    """The `pipelines.offload.Offload` that moves the weights to the host between uses; None if they stay."""

    @property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh` that this model runs on, as given to `port`; None for a single device."""
        return self._mesh

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model as torch does.

        Tied weights stay tied. Weights moved to "cpu" are copies, which share no memory with JAX's arrays.
        """
        device, dtype = device_and_dtype(args, kwargs)
        if is_jax_device(device):
            if dtype is not None:
                self.to(dtype)  # before the move, so that JAX gets the final dtype
            self.place()  # on JAX's default device; a subclass's `place` puts them on the model's mesh
            return self
        if device is not None and torch.device(device).type == "cpu":
            # The weights become plain tensors, of which torch's own `to` below only changes the dtype.
            replace_weights(self, to_torch)
        return super().to(*args, **kwargs)

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> None:
        self._in_pytorch("enable_group_offload", "call pipe.enable_model_cpu_offload()")(*args, **kwargs)

    def enable_layerwise_casting(self, *args: Any, **kwargs: Any) -> None:
        self._in_pytorch("enable_layerwise_casting", "call it before port")(*args, **kwargs)

    def _in_pytorch(self, method: str, instead: str) -> Any:
        """Return a method of diffusers that changes weights in PyTorch, or raise if they are on JAX."""
        if is_on_jax(self):
            raise ValueError(f"{method} is for a model in PyTorch: {instead}")
        return getattr(super(), method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; on JAX the call that `model.compile()` made is left out, as XLA compiles."""
        if not is_on_jax(self):
            return super().__call__(*args, **kwargs)
        with self.in_use():
            # torch's `__call__` would run the compiled call, and `_call_impl` runs hooks and `forward`.
            return self._call_impl(*args, **kwargs)

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which weights on JAX are on the devices; only with offload may they move."""
        if self.offload is None or not is_on_jax(self):
            return contextlib.nullcontext()
        return self.offload.using(self)

    def place(self) -> None:
        """Put the weights on JAX."""
        self.put_weights()

    def put_weights(self) -> None:
        """Put the weights on JAX, on the default device or the mesh, where later calls run.

        With offload those of a network that is not in use go to the host's memory.
        """
        if self.offload is None:
            put_weights(self, self.put_weight)
        else:
            self.offload.put(self)

    def put_weight(self, name: str, array: Any) -> Any:
        """Return a weight, given as a NumPy or a JAX array, on the default device or on the mesh."""
        return on_default_device(name, array)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with self.in_use():  # torch moves and casts by this method, also for calls such as `half()`
            return super()._apply(fn, recurse)

    def cpu(self) -> Any:
        """Move the model to the CPU, as `to("cpu")` does; torch's own `cpu` does not call `to`."""
        return self.to("cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PortedModel":
        if self._mesh is not None:
            memo[id(self._mesh)] = self._mesh  # JAX's devices cannot be copied
        copied = super().__deepcopy__(memo)
        if self.offload is not None:
            self.offload.add_copy(self, copied)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_mesh", "offload", *upstream.CACHE_STATE}
        return {name: value for name, value in self._state().items() if name not in left_out}
