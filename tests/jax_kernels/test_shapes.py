"""Shapes that are annotated are checked while the tests run."""

import jax.numpy as jnp
import jaxtyping
import pytest

import jax_kernels
from jax_kernels.common.columns import add_columns


def test_a_shape_that_is_not_as_annotated_is_found():
    with pytest.raises(jaxtyping.TypeCheckError):
        add_columns(jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 2, 3, 1, 5)), at=0)
    with pytest.raises(jaxtyping.TypeCheckError):
        jax_kernels.group_norm(jnp.zeros((2, 8, 5)), jnp.ones((8, 1)), None, num_groups=4)
