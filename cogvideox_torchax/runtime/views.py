"""Views that share their values on JAX as they do in PyTorch.

In PyTorch a view, such as `x.transpose(1, 2)`, shares its storage with `x`: a write into either is seen in
both. JAX's arrays are values, and torchax makes an independent array of every view; of a slice by brackets it
does so by its option `force_materialize_views`. So torchax alone loses the write
`x.transpose(1, 2)[:, ::2] *= 0.5` without a word. `share_views` has each tensor know the tensors that would
share its storage in PyTorch, and updates them after a write.

A tensor's *layout* is a tensor on torch's "meta" device, which has no values. Its shape, strides and offset
say where in the storage each element of the tensor lies. A tensor that is no view is contiguous.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax.arrays.forks import check_not_forked
from cogvideox_torchax.runtime.host import (
    is_in_host_memory,
    on_default_device,
    on_jax,
)
from cogvideox_torchax.upstream import is_traced

STORAGE, LAYOUT, ARRAY, KNOWN = "_storage", "_layout", "_array", "_known"
"""Attributes of a torchax tensor: its `_Storage`, its layout, its array, its values on the host."""


class _Storage:
    """The tensors that share one storage in PyTorch, as weak references. It holds no values itself."""

    def __init__(self, layout: torch.Tensor):
        self._size = layout.numel()
        self._tensors: dict[int, weakref.ref[Any]] = {}  # by their ids

    def add(self, tensor: Any, layout: torch.Tensor) -> None:
        """Add a tensor that shares this storage."""
        vars(tensor).update({STORAGE: self, LAYOUT: layout})
        key = id(tensor)
        # Once the tensor is freed, its reference is dropped: another tensor may get the same id.
        self._tensors[key] = weakref.ref(tensor, lambda _: self._tensors.pop(key, None))

    def write(self, source: Any) -> None:
        """Update all other tensors after a write into `source`.

        Raises:
            ValueError: another tensor has another dtype, as `x.view(dtype)` has.
        """
        new, layout = vars(source)[ARRAY], vars(source)[LAYOUT]
        # A list first, as tensors that are freed meanwhile drop out of the dictionary: None stands for them.
        alive = [reference() for reference in list(self._tensors.values())]
        others = [each for each in alive if each is not None and each is not source]
        others = [each for each in others if vars(each).get(STORAGE) is self]  # it may have left
        for tensor in others:
            vars(tensor).pop(KNOWN, None)
            if _are_alike(vars(tensor)[LAYOUT], layout):  # as a `detach()` is
                vars(tensor)[ARRAY] = new
        others = [tensor for tensor in others if vars(tensor)[ARRAY] is not new]
        if not others:
            return
        source_places = _places(layout)
        # The storage after the write, and which of its elements belong to `source`, as flat arrays.
        storage = jnp.zeros(self._size, new.dtype).at[source_places].set(new)
        is_written = jnp.zeros(self._size, bool).at[source_places].set(True)
        for tensor in others:
            attributes = vars(tensor)
            if attributes[ARRAY].dtype != new.dtype:
                raise ValueError(
                    f"got a write into a tensor of {new.dtype} that shares its memory with one of "
                    f"{attributes[ARRAY].dtype}, which JAX cannot do: write into a clone()"
                )
            places = _places(attributes[LAYOUT])
            # Not by `tensor._elem = ...`, which would call this method again (`_write`).
            attributes[ARRAY] = jnp.where(is_written[places], storage[places], attributes[ARRAY])


def _are_alike(layout: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have the same elements, in the same order and dtype."""
    first, second = ((x.dtype, x.shape, x.stride(), x.storage_offset()) for x in (layout, other))
    return first == second


def layout_of(source: Any) -> torch.Tensor:
    """Return the layout of a tensor on JAX; one without gets a storage of its own, contiguous."""
    attributes = vars(source)
    if STORAGE not in attributes:
        layout = torch.empty(source.shape, dtype=source.dtype, device="meta")
        _Storage(layout).add(source, layout)
    return attributes[LAYOUT]


