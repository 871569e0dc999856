"""What torchax computes in another way here: attention, random numbers, and writes through views."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.nn import functional as F

from cogvideox_torchax import make_mesh, runtime
from cogvideox_torchax.pipelines.call import CudaIsJAX
from cogvideox_torchax.runtime.device import RandomInTraceError, import_torchax
from tests.reference import largest_error

N, H, S, K, D = 2, 4, 10, 12, 16


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


KEYS = torch.arange(K).expand(N, 1, 1, K) % 5 < torch.tensor([3, 4])[:, None, None, None]
Q, KEY, VALUE = drawn(N, H, S, D), drawn(N, H, K, D), drawn(N, H, K, D + 1)[..., :-1]
ATTENTION = {
    "no mask": ((Q, KEY, VALUE), {}),
    "one video": ((Q[0], KEY[0], VALUE[0]), {}),
    "one head": ((Q[0, 0], KEY[0, 0], VALUE[0, 0]), {}),
    "a mask of keys": ((Q, KEY, VALUE, KEYS), {}),
    "one mask of keys": ((Q, KEY, VALUE), {"attn_mask": KEYS[:1]}),
    "a mask of pairs": ((Q, KEY, VALUE), {"attn_mask": torch.ones(S, K).tril().bool()}),
    "a bias": ((Q, KEY, VALUE), {"attn_mask": drawn(N, 1, S, K)}),
    "causal": ((Q, KEY[:, :, :S], VALUE[:, :, :S]), {"is_causal": True}),
    "a scale": ((Q, KEY, VALUE), {"scale": 0.3}),
    "shared keys": ((Q, KEY[:, :2], VALUE[:, :2]), {"enable_gqa": True}),
    "values of other channels": ((Q, KEY, VALUE[..., :8]), {}),
}


def on_jax(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, runtime.to_jax, tree)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(("args", "options"), ATTENTION.values(), ids=ATTENTION)
def test_attention_is_torchs(args, options):
    expected = F.scaled_dot_product_attention(*args, **options)
    result = F.scaled_dot_product_attention(*on_jax(args), **on_jax(options))
    assert largest_error(result, expected) < 1e-6


@pytest.mark.parametrize("mask", [None, "keys"])
def test_attention_never_has_all_scores_in_memory(mask):
    length = 4096
    struct = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)
    mask = None if mask is None else jax.ShapeDtypeStruct((1, 1, 1, length), bool)
    compute = import_torchax().interop.jax_view(F.scaled_dot_product_attention)
    text = jax.jit(compute).lower(struct, struct, struct, mask).as_text()
    sizes = [math.prod(map(int, found.split("x"))) for found in re.findall(r"tensor<([\dx]+)xf32>", text)]
    assert max(sizes) < length * length


def rotated(x):
    """Return `x` (..., S, D) rotated by pairs of channels, as a rotary embedding does."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], -1).flatten(-2)


TEXT = 2
AFTER, ONE = slice(TEXT, None), torch.tensor([TEXT])


def flipped_write(x):
    x[:, :, AFTER] = x[:, :, AFTER].flip(2)
    return x


def indexed_write(x):
    x[:, :, ONE.to(x.device)] = rotated(x[:, :, ONE.to(x.device)])
    return x


