"""What the tests of the kernels share."""

import jaxtyping
import pytest


@pytest.fixture
def shapes_unchecked():
    """Annotated shapes are not checked, as when users run: a kernel names what is wrong by itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