def records_gradients(tensors: Iterable[Any]) -> bool:
    """Return whether PyTorch records the gradients of an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _indices(key: Any) -> tuple[Any, ...]:
    """Return an index whose lists are tensors: PyTorch would make them on "meta", a wrapper's own device."""
    return tuple(
        torch.tensor(part, dtype=None if len(part) else torch.int64)
        if isinstance(part, list | tuple | range)
        else part
        for part in (key if isinstance(key, tuple) else (key,))
    )


def _set_item(write: Callable[..., None]) -> Callable[..., None]:
    """Return torchax's `__setitem__`, which knows no gradients, as PyTorch's where it records them.

    Tensors of the host are moved to JAX. Gradients flow back to them.
    """

    def call(self: Any, key: Any, value: Any) -> None:
        key, value = pytree.tree_map_only(torch.Tensor, lambda x: x.to("jax"), (_indices(key), value))
        if records_gradients(each for each in (self, value) if isinstance(each, torch.Tensor)):
            torch.Tensor.__setitem__(self, key, value)
        else:
            write(self, key, value)

    return call


def asks_for_a_copy(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether the caller of `to` asks for a copy: by name, by the second boolean, or by an order."""
    switches = [value for value in args if isinstance(value, bool)]  # `non_blocking`, `copy`
    is_ordered = options.get("memory_format") not in (None, torch.preserve_format)
    return is_ordered or options.get("copy", len(switches) > 1 and switches[1])


def written(array: Any) -> Any:
    """Return an array after a write into a part of it, as a program on a CPU computes it rightly."""
    # XLA may do a write in place although the new values are read from other elements of the same array, as
    # a rotation of `q[:, :, t:]` is: some elements are read after they are written. It does so on a CPU if a
    # reshape follows, which the partitioning for a mesh adds (https://github.com/openxla/xla/issues/49176,
    # JAX 0.10.2). The barrier keeps the reshape apart from the write.
    if not is_traced(array):
        return array
    return jax.lax.platform_dependent(array, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def _places(layout: torch.Tensor) -> Any:
    """Return the place of each element of a tensor in its storage, as an array of the tensor's shape.

    The place is the offset plus, for each axis, the element's index times the stride.
    """
    axes = range(layout.ndim)
    # For each axis, an array that varies along this axis alone.
    steps = (
        jnp.arange(layout.shape[axis]).reshape([-1 if other == axis else 1 for other in axes])
        * layout.stride(axis)
        for axis in axes
    )
    return jnp.broadcast_to(sum(steps, jnp.asarray(layout.storage_offset())), layout.shape)


def share_views(tensor_class: Any) -> None:
    """Have the views of torchax's tensors share their values, by the attributes of their class.

    Each write sets a tensor's `_elem`, its array, which becomes a property that calls `_write`.
    """
    tensor_class._elem = property(operator.attrgetter(ARRAY), _write)  # each call reads a thousand
    tensor_class.jax = _array_for_operation

    def detach(self: Any) -> Any:
        array = vars(self)[ARRAY]
        detached = tensor_class(jax.lax.stop_gradient(array) if is_traced(array) else array, self._env)
        _share(self, detached, torch.Tensor.detach)
        return detached

    tensor_class.detach = detach
    tensor_class.data = property(detach, _set_data)  # torchax's getter returns the tensor itself
    tensor_class.__getitem__ = lambda self, key: torch.Tensor.__getitem__(self, _indices(key))
    tensor_class.__setitem__ = _set_item(tensor_class.__setitem__)
    tensor_class.is_meta = False  # of a tensor on torch's "meta" device, `nn.init.orthogonal_` fills nothing
    # torch's reads the shape that a tensor was made with, which `t_` has changed since.
    tensor_class.view_as = lambda self, other: self.view(other.shape)
    del tensor_class.flatten  # torchax's makes an independent array, and takes no negative axes but -1
    tensor_class.type_as = lambda self, other: self.to(other.dtype)  # torchax's changes its input


def _array_for_operation(tensor: Any) -> Any:
    """Return a tensor's array; of one that waits in the host's memory a copy on its devices."""
    check_not_forked()
    array = vars(tensor)[ARRAY]
    return on_default_device("", array) if is_in_host_memory(array) else array


def waits(tensor: Any) -> bool:
    """Return whether a tensor on JAX waits in the host's memory, as with offload."""
    return on_jax(tensor) and is_in_host_memory(vars(tensor)[ARRAY])


def _write(tensor: Any, array: Any) -> None:
    """Set a tensor's array, and update the tensors that share its storage.

    An array of another shape or dtype is no write into the storage: the tensor leaves it, as in torch.
    """
    attributes = vars(tensor)
    attributes.pop(KNOWN, None)
    old = attributes.get(ARRAY)
    attributes[ARRAY] = array if old is None or old is array else written(array)
    if STORAGE not in attributes or old is None or old is array:
        return
    if (old.shape, old.dtype) == (array.shape, array.dtype):
        attributes[STORAGE].write(tensor)
    else:
        del attributes[STORAGE], attributes[LAYOUT]


def _set_data(tensor: Any, other: Any) -> None:
    """Give the tensor another storage, that of a new array; its views keep the old one."""
    for name in (STORAGE, LAYOUT, KNOWN):
        vars(tensor).pop(name, None)
    vars(tensor)[ARRAY] = other.jax()


def as_in_torch(func: Any, args: Any, options: Any, result: Any) -> Any:
    """Return an operation's result as PyTorch has it: a view shares its values, and a copy shares none."""
    source: Any = args[0] if args else None
    if not isinstance(source, torch.Tensor) or not on_jax(source):
        return result
    if result is source and func is torch.ops.aten._to_copy.default:
        return source.clone()
    # torch marks its operators that return views; these two are functions.
    if getattr(func, "is_view", False) or func in (torch.tensor_split, torch.Tensor.__getitem__):
        _share(source, result, lambda layout: func(layout, *args[1:], **options))
    return result


def contiguous(source: Any, *args: Any, **options: Any) -> Any:
    """Return a tensor itself if its layout is contiguous, or else a copy; torchax takes each for one."""
    wanted: Any = (*args, *options.values(), torch.contiguous_format)[0]
    return source if layout_of(source).is_contiguous(memory_format=wanted) else source.clone()


def _share(source: Any, results: Any, operation: Callable[[torch.Tensor], Any]) -> None:
    """Add those results of an operation that are views to the storage of its input `source`.

    `operation` runs once more, on the layout of `source`. torch returns a view of this layout exactly for the
    results that are views: a `reshape`, for example, copies what it cannot view. The views' layouts are the
    results' layouts.
    """
    with no_dispatch(), torch._C.DisableTorchFunction():
        layout = layout_of(source)
        try:
            result_layouts = operation(layout)
        except RuntimeError:
            # These strides forbid a view. The caller asked for a `reshape`: torch makes a `view` of it, as it
            # takes torchax's tensors for contiguous. In PyTorch it copies, so nothing is shared.
            return
    # A result is a view if its layout has the storage of `source`'s layout; `_cdata` is this storage's
    # address. Left out are `source` itself, and a result to which torchax gives another shape than torch
    # does, so that the layout does not fit.
    storage_id = layout.untyped_storage()._cdata
    for result, result_layout in zip(_tensors(results), _tensors(result_layouts), strict=True):
        if (
            result_layout.untyped_storage()._cdata == storage_id
            and result is not source
            and result_layout.shape == result.shape
        ):
            vars(source)[STORAGE].add(result, result_layout)


def _tensors(results: Any) -> Iterator[Any]:
    """Yield the results of an operation, which returns one tensor or a list or tuple of tensors."""
    yield from results if isinstance(results, list | tuple) else (results,)
