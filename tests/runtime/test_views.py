"""Writes through views: torchax's tensors share their values as PyTorch's do, eagerly and in a trace."""

import jax
import pytest
import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.bridge import import_torchax


def times_in_place(x):
    x.transpose(1, 2)[:, ::2] *= 0.5


def set_item(x):
    x.view(2, -1)[:, 0] = 5.0


def masked(x):
    y = x.transpose(0, 1)
    y[y > 0] = 0.0


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


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_through_a_view_is_seen_as_in_pytorch(write, traced):
    def written(x):
        """Return a tensor after the write, with two views that were made before it."""
        views = x.view(2, -1), x.transpose(0, 1)[1:]
        write(x)
        return torch.cat([x.reshape(-1), *(view.reshape(-1) for view in views)])

    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = runtime.without_torchax(written, x.clone())
    with runtime.active():
        on_jax = runtime.to_jax(x)
        if traced:
            interop = import_torchax().interop
            on_jax = runtime.array_of(on_jax)
            result = runtime.tensor_of(jax.jit(interop.jax_view(written))(on_jax))
        else:
            result = written(on_jax)
        assert torch.equal(runtime.to_torch(result), expected)


def test_a_write_into_a_view_of_another_dtype_is_refused():
    with runtime.active():
        x = runtime.to_jax(torch.ones(4, dtype=torch.complex64))
        with pytest.raises(ValueError, match="of float32 that shares its memory with one of complex64"):
            x.real.mul_(2)
