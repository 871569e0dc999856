"""Every use of other packages' undocumented interfaces.

When a release removes one, this file alone changes; `tests/test_upstream.py` finds what is gone. `_attribute`
reads most of the private names, also those in private modules, so that the error of a missing one says which
release to install. A function that patches a class is decorated with `functools.cache`, so that it patches
the class once. Imports are inside functions, so that the Flax build can use this module without torch.

A *mode* of torch is an object through which torch sends all calls of a thread; torchax is on in a thread
while its modes are. A *part* of a pipeline is one of its components, such as a network or the scheduler. A
*hook* of diffusers is an object that replaces a module's forward, for example to skip it. `kind` is a class.
"""

import contextlib
import copyreg
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

from packaging.version import Version

from cogvideox_torchax.versions import TESTED, installed


def _attribute(package: str, owner: Any, name: str) -> Any:
    """Return an attribute of a class, or of a module, which is given by its name and imported.

    A new release may lack the attribute or the module; `ImportError` then names the release that has it.
    """
    try:
        if isinstance(owner, str):
            owner = sys.modules.get(owner) or importlib.import_module(owner)  # an import takes longer
        return getattr(owner, name)
    except (AttributeError, ModuleNotFoundError) as error:
        home = getattr(owner, "__name__", owner)
        raise ImportError(
            f"{package} {installed(package)} has no {home}.{name} any more: install "
            f"{package}=={TESTED[package].newest}, which is tested"
        ) from error


@functools.cache
def accept_unknown_members(kind: Any) -> None:
    """Let an enumeration of PyAV take numbers of FFmpeg that it has no member for; else it raises."""

    def unknown(cls: Any, value: object) -> Any:
        member = object.__new__(cls)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return member

    kind._missing_ = classmethod(unknown)


def torchax_is_on() -> bool:
    """Return whether this thread's torch calls go through torchax."""
    if "torchax" not in sys.modules:
        return False
    # While torchax is on, its mode is on torch's stack of function modes. torchax's own flag `enabled` is of
    # no use: it turns false after the first function that runs through `jax_view`.
    mode = _attribute("torchax", "torchax.tensor", "XLAFunctionMode")
    stack = _attribute("torch", "torch.overrides", "_get_current_function_mode_stack")
    return any(isinstance(active, mode) for active in stack())


@contextlib.contextmanager
def dispatching(mode: Any) -> Iterator[None]:
    """Run a block in one of torch's dispatch modes, which threads may share."""
    owner = "torch.utils._python_dispatch"
    _attribute("torch", owner, "_push_mode")(mode)
    try:
        yield
    finally:
        _attribute("torch", owner, "_pop_mode")()


_PYTHON_DEVICE: list[Any] = []
"""What PyTorch calls for the device that `add_python_device` has added, kept alive here."""


def add_python_device(operators: dict[str, Any]) -> None:
    """Tell PyTorch that the device which a package has named is written in Python (torch 2.11 or later).

    `operators` are those that make a tensor there, by name; PyTorch makes all other factories of them.
    """
    import torch

    utils = "torch.utils.backend_registration"
    hook = _attribute("torch", utils, "_DummyPrivateUse1Hook")()
    guard = _attribute("torch", utils, "_DummyDeviceGuard")()
    backends = _attribute("torch", "torch._C", "_acc")
    backends.register_python_privateuseone_hook(hook)
    backends.register_python_privateuseone_device_guard(guard)
    library = torch.library.Library("aten", "IMPL")
    for name, function in operators.items():
        library.impl(name, function, "PrivateUse1")
    # PyTorch would ask the device for pinned memory, of which a device in Python has none.
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    _PYTHON_DEVICE.extend((hook, guard, library))


def jax_has_started() -> bool:
    """Return whether this process, or the one that it was forked from, has used a device of JAX."""
    # JAX's public functions would do, but they take a lock. If another thread held the lock when this process
    # was forked, nobody ever releases it here.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(_attribute("jax", bridge, "_backends"))


