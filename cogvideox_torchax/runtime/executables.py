"""Executables that an earlier process kept: a process that finds one neither traces nor lowers its program.

JAX's compile cache keeps executables by the text of the lowered program, so that each process has to trace
and lower it first. Here an executable is kept beside that cache by its *key*, a hash of all that tracing and
compiling read:

- the versions of the libraries, the sources of this package and of `jax_kernels`, and what their modules and
  the classes of the network hold in memory, as somebody may have replaced a function;
- the network: its modules with their classes and attributes, and the names of its weights;
- the arguments: trees, shapes, dtypes and shardings; the place; and the kind of the devices;
- JAX's and torch's settings, and the variables of the environment that JAX, XLA and the kernels read.

All of these are hashed by value. What has no value that is the same in each process, such as a user's
function or an object of an unknown class, has no key: then nothing is kept, and nothing is looked for.
"""

import enum
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import pickle
import platform
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.layers import is_profiling
from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES
from cogvideox_torchax.runtime.skeleton import LIBRARIES
from cogvideox_torchax.runtime.snapshot import TREE, modules_of, weight_pattern
from cogvideox_torchax.versions import versions

OWN = frozenset({"cogvideox_torchax", "jax_kernels"})
"""The packages whose sources and modules are hashed, as a checkout changes under one version."""

SWITCH = "COGVIDEOX_TORCHAX_EXECUTABLES"
"""Environment variable that turns this off: "off" keeps no executables, and looks for none."""

KNOWN = LIBRARIES | OWN | sys.stdlib_module_names
"""Packages whose functions and classes are what their versions say, unless one has been replaced."""

VARIABLES = ("COGVIDEOX_TORCHAX_", "JAX_", "LIBTPU_", "NVIDIA_TF32", "TPU_", "XLA_")
"""Beginnings of the names of environment variables that tracing or compiling may read."""

SCALARS = (
    str,
    int,
    float,
    complex,
    bytes,
    type(None),
    type(...),
    enum.Enum,
    torch.dtype,
    torch.device,
    np.dtype,
)
CACHE_SETTING = "compilation_cache"
"""Part of the names of JAX's settings, and of variables, that say where and how its compile cache is kept."""


LOGGER = logging.getLogger(__name__)


class NoValueError(Exception):
    """Something that a program depends on has no value that is the same in each process."""


class Kept(NamedTuple):
    """An executable, called as the program is, and structs of its results."""

    run: Callable[..., Any]
    results: Any


def package_of(name: str | None) -> str:
    return (name or "").partition(".")[0]


