"""JAX is a device of PyTorch's: in any thread, with nothing enabled, and inside torchax's modes as well."""

import concurrent.futures
import contextlib
import copy
import functools
import io

import jax
import numpy as np
import pytest
import torch
import torchax
from torch import nn
from torch.nn import functional as F

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime import device as jax_device
from cogvideox_torchax.runtime.device import import_torchax
from tests.processes import printed_by

pytestmark = [
    pytest.mark.usefixtures("torchax_off"),
    pytest.mark.filterwarnings("ignore:To copy construct", "ignore:torchax has no convolution_backward"),
]


LARGE = torch.linspace(-2, 2, 2000)
"""A tensor whose values on JAX the host does not keep."""


def x(device):
    return torch.linspace(-2, 2, 24).reshape(2, 3, 4).to(device)


def from_default(device):
    with torch.device(device):
        return torch.zeros(2, 3) + torch.arange(3) + nn.Linear(3, 2).weight.detach() @ torch.ones(3, 3)


def set_default(device):
    torch.set_default_device(device)
    try:
        return torch.full((2,), 3.0) + torch.tensor([1.0, 2.0])
    finally:
        torch.set_default_device(None)


def written(device):
    y = torch.zeros(3, 4, device=device)
    y[1:, ::2] = 5
    y.T[0].add_(1)
    y[y > 4] *= 2
    y[[0, 2], 1:3] = torch.tensor([7.0, 8.0])
    y[torch.tensor([1]), range(2)] = 3
    return y


def statistics(device):
    """Return what norms compute, and what they keep."""
    norm, instance = nn.BatchNorm2d(2).to(device), nn.InstanceNorm2d(2, track_running_stats=True).to(device)
    given = LARGE.reshape(5, 2, 10, 20).to(device)
    results = [each(given).detach() for each in (norm, instance)]
    return torch.cat([each.flatten().float() for each in (*results, *norm.buffers(), *instance.buffers())])


def bounded(device, rows):
    table = torch.full((rows, 4), 3.0).to(device)
    return torch.cat([F.embedding(torch.tensor([0]).to(device), table, max_norm=1.0), table[:1]])


def diagonals(device):
    y = torch.zeros(30, 40, device=device)
    y[:, :9].fill_diagonal_(9)
    y.mT[1:].fill_diagonal_(7)
    return y


def in_float32(name, device, **options):
    """Return a sum, which in the dtype of its terms is infinite."""
    return getattr(torch.full((70000,), 1.5).half().to(device), name)(dtype=torch.float32, **options)


def attended(device, mask):
    q = torch.linspace(-3, 3, 80).reshape(2, 2, 5, 4).to(device)
    return F.scaled_dot_product_attention(q, q.flip(2), q * 2, attn_mask=mask.to(device))