PARTIAL_WRITES = {
    "a slice": lambda x: (x[:, :, AFTER].copy_(rotated(x[:, :, AFTER])), x)[1],
    "a slice by brackets": flipped_write,
    "an operation in place": lambda x: (x[:, :, AFTER].add_(x[:, :, AFTER].flip(2)), x)[1],
    "a slice where a mask is": lambda x: (
        x[:, :, AFTER].copy_(torch.where(x[:, :, AFTER] > 0, rotated(x[:, :, AFTER]), 1.0)),
        x,
    )[1],
    "a slice of channels": lambda x: (x[..., :2].copy_(rotated(x[..., :2])), x)[1],
    "a slice of videos": lambda x: (x[1:].copy_(rotated(x[1:])), x)[1],
    "a token": lambda x: (x[:, :, TEXT].copy_(rotated(x[:, :, TEXT])), x)[1],
    "a token by its index": indexed_write,
    "slice_scatter": lambda x: x.slice_scatter(rotated(x[:, :, AFTER]), 2, TEXT),
    "select_scatter": lambda x: x.select_scatter(rotated(x[:, :, TEXT]), 2, TEXT),
    "index_put": lambda x: x.index_put((torch.tensor(1).to(x.device),), x[1].flip(1)),
    "index_copy_": lambda x: x.index_copy_(2, ONE.to(x.device), rotated(x[:, :, TEXT : TEXT + 1])),
    "index_copy": lambda x: x.index_copy(2, ONE.to(x.device), rotated(x[:, :, TEXT : TEXT + 1])),
}
"""Writes that XLA does in place: a `scatter` or a mask of values is done in another way, and is right."""


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(
    ("write", "attends", "shape"),
    [
        *((write, False, (2, 2)) for write in PARTIAL_WRITES),
        *(("a slice", *case) for case in [(True, (2, 2)), (False, (1, 4)), (True, (1, 4))]),
    ],
)
def test_a_write_into_a_part_is_right_on_a_mesh(write, attends, shape):
    def compute(x, weight, k):
        q = (x @ weight).reshape(2, 8, 2, 4).swapaxes(1, 2)
        scores = import_torchax().interop.jax_view(PARTIAL_WRITES[write])(q) @ k.swapaxes(-1, -2)
        return jax.nn.softmax(scores) @ k if attends else scores

    mesh = make_mesh(*shape, devices=jax.devices()[:4])
    whole, by_columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "tp")))
    args = [drawn(*sizes).numpy() for sizes in ((2, 8, 8), (8, 8), (2, 2, 8, 4))]
    arrays = jax.device_put(args, [whole, by_columns, whole])
    q = torch.from_numpy(args[0] @ args[1]).view(2, 8, 2, 4).transpose(1, 2)
    expected = PARTIAL_WRITES[write](q) @ torch.from_numpy(args[2]).mT
    expected = expected.softmax(-1) @ torch.from_numpy(args[2]) if attends else expected
    result = jax.jit(compute, out_shardings=whole)(*arrays)
    assert np.abs(np.asarray(result) - expected.numpy()).max() < 1e-4


LIKE = drawn(2, 3, 4, 5)
ORDERS = {
    "permuted": lambda x: x.permute(0, 2, 1, 3),
    "expanded": lambda x: x[:, :1].expand(2, 3, 4, 5),
    "a slice of a view": lambda x: x.transpose(1, 3)[:, 1:],
    "a copy": lambda x: x.permute(0, 2, 1, 3).contiguous(),
}
FILLS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
}
DRAWS = {
    "randn": lambda device: torch.randn(2, 3, device=device),
    "randn of a list": lambda device: torch.randn([2, 3], device=device, dtype=torch.bfloat16),
    "rand": lambda device: torch.rand((2, 3), device=device),
    "randint": lambda device: torch.randint(9, (4,), device=device).int(),
    "randn_like": lambda device: torch.randn_like(torch.ones(2, 3).to(device)),
    "rand_like": lambda device: torch.rand_like(torch.ones(2, 3).to(device)),
    "normal_": lambda device: torch.zeros(2, 3).to(device).normal_(),
    "uniform_": lambda device: torch.zeros(2, 3).to(device).uniform_(1, 2),
    **{
        f"{name} of {order}": lambda device, fill=fill, change=change: fill(change(LIKE.clone().to(device)))
        for name, fill in FILLS.items()
        for order, change in ORDERS.items()
    },
    "normal_ of a permuted tensor": lambda device: LIKE.clone().to(device).permute(0, 2, 1, 3).normal_(),
    "a mean": lambda device: torch.normal(torch.zeros(3).to(device), 2.0),
    "a deviation": lambda device: torch.normal(1.0, torch.ones(3).to(device)),
    "both": lambda device: torch.normal(torch.ones(20).to(device), torch.ones(20).to(device)),
    "numbers and a size": lambda device: torch.normal(-3.0, 0.5, size=(1,), device=device),
    "random_": lambda device: torch.zeros(30).to(device).random_(0, 100),
    "randperm": lambda device: torch.randperm(30, device=device).int(),
    "multinomial": lambda device: torch.multinomial(torch.arange(10.0).to(device), 5).int(),
    "bernoulli": lambda device: torch.bernoulli(torch.full((30,), 0.3).to(device)),
    "bernoulli_": lambda device: torch.zeros(30).to(device).bernoulli_(0.3),
    "poisson": lambda device: torch.poisson(torch.full((30,), 3.0).to(device)),
    "exponential_": lambda device: torch.zeros(30).to(device).exponential_(2.0),
    "cauchy_": lambda device: torch.zeros(30).to(device).cauchy_(),
    "log_normal_": lambda device: torch.zeros(30).to(device).log_normal_(),
    "geometric_": lambda device: torch.zeros(30).to(device).geometric_(0.3),
    "dropout": lambda device: F.dropout(torch.ones(30).to(device), 0.5),
    "native dropout": lambda device: torch.native_dropout(torch.ones(30).to(device), 0.5, True)[0],
    "rrelu": lambda device: F.rrelu(-torch.ones(30).to(device), training=True),
    "a distribution": lambda device: torch.distributions.Beta(*torch.ones(2, 3).to(device)).sample(),
    "out": lambda device: torch.randn(3, out=torch.empty(3, device=device)),
    "a generator": lambda device: torch.randn(3, generator=torch.Generator().manual_seed(5), device=device),
}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_follow_torchs_seed(draw):
    torch.manual_seed(3)
    expected = [draw("cpu"), draw("cpu")]
    torch.manual_seed(3)
    results = [draw("jax"), draw("jax")]
    assert all(torch.equal(runtime.to_torch(got), want) for got, want in zip(results, expected, strict=True))