def replace_array(tensor: Any, move: Callable[[Any], Any]) -> Any:
    """Replace the array of a torchax tensor by `move(array)`, and return the same tensor."""
    # torchax's public functions would make a new object of a parameter.
    return _attribute("torchax", type(tensor), "apply_jax_")(tensor, move)


def uncommitted(array: Any) -> Any:
    """Return a JAX array as one that JAX may move, if it is on one device; one on a mesh is left as it is.

    JAX commits what `device_put` returns to its device, and compiles a program for committed weights again.
    """
    import jax

    if not isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
        return array
    # The constructor of arrays is private.
    return type(array)(array.aval, array.sharding, [array], committed=False)


def array_in(tensor: Any) -> Any:
    """Return the array that a torchax tensor holds, None for a plain tensor."""
    # torchax's public function takes a hundred times as long, and a transformer has a thousand weights.
    return getattr(tensor, "_elem", None)


def teach_copying(kind: Any, to_torch: Any) -> None:
    """Make a class of torchax's tensors copyable and picklable, which the class is not by itself.

    A copy, also inside a copied module or state dict, shares the tensor's JAX array, which nothing writes
    into. A pickle holds a plain torch tensor, which loads with torchax installed or not. The class must
    define neither `__deepcopy__` nor `__reduce_ex__`.

    Args:
        kind: the class.
        to_torch: makes a plain tensor of a torchax tensor.
    """
    from torch import nn

    # `copy.deepcopy` calls this.
    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        copied = type(tensor)(array_in(tensor), tensor._env)  # the array also if it waits on the host
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied  # two references to one tensor stay one in the copy
        return copied

    # pickle calls this, and stores what it returns: how to make a plain tensor.
    def reduce(tensor: Any) -> Any:
        plain = to_torch(tensor)
        if isinstance(tensor, nn.Parameter):
            plain = nn.Parameter(plain, tensor.requires_grad)
        return plain.__reduce_ex__(2)  # the default protocol of `torch.save`

    kind.__copy__ = lambda tensor: deepcopy(tensor, {})  # by itself, `copy.copy` would unpickle a pickle
    kind.__deepcopy__ = deepcopy
    copyreg.pickle(kind, reduce)


def one_program_each(registry: Any) -> None:
    """Compile torchax's additions, subtractions and products of tensors as one program each.

    `registry` is torchax's module of that name, whose table has each operator's function as `func`.
    """
    # By itself torchax runs one program for the `y * alpha` of `x + y * alpha`, one to convert each Python
    # number, and then one for the sum. A device's queue has room for 32 programs. A step of diffusers' DPM
    # scheduler had 43, so Python could not send the next step's transformer to the device before the present
    # one was done.
    import jax
    import torch

    table = _attribute("torchax", registry, "all_aten_ops")
    # (operator, the names of its arguments that are Python numbers, each value of which gets a program)
    for name, static_arguments in (("add", ("alpha",)), ("sub", ("alpha",)), ("mul", ())):
        operator = table[getattr(torch.ops.aten, name).Tensor]
        operator.func = jax.jit(operator.func, static_argnames=static_arguments)


def added_device() -> str:
    """Return the name of the device that a package has added to PyTorch, "privateuseone" if none has."""
    return _attribute("torch", "torch._C", "_get_privateuse1_backend_name")()


def traced_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `torch.compile` traces by running it, as `jax.jit` does."""
    # Any other function is traced by reading its bytecode, which fails for code of JAX.
    return _attribute("torch", "torch._dynamo", "nonstrict_trace")(function)


def is_traced(array: Any) -> bool:
    """Return whether JAX is tracing the array, so that it has no value."""
    import jax.core

    return isinstance(array, _attribute("jax", jax.core, "Tracer"))


def is_tracing() -> bool:
    """Return whether JAX is tracing in this thread: for a program, a gradient or a shape."""
    return not _attribute("jax", "jax._src.core", "trace_state_clean")()


def module_of(function: Any) -> str:
    """Return the name of the module that a function or a method was written in."""
    # `__module__` does not tell: `functools.wraps` copies it from another function.
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if not isinstance(function, FunctionType):  # an object of a class with `__call__`, or a builtin
        return type(function).__module__
    return function.__globals__.get("__name__", "")  # none for what `exec` has made


def global_hooks() -> list[Any]:
    """Return torch's hooks that run before and after each module's forward, whatever the module."""
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    return [hook for name in names for hook in _attribute("torch", "torch.nn.modules.module", name).values()]


def dtype_option() -> str:
    """Return the name of `from_pretrained`'s argument for the dtype, which diffusers 0.40 has renamed."""
    return "dtype" if Version(installed("diffusers") or "0") >= Version("0.40") else "torch_dtype"


