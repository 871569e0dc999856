"""The directory in which JAX keeps compiled programs from one process to the next."""

import functools
import os
from pathlib import Path

COMPILE_CACHE_VARIABLE = "COGVIDEOX_TORCHAX_COMPILE_CACHE"


@functools.cache
def configure_compile_cache() -> str | None:
    """Point JAX's persistent compile cache at the user's cache directory, once; return it, or None.

    The directory is the one that `COGVIDEOX_TORCHAX_COMPILE_CACHE` names, or by default
    `cogvideox-torchax/xla` in `$XDG_CACHE_HOME` or `~/.cache`. "off" sets no cache. A cache that JAX is
    already configured with (`JAX_COMPILATION_CACHE_DIR`, or `jax_compilation_cache_dir`) is left alone.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    chosen = os.environ.get(COMPILE_CACHE_VARIABLE)
    if not (jax.config.jax_compilation_cache_dir or chosen == "off"):  # pyright: ignore
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", chosen or str(caches / "cogvideox-torchax" / "xla"))
        # JAX decides at its first compilation whether there is a cache. A user may have compiled before.
        compilation_cache.reset_cache()
    return jax.config.jax_compilation_cache_dir  # pyright: ignore