INDEX = torch.tensor([1, 0])
NO_KEYS = torch.tensor([True, False])[:, None, None, None]  # for the second video
INDICES = ([2, 0], (slice(None), [1, 0]), ([0, 1], (1, 1)), range(2), (..., [True, False]), [])
FACTORIES = {
    **{
        f"{name}, index {index}": lambda device, whole=whole, index=index: whole.to(device)[index]
        for name, whole in (
            ("known", torch.arange(12.0).reshape(3, 2, 2)),
            ("large", LARGE.reshape(-1, 2, 2)),
        )
        for index in INDICES
    },
    "no keys": lambda device: attended(device, NO_KEYS.expand(2, 1, 1, 5)),
    "no keys for each query": lambda device: attended(device, NO_KEYS.expand(2, 2, 5, 5)),
    "no keys by a float": lambda device: attended(device, torch.where(NO_KEYS, 0.0, -torch.inf)),
    "an embedding of bounded norm": lambda device: bounded(device, 2),
    "a large embedding of bounded norm": lambda device: bounded(device, 600),
    "diagonals": diagonals,
    "a cumsum in float32": lambda device: in_float32("cumsum", device, dim=0),
    **{
        f"a {name} in float32": functools.partial(in_float32, name)
        for name in ("sum", "mean", "prod", "nansum", "norm")
    },
    "known indices": lambda device: F.cross_entropy(torch.eye(2).to(device), INDEX.to(device)),
    "known indices of a copy": lambda device: (
        torch.zeros(2).to(device).index_copy_(0, INDEX.to(device), torch.tensor([3.0, 4.0]).to(device))
    ),
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "ones": lambda device: torch.ones(2, 3, device=device, dtype=torch.bfloat16),
    "full": lambda device: torch.full((2,), 3.5, device=device),
    "empty": lambda device: torch.empty(2, 3, device=device).fill_(7),
    "empty_strided": lambda device: torch.empty_strided((2, 3), (1, 2), device=device).fill_(7),
    "arange": lambda device: torch.arange(5, device=device),
    "arange of floats": lambda device: torch.arange(0, 1, 0.25, device=device),
    "arange, used": lambda device: torch.outer(torch.arange(2000, device=device), torch.ones(2).to(device)),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "logspace": lambda device: torch.logspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device) @ torch.ones(3, 2).to(device),
    "eye of two sizes": lambda device: torch.eye(3, 2, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "tensor": lambda device: torch.tensor([1.0, 2.0], device=device),
    "tensor of one": lambda device: torch.tensor(x(device)[0]),
    "as_tensor of one": lambda device: torch.as_tensor(x(device)[0], dtype=torch.bfloat16),
    "as_tensor": lambda device: torch.as_tensor(np.ones(2, np.float32), device=device),
    "from NumPy": lambda device: torch.from_numpy(np.ones((2, 3), np.float32)).to(device).T,
    "scalar_tensor": lambda device: torch.scalar_tensor(3.0, device=device),
    "randn": lambda device: torch.randn(2, 3, device=device),
    "rand": lambda device: torch.rand(2, 3, device=device),
    "randint": lambda device: torch.randint(0, 9, (4,), device=device),
    "randperm": lambda device: torch.randperm(6, device=device),
    "normal": lambda device: torch.normal(1.0, 2.0, (3,), device=device),
    "zeros_like": lambda device: torch.zeros_like(x(device)),
    "ones_like": lambda device: torch.ones_like(x(device), dtype=torch.int32),
    "full_like": lambda device: torch.full_like(x(device), 2.0),
    "empty_like": lambda device: torch.empty_like(x(device)).fill_(2),
    "rand_like": lambda device: torch.rand_like(x(device)),
    "randn_like": lambda device: torch.randn_like(x(device)),
    "randint_like": lambda device: torch.randint_like(x(device), 9),
    "new_zeros": lambda device: x(device).new_zeros(3),
    "new_ones": lambda device: x(device).new_ones(3, dtype=torch.int32),
    "new_full": lambda device: x(device).new_full((3,), 2.5),
    "new_empty": lambda device: x(device).new_empty(3).fill_(1),
    "new_tensor": lambda device: x(device).new_tensor([3.0]),
    "new_tensor of another dtype": lambda device: x(device).int().new_tensor([3.0]),
    "as a context": from_default,
    "by default": set_default,
    "normal_": lambda device: torch.empty(3, device=device).normal_(1, 2),
    "Linear": lambda device: nn.Linear(3, 2).to(device)(torch.ones(1, 3).to(device)).detach(),
    "Conv3d": lambda device: nn.Conv3d(3, 2, 3, device=device)(torch.ones(1, 3, 4, 4, 4).to(device)).detach(),
    "writes": written,
    "quantile": lambda device: x(device).quantile(0.5),
    "a stack of a result": lambda device: torch.stack(LARGE.to(device).aminmax()),
    "where": lambda device: torch.where(x(device) > 1, 1.0, 0.0),
    "an index": lambda device: x(device)[x(device) > 1],
    "allclose": lambda device: torch.tensor(torch.allclose(x(device), x(device))),
    "out": lambda device: torch.add(x(device), x(device), out=torch.empty(2, 3, 4, device=device)),
    "out of a factory": lambda device: torch.arange(3.0, out=torch.empty(3, device=device)),
    "in place, which torchax lacks": lambda device: (x(device) > 0).logical_and_(x(device) < 1),
    "pad": lambda device: F.pad(x(device), (1, 1)),
    "interpolate": lambda device: F.interpolate(x(device), scale_factor=2),
    "a distribution": lambda device: torch.distributions.Normal(x(device), 1.0).log_prob(x(device)),
    "foreach": lambda device: torch._foreach_mul([x(device), x(device)], 2.0)[1],  # pyright: ignore
    "a generator": lambda device: torch.randn(2, generator=torch.Generator().manual_seed(3), device=device),
}


