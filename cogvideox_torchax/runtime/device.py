"""JAX as a device of PyTorch's: `x.to("jax")` works in any thread, and nothing has to be enabled.

torchax has tensors whose values are JAX arrays, and it runs PyTorch's operations on them while it is enabled.
Here PyTorch learns that its device "jax" is written in Python, and an operation on torchax's tensors runs by
torchax whether or not it is enabled. It follows these rules, inside torchax's own modes too:

- Without a tensor on JAX and without JAX as its device, an operation is PyTorch's own.
- Tensors of the host among its arguments are moved to JAX, but for those without axes, which PyTorch mixes
  with any device. Only `copy_` writes a tensor on JAX into one of the host.
- Random numbers are PyTorch's: the host draws them.
- An operator that torchax lacks runs on the host, and a warning names it. A program has none of these two.
- A small tensor whose values came from the host, and what is computed from such tensors alone, is known to
  the host: to read it is not to wait for the device, as where a scheduler looks a timestep up in its tables.

Only this module and `functions`, which it calls, import torchax.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from cogvideox_torchax import upstream
from cogvideox_torchax.arrays.compile_cache import configure_compile_cache
from cogvideox_torchax.arrays.forks import check_not_forked
from cogvideox_torchax.runtime import views
from cogvideox_torchax.runtime.host import (
    PLAIN,
    TPU,
    device_and_dtype,
    host_array,
    is_jax_device,
    on_host,
    on_jax,
    plain_tensor,
)
from cogvideox_torchax.runtime.views import KNOWN
from cogvideox_torchax.versions import TESTED, installed

KNOWN_SIZE = 1024
"""The most elements of a tensor whose values the host keeps."""


class RandomInTraceError(ValueError):
    """A random number drawn while JAX traces a program, which would repeat this number in each call."""


def import_torchax() -> Any:
    """Return the package torchax, with its `interop`, ready to compute.

    Raises:
        ForkError: this process was forked from one that uses JAX.
        ImportError: torchax does not import; the message names the pair of versions to install.
    """
    check_not_forked()  # in each call, as a forked child has its parent's cached results
    return _ready_torchax()


@functools.cache
def _ready_torchax() -> Any:
    torchax = register()
    configure_compile_cache()
    torchax.default_env().config.force_materialize_views = True  # `views` has them share their values
    return torchax


@functools.cache
def register() -> Any:
    """Make JAX a device of PyTorch's, for the whole process; return torchax. No device is used yet."""
    torchax = _imported_torchax()
    from cogvideox_torchax.runtime.functions import replace_functions  # it imports JAX

    kind = torchax.tensor.Tensor
    upstream.teach_copying(kind, fetched)
    kind.__torch_dispatch__, kind.__torch_function__ = classmethod(_operate), classmethod(_call)
    kind.__repr__ = kind.__str__ = _shown
    kind.__new__ = staticmethod(_outside_inference(kind.__new__))
    kind.numpy = lambda self, **_: on_host(self.jax())
    kind.tolist = lambda self: self.jax().tolist()
    _correct_tables(torchax)
    replace_functions(torchax.ops.ops_registry)
    views.share_views(kind)
    kind.__format__ = _formatted
    torchax.tensor.Environment.dispatch = _dispatch(torchax.tensor.Environment.dispatch)
    upstream.add_python_device(
        {"empty.memory_format": _empty, "empty_strided": _empty, "_to_copy": _to_copy}
        | {name: functools.partial(_made_on_host, name) for name in OF_UNKNOWN_SIZE}
    )
    return torchax


def _imported_torchax() -> Any:
    try:
        # The modules of `ops` put their operations into torchax's tables, which are changed below.
        import torchax.interop
        import torchax.ops.jaten
        import torchax.ops.jtorch
    except (ImportError, RuntimeError, AttributeError) as error:
        # AttributeError: torch has dropped an operator that torchax names.
        pair = " ".join(f"{package}=={TESTED[package].newest}" for package in ("torchax", "torch"))
        raise ImportError(
            f"torchax {installed('torchax')} does not import with torch {torch.__version__} ({error}); "
            f"install the pair that is tested: pip install {pair}"
        ) from error
    return torchax


