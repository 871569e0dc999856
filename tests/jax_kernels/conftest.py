"""Fixtures of the kernels' tests."""

import jaxtyping
import pytest

from cogvideox_torchax.arrays.compile_cache import configure_compile_cache
from tests import reference


@pytest.fixture(autouse=True)
def cores(request, monkeypatch):
    """Slow tests interpret a TPU of two cores, which share the steps of parallel axes."""
    if request.node.get_closest_marker("slow"):
        monkeypatch.setattr(reference, "CORES", 2)


@pytest.fixture
def shapes_unchecked():
    """Annotated shapes are not checked, as when users run: a kernel names what is wrong by itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def on_tpu():
    """Ops take the forms that they have for a TPU."""
    with reference.as_on_a_tpu():
        yield


@pytest.fixture
def interpreted():
    """Pallas kernels take few channels and pixels."""
    with reference.interpreted_kernels() as traced:
        yield traced


@pytest.fixture
def interpreted_on_mesh():
    with reference.interpreted_kernels(on_mesh=True) as traced:
        yield traced


@pytest.fixture(autouse=True, scope="session")
def compile_cache():
    """Share compiled kernels between the processes of a run, as models do."""
    configure_compile_cache()