@pytest.mark.parametrize("rows", [4, 6])
def test_an_orthogonal_weight_is_filled(rows):
    weight = torch.nn.init.orthogonal_(torch.empty(rows, 10 - rows, device="jax"), gain=2)
    values = runtime.to_torch(weight)
    product = values @ values.mT if rows == 4 else values.mT @ values
    assert largest_error(product, 4 * torch.eye(4)) < 1e-6


def test_dtypes_of_64_bits_bring_no_warning():
    x = torch.full((2,), 3, dtype=torch.long, device="jax").long().double()
    assert x.tolist() == [3, 3]
    assert (x.max(0)[1].item(), x.argmax().item(), F.one_hot(x.long()).sum().item()) == (0, 0, 2)


SCALINGS = {
    "a number times": lambda x: 0.7 * x,
    "times a number": lambda x: x * 1.15258426,
    "over a number": lambda x: x / 0.7,
    "a number over": lambda x: 0.7 / x,
    "in place": lambda x: x.clone().mul_(0.7),
    "a tensor times another": lambda x: x * x.flip(0),
    "a whole number": lambda x: 257 * x,
    "times itself": lambda x: x * x,
}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", SCALINGS.values(), ids=SCALINGS)
def test_numbers_scale_as_in_pytorch(scale, dtype):
    x = torch.randn(999, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = scale(runtime.to_jax(x))
    assert torch.equal(runtime.to_torch(result), scale(x))


def test_a_program_draws_no_random_numbers():
    draw = import_torchax().interop.jax_view(lambda x: x + torch.randn(2, device="jax"))
    with pytest.raises(RandomInTraceError, match="^randn draws random numbers"):
        jax.eval_shape(draw, jnp.ones(2))


# torchax's tensors share their values as PyTorch's do, eagerly and in a trace.


def times_in_place(x):
    x.transpose(1, 2)[:, ::2] *= 0.5


def set_item(x):
    x.view(2, -1)[:, 0] = 5.0


def masked(x):
    y = x.transpose(0, 1)
    y[y > 0] = 0.0


V = torch.linspace(0.1, 0.9, 8).view(2, 4)
SLICE_WRITES = {
    "zero_": lambda y, v: y.zero_(),
    "fill_": lambda y, v: torch.fill_(y, 3.0),
    "fill_ with a tensor": lambda y, v: y.fill_(torch.tensor(5.0)),
    "masked_fill_": lambda y, v: y.masked_fill_(y > 0, 2),
    "addcmul_": lambda y, v: y.addcmul_(v, v, value=0.5),
    "addcdiv_": lambda y, v: y.addcdiv_(v, v + 1),
    "lerp_": lambda y, v: y.lerp_(v, 0.3),
    "lerp_ by a tensor": lambda y, v: y.lerp_(v, v),
    "frac_": lambda y, v: y.frac_(),
    "sgn_": lambda y, v: y.sgn_(),
    "xlogy_": lambda y, v: y.xlogy_(v),
    "index_add_": lambda y, v: y.index_add_(0, torch.tensor([0]).to(v.device), v[:1]),
    "index_fill_": lambda y, v: y.index_fill_(0, torch.tensor([0]).to(v.device), 9.0),
    "index_copy_": lambda y, v: y.index_copy_(0, torch.tensor([0]).to(v.device), v[:1]),
    "silu": lambda y, v: F.silu(y, inplace=True),
    "hardtanh": lambda y, v: F.hardtanh(y, -0.5, 0.5, inplace=True),
    "leaky_relu": lambda y, v: F.leaky_relu(y, 0.1, inplace=True),
    "elu": lambda y, v: F.elu(y, inplace=True),
    "mish": lambda y, v: F.mish(y, inplace=True),
    "foreach": lambda y, v: torch._foreach_lerp_([y], [v], 0.5),  # pyright: ignore
    "init": lambda y, v: torch.nn.init.constant_(y, 3),
    "out": lambda y, v: torch.add(v, 1, out=y),
    "twice": lambda y, v: y[1:][:, ::2].zero_(),
}


WRITES = {
    "a slice of a transpose": times_in_place,
    "an item of a view": set_item,
    "a masked transpose": masked,
    "permute": lambda x: x.permute(2, 0, 1).add_(1),
    "reshape": lambda x: x.reshape(-1).fill_(3),
    "a reshape that copies": lambda x: x.transpose(1, 2).reshape(2, -1).mul_(9),
    "chunk": lambda x: x.chunk(2, dim=1)[1].mul_(0),
    "split": lambda x: x.split([1, 3], dim=1)[1].sub_(1),
    "tensor_split": lambda x: torch.tensor_split(x, 2, dim=1)[0].mul_(4),
    "unbind": lambda x: x.unbind(1)[2].zero_(),
    "select": lambda x: x.select(1, 1).mul_(-1),
    "narrow": lambda x: x.narrow(2, 1, 3).mul_(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1).mul_(4),
    "unsqueeze": lambda x: x.unsqueeze(0).mul_(4),
    "flatten": lambda x: x.flatten(0, -2)[1:].mul_(4),
    "unflatten": lambda x: x.unflatten(1, (2, 2))[:, 1].mul_(4),
    "mT": lambda x: x.mT[:, 1].mul_(4),
    "movedim": lambda x: x.movedim(0, 2)[1].mul_(4),
    "diagonal": lambda x: x.diagonal(0, 0, 1).mul_(4),
    "unfold": lambda x: x.unfold(1, 2, 2)[:, 0].mul_(3),
    "detach": lambda x: x.detach().mul_(4),
    "a view of a view of a view": lambda x: x.view(2, 2, 2, 6).permute(0, 2, 1, 3)[0, 0].mul_(3),
    "copy_": lambda x: x.transpose(1, 2)[0].copy_(torch.ones_like(x.transpose(1, 2)[0])),
    "contiguous": lambda x: x.contiguous().mul_(4),
    "a contiguous copy": lambda x: x.transpose(1, 2).contiguous().mul_(4),
    "a clone": lambda x: x.transpose(1, 2).clone().mul_(4),
    "an index, which copies": lambda x: x[[0, 1]].mul_(4),
    "type_as, which copies": lambda x: x.type_as(torch.ones(1, dtype=torch.bfloat16).to(x.device)).mul_(2),
}


def in_a_program(function, x):
    program = jax.jit(import_torchax().interop.jax_view(function))
    return runtime.tensor_of(program(runtime.array_of(x)))


def written_both(write, run):
    """Return a tensor after a write, with two views that were made before it: on JAX, and in PyTorch."""

    def written(x):
        views = x.view(2, -1), x.transpose(0, 1)[1:]
        write(x)
        return torch.cat([x.reshape(-1), *(view.reshape(-1) for view in views)])

    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    return runtime.to_torch(run(written, runtime.to_jax(x))), written(x.clone())


RUNS = pytest.mark.parametrize(
    "run", [lambda function, x: function(x), in_a_program], ids=["eager", "traced"]
)


@RUNS
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_through_a_view_is_seen_as_in_pytorch(write, run):
    assert torch.equal(*written_both(write, run))


@RUNS
@pytest.mark.parametrize("write", SLICE_WRITES.values(), ids=SLICE_WRITES)
def test_a_write_into_a_slice_by_brackets_is_seen_in_the_whole(write, run):
    pair = written_both(lambda x: write(x[:, :, 2], V.to(x.device)), run)
    assert torch.allclose(*pair, atol=1e-6)


@pytest.mark.parametrize("on", ["cpu", "jax"])
def test_a_copy_that_is_asked_for_shares_no_values(on):
    x = torch.ones(3).to(on)
    for copy in (x.to(copy=True), x.to(x, False, True), x.to(on, torch.float32, False, True)):
        copy.zero_()
    assert x.sum() == 3
    assert x.to(on) is x.to(x.dtype, copy=False) is x


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_tensor_moved_to_cuda_is_on_jax(device):
    with CudaIsJAX():
        assert runtime.on_jax(torch.ones(3).to(device))


def test_a_write_into_a_view_of_another_dtype_is_refused():
    x = runtime.to_jax(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="of float32 that shares its memory with one of complex64"):
        x.real.mul_(2)
