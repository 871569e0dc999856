"""Executables that an earlier process kept: a process that finds one neither traces nor lowers its program.

JAX's compile cache has executables by the text of the lowered program, so that each process has to trace and
lower it first. Here JAX's key is kept, beside its cache, by a key of what tracing and compiling read:

- the versions of libraries, and the sources of this package and of `jax_kernels`;
- the network's modules: their classes with all methods, their attributes and hooks, the names of weights, and
  the functions of the two packages that the methods call, as they are in memory;
- the place, the devices, and the arguments' trees, shapes, dtypes and shardings;
- JAX's and torch's settings, and the variables of the environment that JAX, XLA and kernels read.

All of these count by value. A user's function, class, or object that cannot be pickled has no value that is
the same in each process: a program that depends on one has no key, and is traced in each process. Functions
of other libraries count by the versions of these, so that one which somebody replaces in memory is not seen.
That is why nothing is kept or found unless the variable `ASKED` is set.
"""

import contextlib
import functools
import hashlib
import importlib.util
import io
import logging
import os
import pickle
import sys
import uuid
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from cogvideox_torchax import STARTED, upstream
from cogvideox_torchax.runtime.layers import is_profiling
from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES
from cogvideox_torchax.runtime.skeleton import LIBRARIES
from cogvideox_torchax.runtime.snapshot import TREE, comparable, modules_of, read_by, weight_pattern
from cogvideox_torchax.versions import versions

ASKED = "COGVIDEOX_TORCHAX_SKIP_TRACING"
"""The environment variable that asks for it, if it is "1"."""
OWN = ("cogvideox_torchax", "jax_kernels")
"""The packages whose sources count, as a checkout changes under one version."""
VERSIONED = sorted(LIBRARIES | {"libtpu", "ml_dtypes", "numpy"})
KNOWN = frozenset(VERSIONED).union(
    OWN, sys.stdlib_module_names, ["nanobind"]
)  # which binds jaxlib's functions
"""Packages whose functions and classes may be part of a key."""
VARIABLES = ("COGVIDEOX_TORCHAX_", "JAX_", "LIBTPU_", "NVIDIA_TF32", "TPU_", "XLA_")
"""Beginnings of the names of environment variables that tracing or compiling may read."""
CACHE = "cache"
"""Part of the names of settings and variables for the compile cache, which change no program."""


class NoKeyError(Exception):
    """A program depends on something that has no value which is the same in each process."""


class _Describer(pickle.Pickler):
    """Writes values as bytes that two processes share if, and only if, the values are equal."""

    def __init__(self, file: io.BytesIO, modules: list[nn.Module]):
        super().__init__(file)
        self.fast = True  # no memo, in which two equal strings are not what one string twice is
        # By its id, a value that is described once, with its number. Keeping it keeps its id in use.
        self._met: dict[int, tuple[int, Any]] = {}
        for module in modules:
            self._number(module)

    def _number(self, value: Any) -> int:
        return self._met.setdefault(id(value), (len(self._met), value))[0]

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a value; None for the value itself, as it is pickled."""
        if isinstance(value, nn.Module | FunctionType) and id(value) in self._met:
            return self._number(value)
        if isinstance(value, FunctionType):
            self._number(value)
            return self._function(value)
        if isinstance(value, CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            return value.co_code, value.co_flags, names, value.co_consts
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if isinstance(value, type | ModuleType):
            return getattr(value, "__module__", ""), value.__name__
        if isinstance(value, jax.Device):
            return device_name(value)
        if isinstance(value, nn.Module) or _package(type(value).__module__) not in KNOWN:
            raise NoKeyError(f"a {type(value).__qualname__} of {type(value).__module__}")
        return None

    def _function(self, function: FunctionType) -> Any:
        package = _package(function.__globals__.get("__name__", ""))
        if package not in KNOWN and not package.startswith("namedtuple_"):
            raise NoKeyError(f"the function {function.__qualname__}")
        read = map(_code, read_by([function])) if package in OWN else ()
        cells = [_code(cell.cell_contents) for cell in function.__closure__ or ()]
        return function.__qualname__, function.__code__, function.__defaults__, [*read], cells


def _package(module: str) -> str:
    return module.partition(".")[0]


def _code(member: Any) -> Any:
    """Return the function of a member of a class or a module; of another member the constants in it."""
    if isinstance(member, functools.partial | functools.partialmethod):
        return _code(member.func), member.args, sorted(member.keywords.items())
    for name in ("__func__", "fget", "func", "__wrapped__"):  # methods, properties, and what decorators make
        if not isinstance(member, FunctionType):
            member = getattr(member, name, member)
    if isinstance(member, FunctionType | MethodType):
        return member
    if callable(member) and _package(type(member).__module__) not in KNOWN:
        raise NoKeyError(f"a {type(member).__qualname__} in a function's place")
    if isinstance(member, type) and _package(member.__module__) in OWN:
        members = vars(member).items()
        # The first copy of an instance adds "__slotnames__".
        return {n: _code(v) for n, v in members if n != "__slotnames__" and not isinstance(v, type)}
    return sorted(map(repr, comparable(member))) if isinstance(member, set) else comparable(member)


def device_name(device: Any) -> Any:
    return device.platform, device.device_kind, device.id, device.client.platform_version


def settings() -> tuple[Any, ...]:
    """Return the settings of JAX and torch, in this thread, that programs depend on."""
    chosen = (value for name, value in jax.config.values.items() if CACHE not in name)
    mesh = jax.sharding.get_abstract_mesh()  # of a user's `jax.set_mesh`
    return (*chosen, mesh, torch.is_grad_enabled(), torch.get_default_dtype(), is_profiling())


def signature(arguments: Any) -> tuple[Any, Any]:
    """Return the tree of a call's arguments, and the shape, the dtype and the sharding of each array."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple(
        (leaf.shape, np.dtype(leaf.dtype), getattr(leaf, "weak_type", False), _sharding(leaf))
        for leaf in leaves
    )


