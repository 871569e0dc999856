"""Views that share their values on JAX as they do in PyTorch.

In PyTorch a view, such as `x.transpose(1, 2)`, shares its storage with `x`: a write into either is seen in
both. JAX's arrays are values, and torchax makes an independent array of every view but a slice by brackets.
So torchax alone loses the write `x.transpose(1, 2)[:, ::2] *= 0.5` without a word. `share_views` has each
tensor know the tensors that would share its storage in PyTorch, and updates them after a write.

A tensor's *layout* is a tensor on torch's "meta" device, which has no values. Its shape, strides and offset
say where in the storage each element of the tensor lies.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax.runtime.host import (
    PLAIN,
    device_and_dtype,
    is_in_host_memory,
    on_default_device,
    on_jax,
)
from cogvideox_torchax.runtime.user_checks import without_jax_checks
from cogvideox_torchax.upstream import is_traced

DRAWS = (torch.randn, torch.rand, torch.randint)
"""torch's functions that draw random numbers from a shape alone."""
STORAGE, LAYOUT, ARRAY = "_storage", "_layout", "_array"
"""Attributes of a torchax tensor: its `_Storage`, its layout, and its array."""


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

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor is alive (not None), and has not left for another storage."""
        return tensor is not None and vars(tensor).get(STORAGE) is self

    def write(self, source: Any) -> None:
        """Update all other tensors after a write into `source`.

        Raises:
            ValueError: another tensor has another dtype, as `x.view(dtype)` has.
        """
        new, layout = vars(source)[ARRAY], vars(source)[LAYOUT]
        # A list first, as tensors that are freed meanwhile drop out of the dictionary.
        others = [reference() for reference in list(self._tensors.values())]
        others = [tensor for tensor in others if tensor is not source and self.has(tensor)]
        for tensor in others:
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
            # Not by `tensor._elem = ...`, which would call this method again (`share_views`).
            attributes[ARRAY] = jnp.where(is_written[places], storage[places], attributes[ARRAY])


def _are_alike(layout: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have the same elements, in the same order and dtype."""
    first, second = ((x.dtype, x.shape, x.stride(), x.storage_offset()) for x in (layout, other))
    return first == second


def layout_of(source: Any) -> torch.Tensor:
    """Return the layout of a tensor; a tensor on JAX without one gets a storage of its own, contiguous."""
    attributes = vars(source)
    if type(source) in PLAIN:
        return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    if "view_info" in attributes:  # a slice by brackets
        return layout_of(source.parent)[source.view_info.slices]
    if STORAGE not in attributes:
        layout = torch.empty(source.shape, dtype=source.dtype, device="meta")
        _Storage(layout).add(source, layout)
    return attributes[LAYOUT]


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous; a tensor on JAX without a layout is."""
    is_laid_out = type(tensor) in PLAIN or LAYOUT in vars(tensor) or "view_info" in vars(tensor)
    return not is_laid_out or layout_of(tensor).is_contiguous()


def _ordered(options: dict[str, Any]) -> dict[str, Any]:
    """Return the option by which a caller orders a new tensor's memory otherwise than its source's is."""
    is_other = options.get("memory_format") not in (None, torch.preserve_format)
    return {"memory_format": options["memory_format"]} if is_other else {}


def _asks_for_a_copy(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether the caller of `to` asks for a copy: by name, or by the second of two booleans."""
    switches = [value for value in args if isinstance(value, bool)]  # `non_blocking`, `copy`
    return options.get("copy", len(switches) > 1 and switches[1])


def _makes_host_tensor(operator: Any, args: Any, options: dict[str, Any]) -> bool:
    """Return whether an operator makes a tensor of the host from no tensor on JAX.

    The backward pass of `clamp` has such an operator. torchax would return a tensor on JAX.
    """
    device = options.get("device")
    return device is not None and device.type == "cpu" and not any(map(on_jax, _tensors_in(args, options)))


def _tensors_in(args: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]


