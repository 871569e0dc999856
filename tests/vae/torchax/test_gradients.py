"""Gradients through the port, and of the Flax build: those of stock diffusers in PyTorch."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from flax import nnx

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.nnx import weights
from tests import reference

RELATIVE = 1e-4
"""Error of a gradient in float32, relative to its largest value."""


@pytest.fixture(autouse=True)
def _gradients(_no_gradients):
    with torch.enable_grad():
        yield


def decoded(vae, z):
    return vae.decode(z).sample


def encoded(vae, x):
    posterior = vae.encode(x).latent_dist
    return posterior.mean + posterior.std


LATENTS, VIDEO = reference.latents(4, height=2, width=3), reference.video(17, height=4, width=6)


def weighed(shape, first_frame):
    """Return the weight of each value of a result in the loss."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[:, :, :first_frame] = 0.0
    return weight


def backward(vae, run, x, first_frame):
    """Return the input's gradient, by a loss that weighs each value of the result from a frame on."""
    leaf = reference.beside(vae, x.clone()).requires_grad_()
    result = run(vae, leaf)
    (result * reference.beside(vae, weighed(result.shape, first_frame))).sum().backward()
    return leaf.grad


def of_the_port(vae, run, x, first_frame):
    """Return the gradients of the input, and of each weight by its name: None of the other half."""
    of_x = runtime.to_torch(backward(vae.train(), run, x, first_frame))
    return of_x, {name: weight.grad for name, weight in vae.named_parameters()}


def of_flax(vae, run, x, first_frame):
    """Return the gradients of the input, and of each weight by its name: zeros of the other half."""
    graph, parameters, rest = nnx.split(vae.flax_vae, nnx.Param, ...)

    def loss(parameters, x):
        model = nnx.merge(graph, parameters, rest)
        if run is decoded:
            result = model.decode(x)
        else:
            posterior = model.encode(x)
            result = posterior.mean + jnp.exp(0.5 * posterior.logvar)
        weight = weighed(jnp.moveaxis(result, -1, 1).shape, first_frame)
        return (result * np.moveaxis(weight.numpy(), 1, -1)).sum()

    of_weights, of_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(parameters, np.moveaxis(x.numpy(), 1, -1))
    return np.moveaxis(of_x, -1, 1), weights.state_dict(of_weights)


@pytest.mark.parametrize(
    ("build", "levels", "run", "x", "first_frame", "anew", "devices"),
    [
        # A model, what runs, its input, from which frame on the loss looks, whether blocks are computed anew,
        # devices. The shallow model has no block that changes the number of channels.
        pytest.param(
            *("torchax", reference.TWO_LEVELS, decoded, LATENTS, 4, True, 1),
            id="torchax decodes two chunks, a loss on the second, blocks anew",
        ),
        pytest.param(
            *("torchax", reference.TWO_SHALLOW_LEVELS, encoded, VIDEO, 5, False, 1),
            id="torchax encodes two chunks, a loss on the second",
        ),
        pytest.param(
            *("torchax", reference.TWO_LEVELS, encoded, reference.video(1, height=4), 0, True, 8),
            id="torchax encodes over eight devices, blocks anew",
        ),
        pytest.param(
            *("flax", reference.TWO_LEVELS, decoded, reference.latents(4), 4, False, 1),
            id="flax decodes two chunks, a loss on the second",
        ),
        pytest.param(
            *("flax", reference.TWO_SHALLOW_LEVELS, encoded, reference.video(1, height=4), 0, True, 8),
            id="flax encodes over eight devices, blocks anew",
        ),
    ],
)
@pytest.mark.slow_cases(but=["torchax encodes two chunks*"])
def test_gradients_equal_pytorchs(build, levels, run, x, first_frame, anew, devices):
    stock = reference.small_vae(**levels)
    vae = port(reference.built(build, stock), mesh=make_mesh(1, devices) if devices > 1 else None)
    if anew:
        getattr(vae, "flax_vae", vae).enable_gradient_checkpointing()
    want = backward(stock, run, x, first_frame)
    assert want[:, :, 0].abs().max() > 0, "the loss reaches the first frame"
    of_x, of_weights = (of_flax if build == "flax" else of_the_port)(vae, run, x, first_frame)
    assert reference.largest_error(of_x, want) < RELATIVE
    for name, weight in stock.named_parameters():
        if weight.grad is None:
            assert (of_weights[name] is None) if build == "torchax" else not of_weights[name].any(), name
        else:
            assert reference.largest_error(of_weights[name], weight.grad) < RELATIVE, name


