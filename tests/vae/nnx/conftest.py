"""The Flax build needs torchax nowhere enabled; a test that wants it enables it."""

import pytest


@pytest.fixture(autouse=True)
def _without_torchax(torchax_off):
    return
