"""Tests run on the CPU, as eight devices; what one process of a run has compiled, the others take."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# One thread for PyTorch in each test process: two processes with two threads each spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # A compile cache of this run alone, made by its first process and inherited by all others.
    os.environ["COGVIDEOX_TORCHAX_COMPILE_CACHE"] = tempfile.mkdtemp(prefix="cogvideox-torchax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["COGVIDEOX_TORCHAX_COMPILE_CACHE"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
# Optimizing is most of what compiling costs on a CPU, and the programs here run for milliseconds: LLVM's
# passes are off, and fusions do without MLIR's.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    )

import copy

import pytest
import torch

from tests import reference


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The tests of a file stay in one process, so that what they share is compiled once; its cases of Flax
    and of a mesh share nothing with the others."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        backend = str(parameters.params.get("backend", "")) if parameters else ""
        apart = backend if backend.startswith("flax") or "over" in backend else ""
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {apart}"))


@pytest.fixture(scope="session")
def small_vae():
    """Stock diffusers, small, in float32: the reference."""
    return reference.small_vae()


@pytest.fixture(scope="session")
def native_vae(small_vae):
    """The same weights, ported, still in PyTorch."""
    from cogvideox_torchax import port

    return port(copy.deepcopy(small_vae))


@pytest.fixture(scope="session")
def jax_vae(small_vae):
    """The same weights, ported and moved to JAX; shared, so that its programs are compiled once."""
    return reference.on_jax(copy.deepcopy(small_vae))


@pytest.fixture(scope="session")
def flax_vae(small_vae):
    """The same weights in the Flax build, behind diffusers' interface."""
    from cogvideox_torchax.flax import FlaxVAEForPipelines

    return FlaxVAEForPipelines.from_diffusers(small_vae)


@pytest.fixture(scope="session")
def jax_vae_on_eight(small_vae):
    """`jax_vae`, one video over eight devices."""
    return reference.on_jax(port_to_eight(copy.deepcopy(small_vae)))


@pytest.fixture(scope="session")
def flax_vae_on_eight(small_vae):
    """`flax_vae`, one video over eight devices."""
    from cogvideox_torchax.flax import FlaxVAEForPipelines

    return port_to_eight(FlaxVAEForPipelines.from_diffusers(small_vae))


def port_to_eight(vae):
    from cogvideox_torchax import make_mesh, port

    return port(vae, mesh=make_mesh(1, 8))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model_directory(small_vae, tmp_path):
    small_vae.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


@pytest.fixture
def torchax_off():
    """The state of a session that has not enabled torchax yet, whatever the tests before did."""
    import torchax

    from cogvideox_torchax.runtime import enable, is_enabled

    was_enabled = is_enabled()
    while is_enabled():
        torchax.disable_globally()
    yield
    while is_enabled():
        torchax.disable_globally()
    if was_enabled:
        enable()
