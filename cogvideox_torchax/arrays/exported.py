"""Programs as an earlier process has traced and lowered them, in files beside the compile cache.

JAX's compile cache has what a program compiles to. To look it up, a process traces and lowers the program,
which takes ten seconds of one core for a chunk of the VAE. The network of a program may be able to say in a
text all that the program depends on (`declared`). A digest of this text, of the shapes of the arguments, of
the code, of the chip and of the settings that tracing reads then names a file of `jax.export`.
"""

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import export

from cogvideox_torchax.versions import versions
from jax_kernels.common.tiles import pallas_mode

PLATFORMS = ("tpu",)
"""The platforms whose programs are kept. On another one a kernel is a call that `jax.export` refuses."""

CHECKS = (export.DisabledSafetyCheck.custom_call("LayoutConstraint"),)
"""A call that may differ between versions of jaxlib, which are in a file's name."""


@functools.cache
def _code() -> str:
    """Return a digest of the sources of this package and `jax_kernels`, and the versions of the others."""
    import jax_kernels

    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(jax_kernels.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    others = versions("jax", "jaxlib", "torch", "torchax", "diffusers", "transformers", "peft", "accelerate")
    return f"{digest.hexdigest()} {others}"


def _chip() -> str:
    """Return JAX's name of the kind of the default device, for which kernels choose their sizes."""
    return jax.devices()[0].device_kind


def call(function: Callable[..., Any], network: Any, place: Any, *arguments: Any) -> Any:
    """Return `function(*arguments)`, while a program is traced; an earlier trace is read from its file.

    Args:
        function: is traced if there is no file, or a broken one. Then a file is written.
        network: the program's network (`places.ArrayProgram`). If it has a method `declared`, this returns
            for the place the text that the program depends on, or None if no file is to be read or written.
        place: the program's devices.
        arguments: the traced arguments.
    """
    directory = jax.config.jax_compilation_cache_dir or "://"  # pyright: ignore[reportAttributeAccessIssue]
    is_kept = place.platform in PLATFORMS and "://" not in directory  # a bucket, which JAX's own may be
    text = network.declared(place) if is_kept and hasattr(network, "declared") else None
    if text is None:
        return function(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    settings = jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion, pallas_mode()  # pyright: ignore
    key = repr((network.name, text, _code(), _chip(), settings, str(tree), structs))
    path = Path(directory) / f"{network.name}-{hashlib.sha256(key.encode()).hexdigest()}.exported"
    try:
        exported = export.deserialize(bytearray(path.read_bytes()))
    except Exception:  # there is none, or what jaxlib raises for a broken one
        flat = jax.jit(lambda *leaves: function(*tree.unflatten(leaves)))
        try:
            exported = export.export(flat, platforms=[place.platform], disabled_checks=CHECKS)(*structs)
        except (ValueError, NotImplementedError):  # it has a call that `jax.export` refuses
            return function(*arguments)
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        with contextlib.suppress(OSError):  # a full disk, or a directory that is not writable
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(exported.serialize())
            temporary.replace(path)
    return exported.call(*leaves)