def kind_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class Describer:
    """Describes values by tuples of texts that are equal in two processes if the values are.

    Args:
        strict: whether an object of an unknown class raises `NoValueError`, as a function of a user always
            does; else the class stands for the object.
    """

    def __init__(self, strict: bool):
        self._strict = strict
        # By its id, what was met, with its number. Keeping it keeps its id from being used again.
        self._met: dict[int, tuple[int, Any]] = {}
        self.classes: dict[type, None] = {}  # those of the objects that were described

    def meet(self, value: Any) -> None:
        self._met[id(value)] = len(self._met), value

    def __call__(self, value: Any) -> Any:
        if isinstance(value, SCALARS):
            return kind_name(value), repr(value)
        if isinstance(value, tuple):
            return kind_name(value), [*map(self, value)]
        if isinstance(value, frozenset | set):
            # Each by a describer of its own: the order of a set differs between processes.
            return kind_name(value), sorted(repr(Describer(self._strict)(item)) for item in value)
        if isinstance(value, types.CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            return value.co_code.hex(), value.co_flags, names, self(value.co_consts)
        if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            return getattr(value, "__module__", ""), value.__name__
        if isinstance(value, types.MethodType):
            return self(value.__func__), self(value.__self__)
        if isinstance(value, jax.Device):
            return device_name(value)
        if isinstance(value, jax.sharding.Mesh):
            return value.axis_names, value.devices.shape, [*map(device_name, value.devices.flat)]
        if isinstance(value, jax.sharding.NamedSharding):
            return self(value.mesh), repr(value.spec), value.memory_kind
        if isinstance(value, jax.sharding.SingleDeviceSharding):
            return [*map(device_name, value.device_set)], value.memory_kind
        if id(value) in self._met:
            return "met", self._met[id(value)][0]
        self.meet(value)
        return kind_name(value), self._parts(value)

    def _parts(self, value: Any) -> Any:
        """Return what describes a value that may hold itself."""
        if isinstance(value, Mapping):  # where a model was loaded from is not read
            return [(self(key), self(item)) for key, item in value.items() if key != "_name_or_path"]
        if isinstance(value, list):
            return [*map(self, value)]
        if isinstance(value, types.FunctionType):
            package = package_of(value.__globals__.get("__name__"))
            if package not in KNOWN and not package.startswith("namedtuple_"):
                raise NoValueError(f"the function {value.__qualname__}")
            cells = inspect.getclosurevars(value).nonlocals if value.__closure__ else {}
            return [
                *map(
                    self,
                    (value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, cells),
                )
            ]
        if isinstance(value, staticmethod | classmethod):
            return self(value.__func__)
        if isinstance(value, property):
            return self((value.fget, value.fset, value.fdel))
        if isinstance(value, functools.partial):
            return self((value.func, value.args, value.keywords))
        if not self._strict:
            return self(getattr(value, "func", getattr(value, "__wrapped__", None)))  # of a decorator
        if package_of(type(value).__module__) not in KNOWN or not hasattr(value, "__dict__"):
            raise NoValueError(f"a {kind_name(value)}")
        return self.attributes(value)

    def attributes(self, value: Any, left_out: Iterable[str] = ()) -> Any:
        self.classes[type(value)] = None
        return [(name, self(each)) for name, each in vars(value).copy().items() if name not in left_out]


def _network(root: nn.Module, module_names: set[str]) -> Any:
    """Return the description of a module tree: classes, attributes, hooks and the names of weights.

    The modules of these names, and of the classes, are described as they are in memory.

    Raises:
        NoValueError: something in it has no value that is the same in each process.
    """
    describe = Describer(strict=True)
    modules = modules_of(root)
    for module in modules:  # first: an attribute that refers to a module is described by its number
        describe.meet(module)
    attributes = [describe.attributes(module, TREE | UNTRACED_ATTRIBUTES) for module in modules]
    classes = {base for kind in describe.classes for base in kind.__mro__} - {*nn.Module.__mro__}
    classes = sorted(classes, key=lambda each: f"{each.__module__}.{each.__qualname__}")
    for each in classes:
        if package_of(each.__module__) not in KNOWN:
            raise NoValueError(f"the class {each.__qualname__}")
    describe_members = Describer(strict=False)
    members = [(each.__qualname__, describe_members(_members(each))) for each in classes]
    names = module_names | {each.__module__ for each in classes}
    return [*map(kind_name, modules)], attributes, members, weight_pattern(modules), _modules_in_memory(names)


def _members(kind: type) -> list[tuple[str, Any]]:
    """Return the names and values of a class's members but for those that Python or a first copy adds."""
    added = (
        "__dict__",
        "__weakref__",
        "__slotnames__",
        "__annotations__",
        "_abc_impl",
        "__static_attributes__",
    )
    return [(name, value) for name, value in vars(kind).copy().items() if name not in added]


def _modules_in_memory(names: Iterable[str]) -> Any:
    """Return the descriptions of modules, and of all modules of `OWN` that their members come from.

    They are those of the modules as they are in memory, where a function or a constant may have been replaced.
    """
    describe, pending, described = Describer(strict=False), sorted(names), {}
    while pending:
        name = pending.pop()
        if name in described or name not in sys.modules:
            continue
        described[name] = members = []
        for member, value in sorted(vars(sys.modules[name]).copy().items()):
            home = (
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            )
            if package_of(home) in OWN and home != name:
                pending.append(home)
                if (
                    isinstance(value, types.ModuleType)
                    or getattr(sys.modules.get(home), member, None) is value
                ):
                    continue  # described where it comes from
            if package_of(name) in OWN and not member.startswith("__"):
                is_class = isinstance(value, type) and home == name
                members.append((member, describe(_members(value) if is_class else value)))
    return sorted(described.items())


@functools.cache
def _sources() -> str:
    """Return a hash of the sources of `OWN` and the versions of all libraries."""
    digest = hashlib.sha256(repr((sys.version, platform.platform(), versions(*sorted(LIBRARIES)))).encode())
    for package in sorted(OWN):
        directory = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        for path in sorted(directory.rglob("*.py")):
            digest.update(repr((path.relative_to(directory), path.read_bytes())).encode())
    return digest.hexdigest()


def default_device() -> Any:
    return jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]


def device_name(device: Any) -> Any:
    return device.platform, device.device_kind, device.id, device.client.platform_version


