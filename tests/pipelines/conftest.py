import functools

import pytest

from cogvideox_torchax import runtime
from tests import small_pipelines


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function that returns the directory of a pipeline, saved when it is first asked for."""

    @functools.cache
    def directory_of(kind="text", version="5b", scheduler=None):
        path = tmp_path_factory.mktemp("saved")
        parts = {} if scheduler is None else {"scheduler": small_pipelines.scheduler(scheduler)}
        pipe = runtime.without_torchax(small_pipelines.one_layer, kind, version, **parts)
        runtime.without_torchax(pipe.save_pretrained, path)
        return path

    return directory_of
