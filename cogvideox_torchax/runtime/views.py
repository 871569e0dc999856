"""Views that share their values on JAX as they do in PyTorch.

In PyTorch a view, such as `x.transpose(1, 2)`, shares its storage with `x`: a write into either is seen in
both. JAX's arrays are values, and torchax makes an independent array of every view but a slice by brackets.
So it loses `x.transpose(1, 2)[:, ::2] *= 0.5` without a word. `share_views` has each tensor know the tensors
that would share its storage, and updates them after a write.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import torch
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax.runtime.user_checks import runs_unchecked

STORAGE, LAYOUT, ARRAY = "_storage", "_layout", "_array"
"""Attributes of a torchax tensor: its `_Storage`, its place in it, and its array."""


class _Storage:
    """The tensors that share one storage in PyTorch, as weak references.

    Each has a layout: a tensor on torch's "meta" device, whose strides and offset give its elements' places
    in the storage.
    """

    def __init__(self, layout: torch.Tensor):
        self._size = layout.numel()
        self._tensors: dict[int, weakref.ref[Any]] = {}  # by their ids

    def add(self, tensor: Any, layout: torch.Tensor) -> None:
        vars(tensor).update({STORAGE: self, LAYOUT: layout})
        key = id(tensor)
        self._tensors[key] = weakref.ref(tensor, lambda _: self._tensors.pop(key, None))

    def write(self, source: Any) -> None:
        """Update all other tensors after a write into `source`.

        Raises:
            ValueError: another tensor has another dtype, as `x.view(dtype)` has.
        """
        others = [each() for each in list(self._tensors.values())]
        others = [tensor for tensor in others if tensor is not None and tensor is not source]
        if not others:
            return
        new, written = vars(source)[ARRAY], _places(vars(source)[LAYOUT])
        flat = jnp.zeros(self._size, new.dtype).at[written].set(new)
        is_written = jnp.zeros(self._size, bool).at[written].set(True)
        for tensor in others:
            attributes = vars(tensor)
            if attributes[ARRAY].dtype != new.dtype:
                raise ValueError(
                    f"got a write into a tensor of {new.dtype} that shares its memory with one of "
                    f"{attributes[ARRAY].dtype}, which JAX cannot do: write into a clone()"
                )
            places = _places(attributes[LAYOUT])
            attributes[ARRAY] = jnp.where(is_written[places], flat[places], attributes[ARRAY])


def _places(layout: torch.Tensor) -> Any:
    """Return the places in the storage of a tensor's elements, an array of the tensor's shape."""
    axes = range(layout.ndim)
    steps = (
        jnp.arange(layout.shape[axis]).reshape([-1 if each == axis else 1 for each in axes])
        * layout.stride(axis)
        for axis in axes
    )
    return jnp.broadcast_to(sum(steps, jnp.asarray(layout.storage_offset())), layout.shape)


def share_views(torchax: Any) -> None:
    """Have the views of torchax's tensors share their values.

    Each operation goes through torchax's `Environment.dispatch`, and each write sets a tensor's `_elem`.
    """
    tensor, view = torchax.tensor.Tensor, torchax.view.View
    dispatch, detach_alone = torchax.tensor.Environment.dispatch, vars(tensor)["detach"]

    def write(self: Any, array: Any) -> None:
        """Set a tensor's array; one of another shape or dtype gives it a storage of its own, as in torch."""
        attributes = vars(self)
        old, attributes[ARRAY] = attributes.get(ARRAY), array
        if STORAGE not in attributes or old is array:
            return
        if (old.shape, old.dtype) == (array.shape, array.dtype):
            attributes[STORAGE].write(self)
        else:
            del attributes[STORAGE], attributes[LAYOUT]

    def layout_of(source: Any) -> torch.Tensor:
        """Return the layout of a tensor or a slice; a tensor without one gets a storage of its own."""
        if isinstance(source, view):
            return layout_of(source.parent)[source.view_info.slices]
        if STORAGE not in vars(source):
            layout = torch.empty(source.shape, dtype=source.dtype, device="meta")
            _Storage(layout).add(source, layout)
        return vars(source)[LAYOUT]

    def share(source: Any, results: Any, make: Callable[[torch.Tensor], Any]) -> None:
        """Add the results of an operation to the storage of its input `source`, as far as they are views.

        The layouts that `make`, the operation, returns tell which ones are: a `reshape` copies what it cannot
        view.
        """
        with no_dispatch(), torch._C.DisableTorchFunction():
            layout = layout_of(source)
            try:
                layouts = make(layout)
            except RuntimeError:
                # The strides forbid this view: it comes from a `reshape`, which then copies.
                return
        while isinstance(source, view):
            source = source.parent
        for result, made in zip(_tensors(results), _tensors(layouts), strict=True):
            is_view = made.untyped_storage()._cdata == layout.untyped_storage()._cdata
            if is_view and isinstance(result, tensor) and result is not source and made.shape == result.shape:
                vars(source)[STORAGE].add(result, made)

    @functools.wraps(dispatch)
    @runs_unchecked
    def call(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        source: Any = args[0] if args else None
        if not isinstance(source, (tensor, view)):
            return dispatch(self, func, types, args, kwargs)
        if func is torch.Tensor.contiguous and STORAGE in vars(source):
            # torchax takes every tensor for contiguous, and returns the tensor itself.
            contiguous = vars(source)[LAYOUT].is_contiguous()
            return source if contiguous else tensor(source.jax(), self)
        result = dispatch(self, func, types, args, kwargs)
        if getattr(func, "is_view", False) or func is torch.tensor_split:
            share(source, result, lambda layout: func(layout, *args[1:], **(kwargs or {})))
        return result

    def detach(self: Any) -> Any:
        detached = detach_alone(self)
        share(self, detached, torch.Tensor.detach)
        return detached

    torchax.tensor.Environment.dispatch = call
    tensor._elem = property(lambda self: vars(self)[ARRAY], write)
    tensor.detach = detach
    del tensor.flatten  # torchax's makes an independent array, and takes no negative axes but -1
    tensor.type_as = lambda self, other: self.to(other.dtype)  # torchax's changes its input


def _tensors(results: Any) -> Iterator[Any]:
    yield from results if isinstance(results, list | tuple) else (results,)