@pytest.mark.parametrize("mode", ["nothing enabled", "inference mode", "torchax enabled"])
@pytest.mark.slow_cases("*mode", "*torchax enabled")
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_what_is_made_on_jax_has_the_values_of_the_cpu(make, mode):
    torch.manual_seed(0)
    want = make("cpu")
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if mode == "torchax enabled":
            stack.enter_context(torchax.default_env())
        if mode == "inference mode":
            stack.enter_context(torch.inference_mode())
        got = make("jax")
        values = got.cpu()
    assert runtime.on_jax(got) or want.ndim == 0
    assert type(values) is torch.Tensor
    assert values.shape == want.shape
    assert values.is_floating_point() == want.is_floating_point()
    assert torch.allclose(values.float(), want.float(), atol=1e-6)


def test_a_tensor_goes_there_and_back_by_each_way():
    for device in ("jax", "jax:0", torch.device("jax"), x("jax").device):
        moved = x("cpu").to(device)
        assert runtime.on_jax(moved)
        assert (moved.device, moved.is_cuda, moved.is_meta) == (torch.device("jax:0"), False, False)
    moved = x("jax")
    assert moved.to("jax") is moved.to(torch.float32) is moved
    for back in (moved.cpu(), moved.to("cpu"), moved[1:].cpu(), torch.from_numpy(moved.numpy())):
        back += 1  # it is writable, and no part of the tensor on JAX
    assert torch.equal(moved.cpu(), x("cpu"))
    assert moved.tolist() == x("cpu").tolist()
    assert repr(moved[0, 0]) == "tensor([-2.0000, -1.8261, -1.6522, -1.4783], device='jax:0')"
    assert f"{moved.max():.1f} {float(moved[0, 0, 0])} {int(moved[0, 0, 0])}" == "2.0 -2.0 -2"


def test_tensors_of_the_host_mix_with_those_on_jax():
    host, there = x("cpu"), x("jax")
    for mixed in (host + there, there * host, torch.cat([host, there]), there @ host.mT, host[there > 0]):
        assert runtime.on_jax(mixed)
    assert torch.equal((torch.tensor(2.0) * there).cpu(), 2 * host)
    assert torch.equal(host.clone().copy_(there), host)
    assert torch.equal(host.pin_memory(), host), "which PyTorch would ask the device for"
    table = torch.tensor([0.1, 0.7], dtype=torch.float64)
    assert table[torch.tensor(1).to("jax")] == table[1]  # a lookup by a number stays where the table is
    with pytest.raises(
        ValueError, match=r'^got add_, which writes .* one of the host: move that \.to\("jax"\)'
    ):
        host += there