def hand_over(kind: type) -> None:
    """Have diffusers' `from_pipe` hand over parts of classes that are subclasses of `kind`, too.

    By itself it takes only parts of exactly the types that the new pipeline's class gives for their names.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    # `__func__` is the function behind the class method; its first argument is the class.
    make = _attribute("diffusers", DiffusionPipeline, "from_pipe").__func__

    @functools.wraps(make)
    def from_pipe(cls: type, pipeline: Any, **options: Any) -> Any:
        types_by_name = _attribute("diffusers", cls, "_get_signature_types")()
        ported = {
            name: part
            for name, part in pipeline.components.items()
            # Some types are no classes, such as `list[X]`.
            if isinstance(part, kind) and {*type(part).__mro__} & {*types_by_name.get(name, ())}
        }
        return make(cls, pipeline, **ported | options)  # a part in `options` replaces a ported one

    vars_of_class: Any = DiffusionPipeline
    vars_of_class.from_pipe = classmethod(from_pipe)


ROTARY_TABLES = "_prepare_rotary_positional_embeddings"
"""The method of diffusers' CogVideoX pipelines that makes tables of cosines and sines."""


def positions(kind: type, attributes: dict[str, Any], height: int, width: int, frames: int) -> Any:
    """Return a patch embedding's table of sinusoidal positions (1, S, C), which is zero for the text.

    S is the number of tokens, of the text and then of the patches, and C is the number of channels.

    Args:
        kind: diffusers' class.
        attributes: those of a module of this class, of which the numbers of channels and text tokens apply.
        height, width, frames: size of the latents.
    """
    patch_embed = SimpleNamespace(**attributes)
    pixel_frames = (frames - 1) * patch_embed.temporal_compression_ratio + 1
    compute_table = _attribute("diffusers", kind, "_get_positional_embeddings")
    return compute_table(patch_embed, height, width, pixel_frames)


def is_compiled(module: Any) -> bool:
    """Return whether a module is torch.compile's wrapper around another module."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # None: torch.compile has not run
    return dynamo is not None and isinstance(module, _attribute("torch", dynamo, "OptimizedModule"))


def uncompiled(module: Any) -> Any:
    """Return the module inside torch.compile's wrapper; a module without a wrapper is returned unchanged."""
    return module.get_submodule("_orig_mod") if is_compiled(module) else module


COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which a module has its compiled call, once `module.compile()` has run."""


OFFLOADING_HOOKS = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")
"""The names of diffusers' hooks that move weights between devices."""


class Hooked(NamedTuple):
    """A hook of diffusers on a module of a model.

    Attributes:
        module: the module's name in the model.
        name: the hook's name in the module's registry of hooks.
        hook: the hook itself.
    """

    module: str
    name: str
    hook: Any


def _hooks_of(network: Any) -> list[Hooked]:
    """List the hooks of diffusers in a network."""
    registries = ((path, vars(module).get("_diffusers_hook")) for path, module in network.named_modules())
    return [
        Hooked(path, name, hook)
        for path, registry in registries
        if registry is not None
        for name, hook in registry.hooks.items()
    ]


def _remove_hooks(network: Any, hooks: list[Hooked]) -> None:
    """Take hooks of `_hooks_of` off a network's modules."""
    for hooked in hooks:
        vars(network.get_submodule(hooked.module))["_diffusers_hook"].remove_hook(hooked.name, recurse=False)
    # Removing a hook leaves the forward of the module's class as an attribute of the module.
    for module in network.modules():
        if "_diffusers_hook" in vars(module):
            _delete_class_forward(module)


