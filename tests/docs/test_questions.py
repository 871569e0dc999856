"""Answers of the page of questions: they do on JAX what they do in PyTorch."""

import math
from types import MethodType

import pytest
import torch

from cogvideox_torchax import port
from tests import small_pipelines
from tests.docs.blocks import blocks
from tests.reference import largest_error

pytestmark = pytest.mark.usefixtures("torchax_off")


def frames(pipe, **options):
    return pipe(**small_pipelines.inputs("text", num_inference_steps=2, **options)).frames


def of_both(change, version="5b", **options):
    """Return frames of a pipeline in PyTorch and of a ported one, both after a change."""
    pipes = small_pipelines.build(version=version), port(small_pipelines.build(version=version))
    for pipe in pipes:
        change(pipe)
    return [frames(pipe, **options) for pipe in pipes]


def riflex():
    """Return the function of the page."""
    (block,) = (block for block in blocks("docs/questions.md") if "def riflex" in block.text)
    namespace: dict[str, object] = {}
    exec(block.text.partition("pipe._prepare")[0], namespace)
    return namespace["riflex"]


def test_riflex_stretches_the_second_frequency_of_time_alone():
    pipe = small_pipelines.build()
    want = pipe._prepare_rotary_positional_embeddings(8, 16, 25, "cpu")
    angle = torch.arange(25) * (0.9 * 2 * math.pi / 25)
    for table, stock, wave in zip(
        riflex()(pipe, 8, 16, 25, "cpu"), want, (torch.cos, torch.sin), strict=True
    ):
        table, stock = table.view(25, -1, 16), stock.view(25, -1, 16)
        torch.testing.assert_close(table[:, :, 2:4], wave(angle)[:, None, None].expand(25, stock.shape[1], 2))
        assert torch.equal(table[..., :2], stock[..., :2])
        assert torch.equal(table[..., 4:], stock[..., 4:])


@pytest.mark.slow
def test_riflex_acts_on_jax_as_in_pytorch():
    def stretch(pipe):
        pipe._prepare_rotary_positional_embeddings = MethodType(riflex(), pipe)

    stock, ported = of_both(stretch, num_frames=33)
    assert largest_error(ported, stock) < 1e-5
    assert largest_error(frames(small_pipelines.build(), num_frames=33), stock) > 1e-3


@pytest.mark.slow
def test_a_model_of_1_5_with_swapped_sample_sizes_makes_upright_videos():
    def swap(pipe):
        config = pipe.transformer.config
        pipe.transformer.register_to_config(
            sample_height=config.sample_width, sample_width=config.sample_height
        )

    stock, ported = of_both(swap, "1.5", height=16, width=8)
    assert ported.shape[-2:] == (16, 8)
    assert largest_error(ported, stock) < 1e-5
