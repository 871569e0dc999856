"""Children that are forked from a process which uses JAX: they compute in PyTorch, and never wait for JAX."""

import pytest

from tests.processes import printed_by

pytestmark = pytest.mark.slow

SCRIPT = """
import faulthandler, multiprocessing, os, warnings
faulthandler.dump_traceback_later(120, exit=True)  # a child that waits for ever
warnings.filterwarnings("ignore", message=".*os.fork", category=RuntimeWarning)
import datasets, numpy, torch, torchax
from torch.utils.data import DataLoader
import cogvideox_torchax
datasets.disable_progress_bars()
plain = [torch.full((3,), float(n)) for n in range(4)]
rows = datasets.Dataset.from_dict({"n": [0, 1, 2, 3]})
context = multiprocessing.get_context("fork")

def total(n):
    return float((plain[n] + torch.ones(3)).sum())

def read_in_a_child():
    print([x.tolist() for x in DataLoader(plain, batch_size=None, num_workers=1, timeout=30)])

def said_in_a_child(use):
    def run():
        try:
            connection.send(f"got {use()}")
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
    ours, connection = context.Pipe()
    child = context.Process(target=run)
    child.start()
    assert ours.poll(30), "the child waits"
    return ours.recv()

def use():
    return (torch.ones(2).to('jax') + 1).tolist()

print(said_in_a_child(use))
torchax.enable_globally()
read_in_a_child()
torchax.disable_globally()
read_in_a_child()
print(context.Pool(1).map_async(total, range(4)).get(30))
print(rows.map(lambda row: {"sum": total(row["n"])}, num_proc=2)["sum"][:])

from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX
model_directory = os.path.join(os.path.dirname(cogvideox_torchax.__file__), "assets", "tiny-pipeline", "vae")
vae = cogvideox_torchax.AutoencoderKLCogVideoX.from_pretrained(model_directory).to('jax')
flax_vae = FlaxAutoencoderKLCogVideoX.from_pretrained(model_directory)
on_jax = torch.ones(4000).to('jax')
print(said_in_a_child(lambda: (tuple(on_jax.shape), vae.dtype)))
"""

USES = {
    "a tensor's values": "on_jax + 1",
    "a tensor shown": "repr(on_jax)",
    "a view": "on_jax[1:].tolist()",
    "a move to the host": "on_jax.cpu()",
    "a pickle": "__import__('pickle').dumps(on_jax)",
    "a model": "vae.encode(torch.zeros(1, 3, 1, 16, 16))",
    "a model's stream": "next(vae.encode_stream(torch.zeros(1, 3, 1, 16, 16)))",
    "the Flax build": "flax_vae.encode(numpy.zeros((1, 1, 16, 16, 3), numpy.float32))",
    "weights for the Flax build": "FlaxAutoencoderKLCogVideoX.from_pretrained(model_directory)",
    "a tensor made there": "torch.ones(2, device='jax')",
    "torchax turned on by hand": "[torchax.enable_globally(), on_jax + 1]",
}
"""Expressions that would compute on JAX."""


@pytest.fixture(scope="module")
def said():
    """Return the lines that a process prints of its children, forked before JAX started and after it."""
    uses = (f"print(said_in_a_child(lambda: {use}))" for use in USES.values())
    return printed_by("\n".join([SCRIPT, *uses]))


def test_jax_works_in_a_child_that_was_forked_before_it_started(said):
    assert said.splitlines()[0] == "got [2.0, 2.0]"


def test_a_forked_worker_computes_in_pytorch_however_torchax_was_turned_on(said):
    whole, sums = [3 * [float(n)] for n in range(4)], [3.0 * (n + 1) for n in range(4)]
    assert said.splitlines()[1:5] == 2 * [str(whole)] + 2 * [str(sums)]


def test_a_use_of_jax_in_a_forked_worker_is_an_error_that_says_what_to_do(said):
    """A tensor's shape and dtype stay readable."""
    readable, *refused = said.splitlines()[5:]
    assert readable == "got ((4000,), torch.float32)"
    errors = {use: line.partition(":")[0] for use, line in zip(USES, refused, strict=True)}
    assert errors == dict.fromkeys(USES, "ForkError")
    assert 'multiprocessing_context="spawn"' in refused[0]