CASTING_HOOKS = "layerwise_casting", "peft_autocast_disable"
"""The names of diffusers' hooks for weights that are cast layer by layer; the first one casts."""


def cast_dtype(module: Any) -> Any:
    """Return the dtype to which a hook of diffusers casts a module's own weights in a call; None for none."""
    registry = vars(module).get("_diffusers_hook")
    hook = registry and registry.hooks.get(CASTING_HOOKS[0])
    return hook and hook.compute_dtype


def is_cast(network: Any) -> bool:
    """Return whether hooks of diffusers cast a network's weights during a call."""
    return any(cast_dtype(module) is not None for module in network.modules())


def take_casting(network: Any) -> None:
    """Take the hooks off a network that cast its weights, which stay as they are."""
    hooks = [hooked for hooked in _hooks_of(network) if hooked.name in CASTING_HOOKS]
    for hooked in hooks:
        # diffusers would refuse, as nothing gives the weights back the bits that they have lost.
        hooked.hook.deinitalize_hook = lambda module: module
    _remove_hooks(network, hooks)


def from_gguf(data: Any, quant_type: Any) -> Any:
    """Return the matrix (O, I), in float16 or float32, that GGUF's bytes (O, bytes) stand for."""
    utils = "diffusers.quantizers.gguf.utils"
    block_size, bytes_of_block = _attribute("diffusers", utils, "GGML_QUANT_SIZES")[quant_type]
    write_out = _attribute("diffusers", utils, "dequantize_functions")[quant_type]
    blocks = write_out(data.reshape(-1, bytes_of_block), block_size, bytes_of_block)
    return blocks.reshape(data.shape[0], -1)


def bits_of(weight: Any) -> tuple[Any, Any, int | None] | None:
    """Return the bits of a quantized weight (O, I), their factors (O), and GGUF's number of their format.

    Factors and format are None where there are none. All is None for a form that no layer here takes: another
    library's, one with several factors for an output channel, or one that rounds activations too.
    """
    kind = type(weight).__name__
    if kind == "GGUFParameter":  # diffusers'
        return weight.as_tensor(), None, weight.quant_type
    if kind not in ("Int8Tensor", "Float8Tensor"):  # torchao's
        return None
    scale, zero_point = weight.scale, getattr(weight, "zero_point", None)
    if (
        not (scale.numel() == 1 or scale.shape[0] == scale.numel() == len(weight))
        or (zero_point is not None and bool(zero_point.any()))
        or any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "act_pre_scale"))
    ):
        return None
    return weight.qdata, scale.float().flatten().expand(len(weight)).contiguous(), None


def is_offloaded(network: Any) -> bool:
    """Return whether hooks move a network's weights between devices."""
    # accelerate marks such a network by the attribute `_hf_hook`, and diffusers by the names of its hooks.
    return hasattr(network, "_hf_hook") or any(
        hooked.name in OFFLOADING_HOOKS for hooked in _hooks_of(network)
    )


def take_offloading(network: Any) -> bool:
    """Take the hooks off a network that move its weights, which are in the host's memory then.

    Returns:
        Whether there were any.
    """
    from accelerate.hooks import remove_hook_from_module

    if not is_offloaded(network):
        return False
    remove_hook_from_module(network, recurse=True)
    for module in network.modules():
        _delete_class_forward(module)
    hooks = [hooked for hooked in _hooks_of(network) if hooked.name in OFFLOADING_HOOKS]
    groups = (getattr(hooked.hook, "group", None) for hooked in hooks)
    on_disk: list[Any] = [group for group in groups if getattr(group, "offload_to_disk_path", None)]
    # A tied weight is in the files of several groups. Only the file that was written first has its values, as
    # diffusers empties a weight that it has written: so that file is read last.
    written_at = {group: os.stat(group.safetensors_file_path).st_mtime_ns for group in reversed(on_disk)}
    for group in sorted(written_at, key=lambda group: written_at[group], reverse=True):
        group.onload_()
    _remove_hooks(network, hooks)
    return True


TRACING_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
"""Undocumented names of the events in `jax.monitoring` for the times to trace, and then to lower."""

COMPILING_EVENTS = ("/jax/core/compile/backend_compile_duration",)
"""The undocumented name of the event in `jax.monitoring` for the time to compile."""


