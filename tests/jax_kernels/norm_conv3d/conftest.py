"""What the tests of the kernel share: it is interpreted, on few channels and pixels."""

import pytest

from tests.reference import interpreted_norm_conv3d


@pytest.fixture
def interpreted():
    with interpreted_norm_conv3d():
        yield


@pytest.fixture
def interpreted_on_mesh():
    with interpreted_norm_conv3d(on_mesh=True) as traced:
        yield traced