def test_an_operator_that_torchax_lacks_runs_on_the_host_and_is_named():
    airy = torch.special.airy_ai
    with pytest.warns(UserWarning, match="torchax has no special_airy_ai: it runs on the host"):
        got = airy(LARGE.to("jax"))
    assert torch.equal(got.cpu(), airy(LARGE))
    assert torch.equal(airy(LARGE.to("jax"), out=got), got), "a warning is an error, and it is named once"
    program = jax.jit(import_torchax().interop.jax_view(airy))
    with pytest.raises(import_torchax().tensor.OperatorNotFound):
        program(LARGE.numpy())


def test_a_model_trains_as_on_the_cpu():
    def losses(device):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv3d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.LazyLinear(5)
        )
        model(torch.zeros(2, 3, 4, 4, 4))
        model = model.to(device)
        given = torch.randn(2, 3, 4, 4, 4, device=device)
        steps = torch.optim.Adam(model.parameters(), 0.01, foreach=True)
        found = []
        for _ in range(3):
            steps.zero_grad()
            result = model(given[..., :4].clamp(-1, 1))
            loss = (F.mse_loss(result, torch.ones_like(result)) + result[:, 1:].pow(2).mean()) * 0.5
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            found.append(loss.item())
        return found

    with torch.enable_grad():
        assert losses("jax") == pytest.approx(losses("cpu"), rel=1e-5)


def test_gradients_pass_through_functions_that_torchax_has_whole():
    def gradient(device):
        leaf = x("cpu").requires_grad_()
        moved = leaf.to(device)
        y = F.pad(moved[:, 1:], (1, 1))
        y = F.linear(y, torch.ones(2, 6).to(device)) + moved.to(torch.bfloat16).float()[..., :2].mean()
        (F.interpolate(y, scale_factor=2).cpu().pow(2).sum() + y.to("cpu", torch.float64).sum()).backward()
        return leaf.grad

    with torch.enable_grad():
        assert torch.allclose(gradient("jax"), gradient("cpu"), rtol=1e-4)


def test_any_thread_computes_there():
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        results = threads.map(lambda size: (torch.randn(size, device="jax") * 0 + 1).sum().item(), (1, 2, 3))
    assert [*results] == [1, 2, 3]