def test_frozen_weights_get_none_and_where_nothing_is_trained_nothing_is_recorded(vae):
    vae.requires_grad_(False)
    x = runtime.to_jax(reference.video(1))
    assert not vae.encode(x).latent_dist.mean.requires_grad
    vae.encoder.conv_out.requires_grad_(True)
    vae.encode(x).latent_dist.mean.square().sum().backward()
    assert [name for name, weight in vae.named_parameters() if weight.grad is not None] == [
        "encoder.conv_out.conv.weight",
        "encoder.conv_out.conv.bias",
    ]


def test_only_training_keeps_activations_and_fewer_where_blocks_are_computed_anew(stock):
    vae = copy.deepcopy(stock)
    vae.enable_gradient_checkpointing()
    vae, x = reference.on_jax(vae), runtime.to_jax(reference.video(1, height=12, width=20))

    def kept():
        vae.encode(x)  # what the first call makes stays
        before = reference.live_bytes()
        posterior = vae.encode(x).latent_dist
        results = (posterior.parameters, posterior.mean, posterior.logvar, posterior.std, posterior.var)
        return reference.live_bytes() - before - sum(runtime.array_of(result).nbytes for result in results)

    in_evaluation = kept()
    vae.train()
    before_the_port = kept()
    vae.disable_gradient_checkpointing()
    whole = kept()
    vae.enable_gradient_checkpointing()
    after_it = kept()
    assert in_evaluation < 1e4 < before_the_port == after_it < 0.5 * whole


def test_a_backward_pass_lets_go_what_the_forward_pass_kept(vae):
    x = runtime.to_jax(reference.video(1))
    vae.train().encode(x).latent_dist.mean.sum().backward()  # gradients and first results stay
    vae.zero_grad()
    before = reference.live_bytes()
    loss = vae.encode(x).latent_dist.mean.sum()
    kept = reference.live_bytes() - before
    loss.backward()
    vae.zero_grad()
    assert reference.live_bytes() - before < 0.05 * kept
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert vae.program("encode").compilations == 1


def test_autocast_in_pytorch_is_as_in_diffusers(stock):
    vae, x = port(copy.deepcopy(stock)), reference.video(1)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = stock(x).sample, vae(x).sample
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match=r"pass them \.to\(torch\.float32\)"):
        vae.decode(reference.latents(1).bfloat16())


def test_dropout_is_refused_by_name(vae):
    block = vae.encoder.mid_block.resnets[0]
    block.dropout.p = 0.1
    x = runtime.to_jax(reference.video(1))
    vae.encode(x)
    with pytest.raises(ValueError, match=r"mid_block\.resnets\.0\.dropout drops values by chance"):
        vae.train().encode(x)
    block.dropout.p = 0.0
    vae.encode(x)


def test_a_gradient_has_the_dtype_of_its_weight_after_a_cast_on_jax(vae):
    vae.to(torch.bfloat16).to(torch.float32).train()
    vae.encode(runtime.to_jax(reference.video(1))).latent_dist.mean.sum().backward()
    weight = vae.encoder.conv_out.conv.weight
    dtypes = [weight.dtype, weight.grad.dtype, runtime.array_of(weight.grad).dtype]
    assert dtypes == [torch.float32, torch.float32, "float32"]


@pytest.mark.slow
def test_tiles_decode_and_refuse_gradients_in_words(vae):
    vae.enable_tiling(4, 6)
    frames = vae.decode(runtime.to_jax(reference.latents(1, height=4, width=6))).sample
    with pytest.raises(ValueError, match=r"disable_tiling\(\)"):
        frames.sum().backward()


def test_slices_of_a_batch_have_their_gradients(stock, vae):
    x = reference.video(1, batch=2)
    vae.train().enable_slicing()
    want = backward(copy.deepcopy(stock), encoded, x, 0)
    assert reference.largest_error(runtime.to_torch(backward(vae, encoded, x, 0)), want) < RELATIVE