def scaling_loras(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a transformer's forward `step` so that `attention_kwargs["scale"]` scales its LoRAs."""
    return _attribute("diffusers", "diffusers.utils.peft_utils", "apply_lora_scale")("attention_kwargs")(step)


CACHE_HOOKS = ("FBC", "Mag", "PyramidAttention", "FasterCache", "TaylorSeer", "SeaCache", "TextKVCache")
"""Prefixes of the class names of diffusers' cache hooks."""

CACHE_STATE = frozenset({"_cache_config", "_diffusers_hook", "step_cache"})
"""The attributes in which a transformer holds its cache."""


def take_hooks(model: Any) -> list[Hooked]:
    """Take the hooks of diffusers' caches off a model's modules, and return them."""
    taken = [hooked for hooked in _hooks_of(model) if type(hooked.hook).__name__.startswith(CACHE_HOOKS)]
    _remove_hooks(model, taken)
    for hooked in taken:
        hooked.hook.fn_ref = None  # drops the hook's reference to the module
    return taken


def _delete_class_forward(module: Any) -> None:
    """Delete a module's attribute `forward` if it is only the method of the module's class or of a base."""
    # Removing a hook sets the attribute to the method that the hook wrapped. If `port` has given the module a
    # subclass of its class since, the attribute would hide the subclass's forward. A `forward` that no class
    # defines, such as another hook's, stays.
    forward = vars(module).get("forward")
    if isinstance(forward, MethodType) and any(
        vars(kind).get("forward") is forward.__func__ for kind in type(module).__mro__
    ):
        del vars(module)["forward"]


def put_hooks(model: Any, hooks: list[Hooked]) -> None:
    """Put hooks that `take_hooks` took off a model back on the modules where they were."""
    from diffusers.hooks.hooks import HookRegistry

    for hooked in hooks:
        module = model.get_submodule(hooked.module)
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hooked.hook, hooked.name)
    # The model's registry keeps a list of its modules' registries. Registries that were made above are not in
    # it, so it is dropped, and diffusers makes it again.
    HookRegistry.check_if_exists_or_initialize(model).invalidate_child_registries_cache()


def set_context(hook: Any, name: str | None) -> None:
    """Select the state that a cache's hook uses: that of a named context, or none if the name is None."""
    from diffusers.hooks.hooks import CacheContext

    # A context is one pass of guidance, with the prompt or without. A hook has a state for each context,
    # unless it lacks a `state_manager`.
    if hasattr(hook, "state_manager"):
        hook.state_manager.set_context(None if name is None else CacheContext(name))


def call_hook(hook: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a hook that was taken off its module, with `forward` in place of the module's forward.

    The result is dropped: the caller learns from `forward` whether the hook calls it or skips it.
    """
    # A hook finds the forward of its module in `fn_ref`.
    hook.fn_ref = SimpleNamespace(original_forward=forward)
    hook.new_forward(None, *args, **kwargs)  # None in place of the module, which the hook does not read


def record_ratio(hook: Any, ratio: Any) -> None:
    """Record a step's ratio for MagCache's calibration, which diffusers prints, and count the step.

    `ratio`, a tensor with one value, compares what the blocks add to their input in this step and in the step
    before. `hook` is that of the last block, and its context is set (`set_context`).
    """
    state = hook.state_manager.get_state()
    # In the first step, which has no step before it, `ratio` has no meaning: 1 is recorded, as in diffusers.
    state.calibration_ratios.append(float(ratio) if state.calibration_ratios else 1.0)
    _attribute("diffusers", type(hook), "_advance_step")(hook, state)


@functools.cache
def register_block(kind: type) -> None:
    """Register a class of blocks with diffusers' caches, as diffusers does for its CogVideoX block."""
    registry = _attribute("diffusers", "diffusers.hooks._helpers", "TransformerBlockRegistry")
    metadata = _attribute("diffusers", "diffusers.hooks._helpers", "TransformerBlockMetadata")
    # The caches look up here which item of a block's result is the patches, and which the text.
    registry.register(kind, metadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1))
