"""Fixtures of all tests; `tests/conftest.py` loads them."""

import contextlib
import copy
import ctypes
import functools
import gc
import os
from pathlib import Path

import jax
import pytest
import torch
import torchax
from jax.experimental.compilation_cache import compilation_cache

from cogvideox_torchax import cli, make_mesh, port, upstream
from cogvideox_torchax.arrays.compile_cache import configure_compile_cache
from tests import reference

GROWTH = 2**31
"""Bytes that a test process may grow by before it forgets what it has compiled."""


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def kept_bytes():
    """Return a list whose last entry is the memory of this process when it last forgot its programs."""
    return [resident_bytes()]


@pytest.fixture(autouse=True)
def _bounded_memory(kept_bytes):
    """Drop JAX's programs and return memory to the system where the process has grown by `GROWTH`."""
    yield
    if resident_bytes() > kept_bytes[-1] + GROWTH:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        kept_bytes.append(resident_bytes())


@pytest.fixture(scope="session")
def small_vae():
    """Stock diffusers, small, in float32: the reference."""
    return reference.small_vae()


@pytest.fixture(scope="session")
def shallow_vae():
    """Return stock diffusers with the fewest ResNet blocks, for what compiles long."""
    return reference.small_vae(**reference.SHALLOW)


@pytest.fixture(scope="session")
def shallow_directory(shallow_vae, tmp_path_factory):
    """Return the directory of `shallow_vae`, which a test leaves as it is."""
    directory = tmp_path_factory.mktemp("shallow") / "vae"
    shallow_vae.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function that returns the directory of a small pipeline, saved when it is first asked for."""
    from tests import small_pipelines  # which imports transformers: other tests need not wait for it

    @functools.cache
    def directory_of(kind="text", version="5b", scheduler=None):
        path = tmp_path_factory.mktemp("saved")
        parts = {} if scheduler is None else {"scheduler": small_pipelines.scheduler(scheduler)}
        small_pipelines.one_layer(kind, version, **parts).save_pretrained(path)
        return str(path)

    return directory_of


@pytest.fixture(scope="session")
def native_vae(small_vae):
    """Return the same weights, ported, still in PyTorch."""
    return port(copy.deepcopy(small_vae))


@pytest.fixture(scope="session")
def jax_vae(small_vae):
    """Return the same weights, ported and moved to JAX; shared, so that its programs are compiled once."""
    return reference.built("torchax", small_vae)


@pytest.fixture(scope="session")
def flax_vae(small_vae):
    """Return the same weights in the Flax build, behind diffusers' interface."""
    return reference.built("flax", small_vae)


@pytest.fixture(scope="session")
def jax_vae_on_eight(small_vae):
    """Return `jax_vae`, one video over eight devices."""
    return reference.on_jax(port(copy.deepcopy(small_vae), mesh=make_mesh(1, 8)))


@pytest.fixture(scope="session")
def flax_vae_on_eight(small_vae):
    """Return `flax_vae`, one video over eight devices."""
    return port(reference.built("flax", small_vae), mesh=make_mesh(1, 8))


BACKENDS = {
    "torch": "native_vae",
    "torchax": "jax_vae",
    "flax": "flax_vae",
    "torchax over eight devices": "jax_vae_on_eight",
    "flax over eight devices": "flax_vae_on_eight",
}


@pytest.fixture(params=[*BACKENDS][:3])
def backend(request):
    """Return a VAE on each backend in turn."""
    return request.getfixturevalue(BACKENDS[request.param])


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model_directory(small_vae, tmp_path):
    small_vae.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


@pytest.fixture
def refused(capsys):
    """Return a function that runs a command, which must end with exit code 2, and returns its one line."""

    def refused_line(*arguments, main=cli.main):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == cli.USER_ERROR
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        return said

    return refused_line


@pytest.fixture
def restored_cache():
    """Let a test configure JAX's compile cache anew; afterwards it is as before."""
    before = {
        setting: getattr(jax.config, setting)
        for setting in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    configure_compile_cache.cache_clear()
    yield
    for setting, value in before.items():
        jax.config.update(setting, value)
    compilation_cache.reset_cache()
    configure_compile_cache.cache_clear()


@contextlib.contextmanager
def torchax_disabled():
    """Leave torchax off after a test that turns it on."""
    yield
    while upstream.torchax_is_on():
        torchax.disable_globally()


@pytest.fixture
def torchax_off():
    with torchax_disabled():
        yield