def test_what_is_on_the_host_stays_the_same_parameters_and_gradients_move_along(stock, vae):
    on_host = port(copy.deepcopy(stock))
    before = list(on_host.parameters())
    assert all(one is other for one, other in zip(on_host.to("cpu").parameters(), before, strict=True))
    vae.requires_grad_(False)
    vae.encoder.conv_out.requires_grad_(True)
    vae.encode(runtime.to_jax(reference.video(1))).latent_dist.mean.sum().backward()
    want = runtime.to_torch(vae.encoder.conv_out.conv.bias.grad)
    assert torch.equal(vae.to("cpu").encoder.conv_out.conv.bias.grad, want)
    moved = port(vae, mesh=make_mesh(1, 8)).to("jax").encoder.conv_out.conv.bias.grad
    assert runtime.on_jax(moved)
    assert torch.equal(runtime.to_torch(moved), want)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda weight: weight.data.mul_(2), id="mul_"),
        pytest.param(lambda weight: weight.data.copy_(torch.ones_like(weight)), id="copy_"),
        pytest.param(lambda weight: weight.data.clamp_(0, 1), id="clamp_"),
        pytest.param(lambda weight: weight.data.zero_(), id="zero_"),
        pytest.param(lambda weight: weight.data.add_(weight.data, alpha=0.5), id="add_"),
        pytest.param(lambda weight: weight.data[1:].mul_(3), id="a slice"),
        pytest.param(lambda weight: setattr(weight, "data", weight.data * 3), id="new data"),
    ],
)
def test_a_write_into_the_data_of_a_trained_weight_is_as_in_pytorch(write, caplog):
    weights = [torch.nn.Parameter(LATENTS.clone()), torch.nn.Parameter(runtime.to_jax(LATENTS))]
    write(weights[0])
    write(weights[1])
    assert weights[1].requires_grad
    assert torch.equal(runtime.to_torch(weights[1].detach()), weights[0].detach())
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:torchax has no _fused_")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(functools.partial(torch.optim.Adam, foreach=True), id="Adam foreach"),
        pytest.param(functools.partial(torch.optim.AdamW, fused=True, amsgrad=True), id="AdamW fused"),
        pytest.param(
            functools.partial(torch.optim.SGD, fused=True, momentum=0.9, dampening=0.1), id="SGD fused"
        ),
        pytest.param(functools.partial(torch.optim.SGD, fused=True), id="SGD fused, no momentum"),
        pytest.param(functools.partial(torch.optim.Adagrad, fused=True), id="Adagrad fused"),
    ],
)
def test_optimizers_and_averages_are_as_in_pytorch(optimizer):
    def trained(weights):
        steps, average = optimizer(weights, lr=0.1), EMAModel(weights, decay=0.5)
        for weight in weights:
            weight.grad = weight.detach().sin()
        for _ in range(2):
            steps.step()
            average.step(weights)
        average.copy_to(weights)
        return [weight.detach() for weight in weights]

    expected, results = (
        trained([torch.nn.Parameter(placed(each)) for each in (LATENTS, VIDEO[0, 0, :3])])
        for placed in (torch.clone, runtime.to_jax)
    )
    for result, want in zip(results, expected, strict=True):
        assert reference.largest_error(runtime.to_torch(result), want) < 1e-5


@pytest.mark.parametrize("on", ["cpu", "jax"])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.clamp(0, 1), id="clamp"),
        pytest.param(lambda x: x.clip(min=0), id="clip"),
        pytest.param(lambda x: torch.where(x > 0, x, 0.0), id="where"),
        pytest.param(lambda x: x.prod(0), id="prod"),
    ],
)
def test_gradients_that_torch_composes_are_pytorchs_while_torchax_is_on(function, on):
    def gradient(x):
        leaf = x.detach().requires_grad_()
        function(leaf).sum().backward()
        return leaf.grad

    x = LATENTS[0, :3, 0]
    result = gradient(x.to(on))
    assert runtime.on_jax(result) == (on == "jax")
    assert reference.largest_error(runtime.to_torch(result), gradient(x)) < 1e-6