def _takes_elem(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether torchax copies out of a tensor's `_elem` itself, which may wait in the host's memory."""
    if func is torch.Tensor.__getitem__:
        return bool(_tensors_in(args[1:], options))
    moves = func in (torch.Tensor.to, torch.ops.aten._to_copy.default)
    return func is torch.Tensor.cpu or (moves and str(device_and_dtype(args[1:], options)[0]) == "cpu")


def set_strides(result: Any, like: Any, **order: torch.memory_format) -> None:
    """Give a new tensor on JAX the strides that it has in PyTorch: of `like` or a `memory_format`."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        like = torch.empty(result.shape, device="meta", **order) if order else like  # pyright: ignore
        is_new = bool(order) or STORAGE not in vars(result)
        if not like.is_contiguous() and is_new and result.shape == like.shape:
            layout = torch.empty_strided(like.shape, like.stride(), dtype=result.dtype, device="meta")
            _Storage(layout).add(result, layout)


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


def share_views(torchax: Any) -> None:
    """Have the views of torchax's tensors share their values.

    torchax runs each operation by `Environment.dispatch`, and each write sets a tensor's `_elem`, its array.
    So the first is replaced by `call`, and the second by a property that calls `write`. torchax has two
    classes: `Tensor`, and `View` for a slice by brackets, which writes into its parent by itself.
    """
    tensor_class, slice_class = torchax.tensor.Tensor, torchax.view.View
    dispatch = torchax.tensor.Environment.dispatch

    def array_for_operation(self: Any) -> Any:
        """Return a tensor's array; of one that waits in the host's memory a copy on its devices."""
        array = vars(self)[ARRAY]
        return on_default_device("", array) if is_in_host_memory(array) else array

    def write(self: Any, array: Any) -> None:
        """Set a tensor's array, and update the tensors that share its storage.

        An array of another shape or dtype is no write into the storage: the tensor leaves it, as in torch.
        """
        attributes = vars(self)
        old = attributes.get(ARRAY)
        attributes[ARRAY] = array if old is None or old is array else written(array)
        if STORAGE not in attributes or old is None or old is array:
            return
        if (old.shape, old.dtype) == (array.shape, array.dtype):
            attributes[STORAGE].write(self)
        else:
            del attributes[STORAGE], attributes[LAYOUT]

    def share(source: Any, results: Any, operation: Callable[[torch.Tensor], Any]) -> None:
        """Add those results of an operation that are views to the storage of its input `source`.

        `operation` runs once more, on the layout of `source`. torch returns a view of this layout exactly for
        the results that are views: a `reshape`, for example, copies what it cannot view. The views' layouts
        are the results' layouts.
        """
        with no_dispatch(), torch._C.DisableTorchFunction():
            layout = layout_of(source)
            try:
                result_layouts = operation(layout)
            except RuntimeError:
                # These strides forbid a view. The caller asked for a `reshape`: torch makes a `view` of it,
                # as it takes torchax's tensors for contiguous. In PyTorch it copies, so nothing is shared.
                return
        while isinstance(source, slice_class):
            source = source.parent  # which holds the array and the storage
        # A result is a view if its layout has the storage of `source`'s layout; `_cdata` is this storage's
        # address. Left out are slices, which write into their parents by themselves; `source` itself; and a
        # result to which torchax gives another shape than torch does, so that the layout does not fit.
        storage_id = layout.untyped_storage()._cdata
        for result, result_layout in zip(_tensors(results), _tensors(result_layouts), strict=True):
            if (
                result_layout.untyped_storage()._cdata == storage_id
                and isinstance(result, tensor_class)
                and result is not source
                and result_layout.shape == result.shape
            ):
                vars(source)[STORAGE].add(result, result_layout)

    def keep_strides(func: Any, args: Any, options: dict[str, Any], results: Any) -> None:
        """Give the new tensors that an operation returns the strides that PyTorch gives them."""
        with no_dispatch(), torch._C.DisableTorchFunction():
            sources: list[Any] = _tensors_in(args, options)
            # A program draws no random numbers, so that the order of its tensors' memory does not matter.
            if (all(map(_is_contiguous, sources)) and not _ordered(options)) or any(
                is_traced(source.jax()) for source in sources if on_jax(source)
            ):
                return
            if func is torch.Tensor.to:
                func, args, options = torch.empty_like, args[:1], _ordered(options)
            args, options = pytree.tree_map_only(torch.Tensor, layout_of, (args, options))
            try:
                layouts = func(*args, **options)
            except Exception:  # the operation reads values, which a layout has not
                return
            for result, layout in zip(_tensors(results), _tensors(layouts), strict=True):
                if isinstance(result, tensor_class):
                    set_strides(result, layout)

    @functools.wraps(dispatch)
    @without_jax_checks
    def call(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by torchax; results that are views of its first argument then share its values."""
        source: Any = args[0] if args else None
        options = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            name = func.overloadpacket.__name__
            if _makes_host_tensor(func, args, options):
                with no_dispatch():
                    return func(*args, **options)
            if name.startswith("_foreach_"):  # torch computes it by one operation for each tensor
                with self._dispatch_mode:
                    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **options)
        out: Any = options.get("out")
        if func in DRAWS and on_jax(out):  # `torch.randn(3, out=x)` names no device
            options = kwargs = {"device": "jax"} | options
        from_host = func is torch.Tensor.to and type(source) in PLAIN
        # torchax takes every other device, such as "cuda", for JAX.
        if from_host and str(device_and_dtype(args[1:], options)[0]).partition(":")[0] in ("None", "cpu"):
            with no_dispatch(), torch._C.DisableTorchFunction():
                return func(*args, **options)
        order = _ordered(options)  # torchax takes options out as it reads them
        if not isinstance(source, (tensor_class, slice_class)):
            result = dispatch(self, func, types, args, kwargs)
            if isinstance(result, tensor_class) and (order or from_host):
                set_strides(result, source, **order)
            return result
        takes_elem = isinstance(source, tensor_class) and _takes_elem(func, args, options)
        if takes_elem and is_in_host_memory(vars(source)[ARRAY]):
            args = (tensor_class(source.jax(), self), *args[1:])
        if func is torch.Tensor.contiguous and (STORAGE in vars(source) or options or args[1:]):
            # torchax takes every tensor for contiguous, and would return a view where torch copies. Only a
            # tensor with a storage may be a view, and so not contiguous.
            wanted: Any = (*args[1:], *options.values(), torch.contiguous_format)[0]
            is_contiguous = layout_of(source).is_contiguous(memory_format=wanted)
            return source if is_contiguous else source.clone(memory_format=wanted)
        try:
            result = dispatch(self, func, types, args, kwargs)
        except torchax.tensor.OperatorNotFound:
            # torchax lacks some operators that write into their input, such as `logical_and_`.
            if not isinstance(func, torch._ops.OpOverload) or not name.endswith("_"):
                raise
            with self._dispatch_mode:
                return source.copy_(getattr(torch.ops.aten, name.removesuffix("_"))(*args, **options))
        if func is torch.Tensor.to and result is source and (order or _asks_for_a_copy(args, options)):
            return source.clone(**order)
        # torch marks its operators that return views, but for `tensor_split`.
        if getattr(func, "is_view", False) or func is torch.tensor_split:
            share(source, result, lambda layout: func(layout, *args[1:], **options))
        elif isinstance(func, torch._ops.OpOverload) or func is torch.Tensor.to:
            keep_strides(func, args, options, result)
        return result

    def detach(self: Any) -> Any:
        array = vars(self)[ARRAY]
        detached = tensor_class(jax.lax.stop_gradient(array) if is_traced(array) else array, self._env)
        share(self, detached, torch.Tensor.detach)
        return detached

    def set_data(self: Any, other: Any) -> None:
        """Give the tensor another storage, that of a new array; its views keep the old one."""
        for name in (STORAGE, LAYOUT):
            vars(self).pop(name, None)
        vars(self)[ARRAY] = other.jax()

    torchax.tensor.Environment.dispatch = call
    tensor_class._elem = property(operator.attrgetter(ARRAY), write)  # each call reads a thousand
    tensor_class.jax = array_for_operation
    tensor_class.detach = detach
    tensor_class.data = property(detach, set_data)  # torchax's getter returns the tensor itself
    for kind in (tensor_class, slice_class):
        kind.is_meta = False  # of a tensor on torch's "meta" device, `nn.init.orthogonal_` fills nothing
        # torch's reads the shape that a tensor was made with, which `t_` has changed since.
        kind.view_as = lambda self, other: self.view(other.shape)
    del tensor_class.flatten  # torchax's makes an independent array, and takes no negative axes but -1
    tensor_class.type_as = lambda self, other: self.to(other.dtype)  # torchax's changes its input


def _tensors(results: Any) -> Iterator[Any]:
    """Yield the results of an operation, which returns one tensor or a list or tuple of tensors."""
    yield from results if isinstance(results, list | tuple) else (results,)