def test_a_tensor_is_copied_and_saved():
    tensor, file = x("jax"), io.BytesIO()
    for copied in (copy.copy(tensor), copy.deepcopy(tensor), tensor.clone()):
        assert runtime.on_jax(copied)
        assert torch.equal(copied.cpu(), tensor.cpu())
    torch.save({"x": tensor, "a part": tensor[0]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert {type(each) for each in loaded.values()} == {torch.Tensor}
    assert torch.equal(loaded["x"], tensor.cpu())
    assert torch.equal(loaded["a part"], tensor[0].cpu())


@pytest.mark.parametrize("order", ["import cogvideox_torchax, torch", "import torch, cogvideox_torchax"])
def test_an_import_of_the_package_is_enough_in_either_order(order):
    assert printed_by(f"{order}\nprint((torch.ones(2).to('jax') + 1).tolist())").strip() == "[2.0, 2.0]"


# Functions that torchax has whole take torch's own names of arguments.


def lowered():
    """Yield torch's functions for which torchax has a form of its own."""
    stand_ins = torch.overrides.get_testing_overrides()
    for function in import_torchax().ops.ops_registry.all_torch_functions:
        if function in stand_ins and function.__name__ not in ("__getitem__", "_sparse_mm"):
            yield pytest.param(function, id=function.__name__)


matrix = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
GIVEN = {
    "allclose": {"input": matrix, "other": matrix},
    "angle": {"input": matrix},
    "argsort": {"input": matrix, "dim": 0, "descending": True},
    "cdist": {"x1": matrix, "x2": matrix.T},
    "corrcoef": {"input": matrix},
    "diag": {"input": matrix, "diagonal": 1},
    "interpolate": {"input": matrix[None], "scale_factor": 2.0},
    "isclose": {"input": matrix, "other": matrix.T},
    "linalg_det": {"A": matrix},
    "linalg_matrix_power": {"input": matrix, "n": 2},
    "linalg_slogdet": {"A": matrix},
    "linalg_solve": {"A": matrix, "B": matrix, "left": False},
    "linalg_solve_ex": {"A": matrix, "B": matrix, "left": False},
    "linalg_tensorsolve": {"input": matrix, "other": matrix[0]},
    "linear": {"input": matrix, "weight": matrix, "bias": matrix[0]},
    "logdet": {"input": matrix},
    "max_pool2d": {"input": matrix[None, None], "kernel_size": 2},
    "one_hot": {"input": torch.tensor([0, 2]), "num_classes": 3},
    "pad": {"input": matrix, "pad": (1, 1), "mode": "constant", "value": 2.0},
    "scaled_dot_product_attention": {"query": matrix, "key": matrix.T, "value": matrix, "scale": 0.3},
    "tensor_split": {"input": matrix, "sections": 2, "dim": 1},
}


@pytest.mark.filterwarnings("ignore:torchax has no")
@pytest.mark.parametrize("mode", ["nothing enabled", "torchax enabled", "of unknown values"])
@pytest.mark.parametrize("function", [*lowered()])
def test_a_function_takes_torchs_names(function, mode, monkeypatch):
    if function.__name__ not in GIVEN:
        assert function.__name__ in (
            *("as_tensor", "tensor", "einsum", "ones", "zeros", "eye", "full", "empty", "arange", "rand"),
            *("empty_strided", "randn", "randint", "unravel_index", "linalg_svd", "svd", "lu", "lu_solve"),
            *("pad_sequence", "repeat_interleave"),
        ), "it has no arguments here"
        return
    if mode == "of unknown values":  # as those of large tensors
        monkeypatch.setattr(jax_device, "KNOWN_SIZE", -1)
    given = GIVEN[function.__name__]
    want = function(**given)
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("jax"), given)
    with torchax.default_env() if mode == "torchax enabled" else contextlib.nullcontext():
        got = function(**moved)
    leaves = torch.utils._pytree.tree_leaves
    for ours, theirs in zip(leaves(got), leaves(want), strict=True):
        if isinstance(theirs, torch.Tensor):
            ours = ours.cpu()
            assert torch.allclose(ours.float(), theirs.float(), atol=1e-5)
        else:
            assert ours == theirs


GRADIENTS = {
    "a number": lambda y, v: y.__setitem__((slice(None), slice(1)), 0.0),
    "a tensor": lambda y, v: y.__setitem__(0, v.detach()),
    "one with a gradient": lambda y, v: y.__setitem__((slice(None), 1), v[:3]),
    "one of the host with a gradient": lambda y, v: y.__setitem__([2], v.cpu()),
    "a slice of a slice": lambda y, v: y[1:][0].__setitem__(slice(2), v[:2]),
    "in place": lambda y, v: y[0].mul_(v),
    "a copy": lambda y, v: y[:, 1:].copy_(v[1:]),
    "a mask": lambda y, v: y.masked_fill_(y > 1, 0),
}


@pytest.mark.parametrize("is_leaf", [False, True], ids=["of a result", "of zeros"])
@pytest.mark.parametrize("write", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_know_what_was_written(write, is_leaf):
    def gradients(device):
        leaf, v = x("cpu")[0].requires_grad_(), torch.ones(4).requires_grad_()
        y = torch.ones(3, 4, device=device) if is_leaf else leaf.to(device) * 2
        write(y, v.to(device) * 3)
        (y.pow(2).sum() + y[0].sum() + (leaf.to(device) * v.to(device)).sum()).backward()
        return [each.grad for each in (leaf, v) if each.grad is not None]

    with torch.enable_grad():
        for got, want in zip(gradients("jax"), gradients("cpu"), strict=True):
            assert torch.allclose(got, want)


def test_running_statistics_are_kept():
    assert torch.allclose(statistics("jax").cpu(), statistics("cpu"), atol=1e-5)
