"""A refused call leaves a pipeline as it was."""

import pytest

from cogvideox_torchax import make_mesh, port
from tests import small_pipelines


def test_a_mesh_that_does_not_divide_a_network_leaves_all_of_them_alone():
    pipe = small_pipelines.build()
    before = {name: type(part) for name, part in pipe.components.items()}
    with pytest.raises(ValueError, match="tp=3"):
        port(pipe, mesh=make_mesh(dp=1, tp=3))
    assert {name: type(part) for name, part in pipe.components.items()} == before
    assert all(parameter.device.type == "cpu" for parameter in pipe.vae.parameters())
