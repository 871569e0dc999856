"""The directory in which JAX keeps compiled programs from one process to the next."""

import os
import threading
from pathlib import Path

COMPILE_CACHE_VARIABLE = "COGVIDEOX_TORCHAX_COMPILE_CACHE"

_cache_lock = threading.Lock()

_cache_configured = False


def default_compile_cache() -> Path:
    """Return `$XDG_CACHE_HOME/cogvideox-torchax/xla`, or the same under `~/.cache` if that is unset."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cogvideox-torchax" / "xla"


def configure_compile_cache(directory: str | Path | None = None) -> None:
    """Point JAX's persistent compile cache at the user's cache directory, once.

    A directory given here wins; a cache that JAX is already configured with (`JAX_COMPILATION_CACHE_DIR`, or
    `jax_compilation_cache_dir`) is left alone; `COGVIDEOX_TORCHAX_COMPILE_CACHE` names another directory, or
    "off".
    """
    global _cache_configured
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    with _cache_lock:
        if directory is None and (_cache_configured or jax.config.jax_compilation_cache_dir):  # pyright: ignore
            return
        _cache_configured = True
        chosen = str(directory or os.environ.get(COMPILE_CACHE_VARIABLE) or default_compile_cache())
        if chosen == "off":
            jax.config.update("jax_compilation_cache_dir", None)
            return
        jax.config.update("jax_compilation_cache_dir", chosen)
        # JAX decides at its first compilation whether there is a cache: make it decide again.
        compilation_cache.reset_cache()