def _correct_tables(torchax: Any) -> None:
    """Correct how torchax moves values, and the dtypes of 64 bits, for which JAX takes 32 with a warning."""
    ops = torchax.ops
    upstream.one_program_each(ops.ops_registry)  # sums and products run as one program, not as several
    mappings, jax_dtype = ops.mappings, ops.mappings.t2j_dtype
    mappings.j2t = lambda array, _dlpack: plain_tensor(on_host(array))  # torchax's shares memory with JAX
    mappings.t2j_dtype = lambda dtype: jax.dtypes.canonicalize_dtype(jax_dtype(dtype))
    if jax.dtypes.canonicalize_dtype("int64") == "int32":
        for module in (ops.jaten, ops.jtorch):
            module.jnp = SimpleNamespace(**vars(module.jnp) | {"int64": module.jnp.int32})


# What PyTorch calls to make a tensor on JAX: all of its factories are made of these.

OF_UNKNOWN_SIZE = (
    *("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace", "randperm"),
    *("randperm.generator", "range", "range.step", "tril_indices", "triu_indices"),
)
"""The factories that PyTorch makes by resizing an empty tensor, whose size a wrapper of torchax's keeps."""


def _empty(size: Any, *_strides: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    torchax = import_torchax()
    jax_dtype = torchax.ops.mappings.t2j_dtype(dtype or torch.get_default_dtype())
    return torchax.interop.torch_view(jnp.zeros(tuple(size), jax_dtype))


def _to_copy(source: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Copy a plain tensor to JAX."""
    return to_jax(source if dtype is None else source.to(dtype))


def _made_on_host(name: str, *args: Any, **options: Any) -> Any:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return to_jax(operator(*args, **options | {"device": torch.device("cpu")}))


# An operation on tensors on JAX


def _outside_inference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run without inference mode, in which PyTorch makes no operators of functions."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **options)

    return call


def _operate(_kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operator; PyTorch calls this where no mode of torchax's is on."""
    if func is torch.ops.prim.device.default:
        return torch.device("jax", 0)
    if torch.is_inference_mode_enabled():  # in which PyTorch has not made operators of a function
        return _outside_inference(func)(*args, **kwargs or {})
    return import_torchax().default_env().dispatch(func, types, args, kwargs)


@_outside_inference
def _call(_kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a function of torch's: PyTorch makes operators of it, which have gradients."""
    options = kwargs or {}
    environment = _ready_torchax().default_env()  # unchecked: a forked child may ask for a dtype
    with torch._C.DisableTorchFunctionSubclass():
        tensors = _tensors_in(args, options)
        # PyTorch has to know of a slice that it is one, where a gradient may be written into it.
        in_parts = func is torch.Tensor.__getitem__ and (
            torch.is_grad_enabled() or not on_jax(args[0]) or KNOWN in vars(args[0])
        )
        if func in _INSTEAD or (func in _WHOLE and not views.records_gradients(tensors) and not in_parts):
            with contextlib.suppress(import_torchax().tensor.OperatorNotFound):
                return environment.dispatch(func, types, args, options)
        # In the mode, torchax also makes the tensors that PyTorch makes on the way, such as those of numbers.
        with upstream.dispatching(environment._dispatch_mode):
            return func(*args, **options)


_WHOLE = (F.scaled_dot_product_attention, F.one_hot, torch.Tensor.__getitem__)
"""The functions that run as one operation of torchax's where no gradients are recorded."""


class _Fetched(torch.autograd.Function):
    """A copy on the host, whose gradient goes to JAX: PyTorch's own would go to "meta"."""

    @staticmethod
    def forward(ctx: Any, source: Any, dtype: torch.dtype) -> torch.Tensor:
        return fetched(source).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return to_jax(gradients[0]), None


def _to(source: Any, *args: Any, **options: Any) -> Any:
    """Do what `to` does on JAX, where PyTorch's wrapper may have the dtype that `data` had before."""
    device, dtype = device_and_dtype(args, options)
    if on_jax(source) and str(device).startswith("cpu") and views.records_gradients([source]):
        return _Fetched.apply(source, dtype or source.dtype)
    if not on_jax(source) or not (device is None or is_jax_device(device)):
        raise import_torchax().tensor.OperatorNotFound("a move from JAX or to it")
    if dtype in (None, source.dtype) and not views.asks_for_a_copy(args, options):
        return source
    return torch.ops.aten._to_copy.default(source, dtype=dtype or source.dtype)


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    return data.detach().clone().to(device, dtype or data.dtype).requires_grad_(requires_grad)


def _new_tensor(like: Any, data: Any, *, dtype: Any = None, device: Any = "jax", **options: Any) -> Any:
    return torch.tensor(data, dtype=dtype or like.dtype, device=device, **options)


def _fill_diagonal(tensor: Any, value: float, wrap: bool = False) -> Any:
    filled = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.copy_(torch.ops.aten.fill_diagonal_(filled, value, wrap))


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda source, **_: _to(source, "cpu"),
    torch.Tensor.float: lambda source, **_: _to(source, torch.float32),
    torch.Tensor.half: lambda source, **_: _to(source, torch.float16),
    torch.Tensor.bfloat16: lambda source, **_: _to(source, torch.bfloat16),
    torch.Tensor.contiguous: views.contiguous,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.as_tensor: lambda data, dtype=None, device=None: data.to(device, dtype or data.dtype),
    torch.tensor: _tensor,
    torch.Tensor.new_tensor: _new_tensor,
}
"""What functions do on JAX that ask a wrapper of torchax's for its memory or its device, "meta"."""


def _dispatch(torchax_dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return torchax's `Environment.dispatch` with the rules of this module around it."""

    @functools.wraps(torchax_dispatch)
    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        options = kwargs or {}

        def run(args: Any, options: Any) -> Any:
            check_not_forked()
            return torchax_dispatch(self, func, types, args, options)

        tensors = _tensors_in(args, options)
        if not any(map(on_jax, tensors)):
            return _without_jax_tensors(func, args, options, tensors, run)
        if not isinstance(func, torch._ops.OpOverload):
            if func in _INSTEAD:
                return _INSTEAD[func](*args, **options)
            if func in self._ops:
                # PyTorch makes operators of a call with other arguments.
                if "out" in options or not options.keys() <= _names_of(self._ops[func].func):
                    raise import_torchax().tensor.OperatorNotFound(f"{func.__name__} with {[*options]}")
                args, options = _all_on_devices(args, options, tensors)
            return views.as_in_torch(func, args, options, run(args, dict(options)))
        written = _written(func, args, options)
        if written and not on_jax(written[0]):
            return _written_on_host(func, args)
        if _is_random(func) or (not written and _are_known(tensors)):
            result = _on_host(func, args, options, written)
        else:
            args, options = _all_on_devices(args, options, tensors)
            result = _run_operator(self, func, args, options, written, run)
        return views.as_in_torch(func, args, options, result)

    return dispatch


def _run_operator(self: Any, func: Any, args: Any, options: Any, written: list[Any], run: Any) -> Any:
    """Run an operator by torchax, by others that torchax has, or on the host."""
    packet, name, aten = func.overloadpacket, func.overloadpacket.__name__, torch.ops.aten
    if packet in (aten.copy_, aten.set_):  # by `set_` `register_parametrization` keeps a weight
        return _copied(*args[:2])
    dtype = options.get("dtype")
    if dtype is not None and all(argument.name != "layout" for argument in func._schema.arguments):
        # torch casts what it sums; torchax has no such option for most sums, or does not look at it.
        rest = {option: value for option, value in options.items() if option != "dtype"}
        return _run_operator(self, func, (args[0].to(dtype), *args[1:]), rest, written, run).to(dtype)
    is_factory = "out" in options and not any(map(on_jax, _tensors_in(args, {})))
    if is_factory or packet is aten.resize_:  # which a factory calls for its `out`
        return _on_host(func, args, options, written)
    if written or name.startswith("_foreach_"):
        with upstream.dispatching(self._dispatch_mode):  # in which an operator's parts are torchax's too
            if name.startswith("_foreach_"):  # torch computes it by one operation for each tensor
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **options)
            if "out" in options:
                rest = {option: value for option, value in options.items() if option != "out"}
                return _copied(options["out"], packet(*args, **rest))
            functional = getattr(aten, name.removesuffix("_"), packet)  # `add` of `add_`
            is_in_place = functional is not packet and len(written) == 1 and written[0] is args[0]
            if is_in_place and packet is not aten.embedding_renorm_:
                # The result may have another shape.
                _assign(args[0], functional(*args, **options).to(args[0].dtype).jax())
                return args[0]
    try:
        result = run(args, dict(options))  # which takes options out as it reads them
        returns = func._schema.returns
        if len(returns) == 1 and str(returns[0].type) == "bool":
            return bool(result)  # of `allclose`, whose result torchax leaves on the device
        if len(returns) > 1 and (isinstance(result, torch.Tensor) or len(result) != len(returns)):
            # Of `slogdet`'s four results torchax has two.
            raise import_torchax().tensor.OperatorNotFound(f"{name} with {len(returns)} results")
        is_lost = len(written) == 1 and result is not written[0]  # of `embedding_renorm_`
        return written[0].copy_(result) if is_lost else result
    except (import_torchax().tensor.OperatorNotFound, TypeError) as error:
        form = self._ops.get(func) or self._ops.get(packet)
        if isinstance(error, TypeError) and (form is None or options.keys() <= _names_of(form.func)):
            raise  # torchax's form takes these options, so the error is the user's
        with upstream.dispatching(self._dispatch_mode):
            result = func.decompose(*args, **options)  # in an operator's own parts, PyTorch leaves one whole
        if result is not NotImplemented:
            return result
        if _in_program():
            raise
        _warn_of(name)
        return _on_host(func, args, options, written)


@functools.cache
def _warn_of(operator: str) -> None:
    warnings.warn(f"torchax has no {operator}: it runs on the host, which waits for the device", stacklevel=2)


def _without_jax_tensors(func: Any, args: Any, options: Any, tensors: list[Any], run: Any) -> Any:
    """Run an operation without tensors on JAX in a mode of torchax's; its result may be there."""
    is_move = func is torch.Tensor.to
    device = device_and_dtype(args[1:], options)[0] if is_move else options.get("device")
    kind = str(device).partition(":")[0]  # every other device, such as "cuda", stands for JAX
    if isinstance(func, torch._ops.OpOverload):
        # PyTorch makes it on the way. "meta", the device of torchax's wrappers, stands for JAX here.
        if kind == "cpu":
            return func(*args, **options)
        return _on_host(func, args, options, []) if _is_random(func) and not tensors else run(args, options)
    if tensors and (not is_move or kind in ("None", "cpu")):
        return func(*args, **options)
    kind = torch.get_default_device().type if device is None else kind
    if kind in ("cpu", "meta"):
        with no_dispatch():
            return func(*args, **options)
    if func in DRAWS:
        return func(*args, **options | {"device": "jax"})
    return run(args, dict(options))


DRAWS = (torch.randn, torch.rand, torch.randint)
"""torch's functions that draw random numbers from a shape alone, for which torchax has its own."""


def _on_host(func: Any, args: Any, options: Any, written: list[Any]) -> Any:
    """Run an operator on the host, and give what it writes to the tensors on JAX."""
    if not _are_known(_tensors_in(args, options)) and _in_program():
        if not _is_random(func):
            raise import_torchax().tensor.OperatorNotFound(f"{func} has no form on JAX")
        raise RandomInTraceError(
            f"{func.overloadpacket.__name__} draws random numbers, which no program on JAX does"
        )
    hosts: dict[int, tuple[Any, torch.Tensor]] = {}  # by the id of a tensor on JAX, it and its copy

    def host_copy(tensor: Any) -> Any:
        if not on_jax(tensor):
            return tensor
        if id(tensor) not in hosts:
            host = _host_copy(tensor, ordered=_is_random(func))
            # NumPy's memory, which a copy may have, cannot be resized.
            hosts[id(tensor)] = tensor, host.clone() if any(tensor is each for each in written) else host
        return hosts[id(tensor)][1]

    device, tensors = options.get("device"), _tensors_in(args, options)
    # A number that the host knows mixes with tensors of the host as one of the host does.
    mixes = any(type(tensor) in PLAIN and tensor.ndim for tensor in tensors)
    stays = (
        device.type == "cpu" if device else mixes and not any(on_jax(each) and each.ndim for each in tensors)
    )
    if "device" in options:
        options = options | {"device": torch.device("cpu")}
    with no_dispatch():
        host_args, host_options = _map_tensors(host_copy, args, options)
        try:
            results = func(*host_args, **host_options)
        except (RuntimeError, IndexError):  # indices, which JAX has in 32 bits
            host_args = pytree.tree_map_only(
                torch.Tensor, lambda each: each.long() if each.dtype == torch.int32 else each, host_args
            )
            results = func(*host_args, **host_options)
    for tensor, host in hosts.values():
        if any(tensor is each for each in written):
            _assign(tensor, to_jax(host).jax(), host)
    given = {id(host): tensor for tensor, host in hosts.values()}

    def returned(host: torch.Tensor) -> Any:
        return given.get(id(host), host) if id(host) in given or stays else to_jax(host)

    return pytree.tree_map_only(torch.Tensor, returned, results)


def _host_copy(tensor: Any, *, ordered: bool) -> torch.Tensor:
    """Return the values of a tensor on JAX, if `ordered` in the order of memory that PyTorch has them in."""
    host = vars(tensor)[KNOWN] if KNOWN in vars(tensor) else fetched(tensor)
    layout = views.layout_of(tensor)
    if not ordered or layout.is_contiguous() or 0 in layout.stride():
        return host
    return torch.empty_strided(layout.shape, layout.stride(), dtype=host.dtype).copy_(host)


def _written(func: Any, args: Any, options: Any) -> list[Any]:
    """Return the tensors among an operator's arguments that it writes."""
    values = [
        args[position] if position < len(args) else options.get(name)
        for position, name in _written_arguments(func)
    ]
    return _tensors_in(values, {})


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info and each.alias_info.is_write)


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _are_known(tensors: list[Any]) -> bool:
    """Return whether the host has the values of all of the tensors that are on JAX."""
    return all(KNOWN in vars(each) for each in tensors if on_jax(each)) and not upstream.is_tracing()


def _in_program() -> bool:
    """Return whether an array that is made now has no value, since JAX is tracing a program."""
    # `upstream.is_tracing` is true also while JAX computes a gradient, which may draw random numbers.
    return upstream.is_traced(jnp.zeros(()))


def _copied(target: Any, source: Any) -> Any:
    array = to_jax(source).jax().astype(import_torchax().ops.mappings.t2j_dtype(target.dtype))
    known = source if type(source) in PLAIN and source.shape == target.shape else None
    _assign(target, jnp.broadcast_to(array, target.shape), known)
    return target


def _assign(target: Any, array: Any, host: torch.Tensor | None = None) -> None:
    """Give a tensor on JAX another array, whose values are those of `host`, if it is given."""
    target._elem = array
    if host is not None and host.numel() <= KNOWN_SIZE and not upstream.is_traced(array):
        vars(target)[KNOWN] = _kept(host, target.dtype)


def _written_on_host(func: Any, args: Any) -> Any:
    """Copy a tensor on JAX into one of the host; refuse every other write there."""
    if func.overloadpacket is torch.ops.aten.copy_:
        return args[0].copy_(fetched(args[1]))
    raise ValueError(
        f"got {func.overloadpacket.__name__}, which writes a tensor on JAX into one of the host: move that "
        '.to("jax")'
    )


def _all_on_devices(args: Any, options: Any, tensors: list[Any]) -> Any:
    """Move an operation's tensors of the host, and those that wait there, to JAX; not those without axes."""
    if not any(type(tensor) in PLAIN or views.waits(tensor) for tensor in tensors):
        return args, options

    def on_devices(tensor: Any) -> Any:
        if type(tensor) in PLAIN:
            return to_jax(tensor) if tensor.ndim else tensor
        return type(tensor)(tensor.jax(), tensor._env) if views.waits(tensor) else tensor

    return _map_tensors(on_devices, args, options)


@functools.cache
def _names_of(implementation: Any) -> frozenset[str]:
    return frozenset(inspect.signature(implementation).parameters)


def _tensors_in(args: Any, options: Any) -> list[Any]:
    leaves = [*args, *options.values()]
    if any(isinstance(leaf, list | tuple | dict) for leaf in leaves):  # else the list is flat already
        leaves = pytree.tree_leaves(leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _map_tensors(function: Callable[[Any], Any], args: Any, options: Any) -> Any:
    """Return an operation's arguments with `function` of each tensor in its place."""

    def replaced(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    if any(isinstance(leaf, list | tuple | dict) for leaf in (*args, *options.values())):
        return pytree.tree_map_only(torch.Tensor, function, (args, options))
    # PyTorch's trees take ten times as long.
    return tuple(map(replaced, args)), {name: replaced(leaf) for name, leaf in options.items()}


def to_jax(tensor: torch.Tensor) -> Any:
    """Copy a plain tensor to JAX's default device; return a torchax tensor unchanged.

    No gradient flows from the copy back to the plain tensor.
    """
    if on_jax(tensor):
        return tensor
    # A copy of its own, whose memory JAX may keep. `jnp.asarray` compiles a program for each shape, but in a
    # program's trace, where `device_put` would be an operation.
    copied = np.array(host_array(tensor), order="C")
    array = jnp.asarray(copied) if upstream.is_tracing() else jax.device_put(copied)
    moved = import_torchax().interop.torch_view(array)
    if moved.numel() <= KNOWN_SIZE and not upstream.is_traced(moved.jax()):
        vars(moved)[KNOWN] = _kept(tensor, moved.dtype)
    return moved


def _kept(host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return host.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def fetched(tensor: Any) -> torch.Tensor:
    """Return a plain copy of a tensor on JAX; return any other tensor unchanged."""
    return plain_tensor(on_host(tensor.jax())) if on_jax(tensor) else tensor


def _shown(tensor: Any) -> str:
    if upstream.is_traced(tensor.jax()):
        return f"tensor({tensor.jax()}, device='jax:0')"
    return f"{repr(fetched(tensor)).removesuffix(')')}, device='jax:0')"


def _formatted(tensor: Any, form: str) -> str:
    is_number = not tensor.ndim and not upstream.is_traced(tensor.jax())
    return format(fetched(tensor).item() if is_number else str(tensor), form)


# A program: torchax is on while it is traced


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Have torchax run this thread's torch calls in a `with` block, as in the programs that it traces.

    Inference mode is off in the block: in that mode torch does not decompose operations such as `chunk`, and
    torchax implements only the smaller ones. Gradients are recorded in the block if they are outside.
    """
    records_gradients = torch.is_grad_enabled()
    torchax_on = contextlib.nullcontext() if upstream.torchax_is_on() else import_torchax().default_env()
    # `inference_mode(False)` turns gradients on, so their setting is restored after it.
    with torchax_on, torch.inference_mode(False), torch.set_grad_enabled(records_gradients):
        yield


if upstream.added_device() != TPU:  # PyTorch has room for one device, which may be TorchTPU's
    register()