def _sharding(leaf: Any) -> Any:
    """Return the sharding of an array or a struct; None for memory of the default device."""
    sharding = getattr(leaf, "sharding", None)
    # A struct for the default device may have no sharding.
    on_default = sharding == jax.sharding.SingleDeviceSharding(_default_device())
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None if on_default else sharding
    # One sharding has several specs: with and without axes at the end, and mesh axes of one device.
    split = tuple(
        (axis, name)
        for axis, names in enumerate(sharding.spec)
        for name in ((names,) if isinstance(names, str) else names or ())
        if sharding.mesh.shape[name] > 1
    )
    return sharding.mesh, split, sharding.memory_kind


def _default_device() -> Any:
    return jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore


@functools.cache
def _sources() -> str:
    """Return a hash of the versions of Python and of libraries, and of the sources of `OWN`."""
    digest = hashlib.sha256(repr((sys.version, versions(*VERSIONED))).encode())
    for package in OWN:
        for directory in importlib.util.find_spec(package).submodule_search_locations:  # pyright: ignore
            for path in sorted(Path(directory).rglob("*.py")):
                if path.stat().st_mtime > STARTED:  # this process may have imported an earlier text
                    raise NoKeyError(f"{path.name}, which was written since this process started")
                digest.update(repr((path.name, path.read_bytes())).encode())
    return digest.hexdigest()


def key_of(root: nn.Module, place: Any, arguments: Any) -> str:
    """Return the key of a program's executable.

    Args:
        root: the module tree that the program is traced from.
        place: the devices of the program.
        arguments: arrays or structs.

    Raises:
        Exception: the program has no key, as `NoKeyError` or pickle says.
    """
    modules = modules_of(root)
    left_out = TREE | UNTRACED_ATTRIBUTES
    attributes = [{n: v for n, v in vars(module).items() if n not in left_out} for module in modules]
    held = [place, *modules, *(value for table in attributes for value in table.values())]
    classes = {base for value in held for base in type(value).__mro__} - {*nn.Module.__mro__}
    members = {f"{c.__module__}.{c.__qualname__}": {n: _code(v) for n, v in vars(c).items()} for c in classes}
    for name in members:
        if _package(name) not in KNOWN:
            raise NoKeyError(f"the class {name}")
    tree, leaves = signature(arguments)
    variables = {n: v for n, v in os.environ.items() if n.startswith(VARIABLES) and CACHE not in n.lower()}
    process = _sources(), repr(settings()), sorted(variables.items()), _default_device(), jax.devices()
    network = [*map(type, modules)], attributes, sorted(members.items()), weight_pattern(modules)
    with io.BytesIO() as file:
        _Describer(file, modules).dump((process, network, vars(place), str(tree), leaves))
        return hashlib.sha256(file.getvalue()).hexdigest()


def _directory() -> Any:
    """Return the directory of keys, which may be in a bucket; None if nothing is kept."""
    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    is_on = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    # Of several processes, one that finds its executable would not wait for those that compile.
    if os.environ.get(ASKED) != "1" or not configured or not is_on or jax.process_count() > 1:
        return None
    return upstream.cache_path(configured) / "executables"


class Executables:
    """The executables of one program that earlier processes have kept.

    Args:
        root: the module tree that the program is traced from; None for no tree, and then nothing is kept.
        place: the devices of the program.
    """

    def __init__(self, root: nn.Module | None, place: Any):
        self._root, self._place = root, place
        self._found: dict[Any, Any] = {}  # by inputs, cache and settings, what `find` has found

    def find(self, arguments: Any) -> tuple[Any, str | None]:
        """Return (executable, structs of its results) for such arguments, or None and the key for `compile`.

        Of the arguments, the first are the weights: for others than at the first call, the executable raises
        a `TypeError` or a `ValueError`. The key is None if the program has none, and from the second call on.
        """
        directory = _directory()
        if self._root is None or directory is None:
            return None, None
        key = known = None
        try:
            # Weights have many arrays. Others than those of the key, as after a cast, the executable refuses.
            torchs = torch.is_grad_enabled(), torch.get_default_dtype(), is_profiling()
            known = signature(arguments[1:]), upstream.trace_context(), torchs
            if known in self._found:
                return self._found[known], None
            self._found[known] = None
            key = key_of(self._root, self._place, arguments)
            if (path := directory / key).exists():
                tree = jax.tree.structure((arguments, {}))
                call, jax_key = pickle.loads(path.read_bytes())
                client = _default_device().client
                self._found[known] = upstream.loaded_call(call, jax_key, tree, client)
        except Exception as error:  # whatever fails here, the program is traced
            logging.getLogger(__name__).debug("%s is traced: %s", type(self._root).__name__, error)
        found = self._found.get(known)
        return found, None if found else key

    def compile(self, lowered: Any, key: str) -> None:
        """Compile a lowered program, and keep JAX's key of the executable by a key of `find`."""
        call, jax_key = upstream.compiled_call(lowered)
        directory = _directory()
        if jax_key is None or directory is None:  # JAX keeps no executable
            return
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and no result
            directory.mkdir(parents=True, exist_ok=True)
            unfinished = directory / f"{key}.{uuid.uuid4().hex}"
            unfinished.write_bytes(pickle.dumps((call, jax_key)))
            unfinished.replace(directory / key)  # there is a whole file, or none