def settings() -> tuple[Any, ...]:
    """Return JAX's and torch's settings of this thread that tracing or compiling read, and whether a profile is recorded."""
    values = jax.config.values.items()
    jax_settings = (value for name, value in values if CACHE_SETTING not in name)
    return (*jax_settings, torch.is_grad_enabled(), torch.get_default_dtype(), is_profiling())


def signature(arguments: Any) -> Any:
    """Return the tree of a call's arguments, and of each array the shape, the dtype and the devices."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple(
        (leaf.shape, np.dtype(leaf.dtype), getattr(leaf, "weak_type", False), _sharding(leaf))
        for leaf in leaves
    )


def _sharding(leaf: Any) -> Any:
    """Return the sharding of an array or a struct; None on JAX's default device."""
    sharding = getattr(leaf, "sharding", None)
    is_single = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    on_default = (
        is_single and sharding.device_set == {default_device()} and sharding.memory_kind in (None, "device")
    )
    return None if on_default else sharding


def key_of(root: nn.Module, place: Any, arguments: Any) -> str:
    """Return the key of a program's executable for arguments; `NoValueError` if it has none."""
    tree, leaves = signature(arguments)
    describe = Describer(strict=True)
    network = _network(root, {type(place).__module__, "cogvideox_torchax.runtime.programs"})
    devices = [*map(device_name, (default_device(), *jax.devices()))]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(VARIABLES) and CACHE_SETTING not in name.lower()
    }
    everything = _sources(), network, describe(place), str(tree), describe(leaves), devices
    everything += sorted(variables.items()), repr(settings())
    return hashlib.sha256(repr(everything).encode()).hexdigest()


def directory() -> Any:
    """Return the directory of kept executables, which may be in a bucket; None if there is no compile cache."""
    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    is_on = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    # Of several processes, one that finds an executable would run ahead of those that compile.
    if not configured or not is_on or os.environ.get(SWITCH) == "off" or jax.process_count() > 1:
        return None
    return upstream.cache_path(configured) / "executables"


class Executables:
    """The executables of one program, and of earlier processes' programs with the same key.

    Args:
        root: the module tree that the program is traced from; None for a program without one, for which
            nothing is kept.
        place: the devices of the program.
    """

    def __init__(self, root: nn.Module | None, place: Any):
        self._root, self._place = root, place
        # By signature and settings, the executable that was found, or None.
        self._found: dict[Any, Kept | None] = {}

    def find(self, arguments: Any) -> tuple[Kept | None, str | None]:
        """Return the executable for such arguments, or the key by which `compile` keeps one.

        Both are None where nothing is kept, and in later calls where nothing was found.
        """
        if self._root is None or directory() is None:
            return None, None
        known = signature(arguments), settings()
        if known in self._found:
            return self._found[known], None
        kept = key = None
        try:
            key = key_of(self._root, self._place, arguments)
            kept = _load(key, arguments)
        except Exception as error:  # whatever fails here, the program is traced
            LOGGER.debug("no executable is found for %s: %s", type(self._root).__name__, error)
        self._found[known] = kept
        return kept, None if kept else key

    def compile(self, lowered: Any, key: str) -> None:
        """Compile a lowered program, and keep it by a key: whole, or not at all."""
        cache_keys = upstream.cache_keys()
        cache_keys.last = None  # stays if JAX does not use its cache
        compiled = lowered.compile()
        results = [(each.shape, each.dtype) for each in jax.tree.leaves(lowered.out_info)]
        try:
            if cache_keys.last is not None:
                _store(key, pickle.dumps((upstream.pickled_call(compiled), cache_keys.last, results)))
        except Exception as error:  # a full disk, or results that cannot be pickled: the program runs
            LOGGER.debug("the executable of %s is not kept: %s", type(self._root).__name__, error)


def _load(key: str, arguments: Any) -> Kept | None:
    path = directory() / key
    if not path.exists():
        return None
    content = path.read_bytes()
    digest, data = content[:32], content[32:]
    if hashlib.sha256(data).digest() != digest:  # a machine that lost power, or a copy that was cut off
        return None
    call, cache_key, results = pickle.loads(data)
    run = upstream.loaded_call(call, cache_key, jax.tree.structure((arguments, {})), default_device().client)
    return run and Kept(
        run, jax.tree.unflatten(run.out_tree, [jax.ShapeDtypeStruct(*each) for each in results])
    )


def _store(key: str, data: bytes) -> None:
    directory().mkdir(parents=True, exist_ok=True)
    unfinished = directory() / f"{key}.{uuid.uuid4().hex}"
    unfinished.write_bytes(hashlib.sha256(data).digest() + data)
    unfinished.replace(directory() / key)
