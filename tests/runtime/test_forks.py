"""Children that are forked from a process which uses JAX: they compute in PyTorch, and never wait for JAX."""

from tests.processes import printed_by

SCRIPT = """
import faulthandler, multiprocessing, os, warnings
faulthandler.dump_traceback_later(60, exit=True)  # a child that waits for ever
warnings.filterwarnings("ignore", message=".*os.fork", category=RuntimeWarning)
import numpy, torch, torchax
from torch.utils.data import DataLoader
import cogvideox_torchax
plain = [torch.full((3,), float(n)) for n in range(4)]
model_directory = os.path.join(os.path.dirname(cogvideox_torchax.__file__), "assets", "tiny-vae")
context = multiprocessing.get_context("fork")

def total(n):
    return float((plain[n] + torch.ones(3)).sum())

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
"""

LOADERS = """
loader = DataLoader(plain, batch_size=None, num_workers=1, timeout=30)
print([x.tolist() for x in loader])
print(context.Pool(1).map_async(total, range(4)).get(30))
import datasets
datasets.disable_progress_bars()
rows = datasets.Dataset.from_dict({"n": [0, 1, 2, 3]})
print(rows.map(lambda row: {"sum": total(row["n"])}, num_proc=2)["sum"][:])
"""
"""Ways to compute in children: a DataLoader's, a pool's, those of `datasets`."""

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
    "torchax turned on": "cogvideox_torchax.enable()",
    "torchax turned on by hand": "torchax.enable_globally()",
}
"""Expressions that would compute on JAX."""


def test_a_forked_worker_computes_in_pytorch_however_torchax_was_turned_on():
    by_hand, ours = "torchax.enable_globally()", "torchax.disable_globally(); cogvideox_torchax.enable()"
    said = printed_by("\n".join([SCRIPT, by_hand, LOADERS, ours, LOADERS])).splitlines()
    whole, sums = [3 * [float(n)] for n in range(4)], [3.0 * (n + 1) for n in range(4)]
    assert said == 2 * [str(whole), str(sums), str(sums)]


def test_a_use_of_jax_in_a_forked_worker_is_an_error_that_says_what_to_do():
    """A tensor's shape and dtype stay readable; a worker that turns torchax off has it off already."""
    said = printed_by(
        f"{SCRIPT}\n"
        "from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX\n"
        "vae = cogvideox_torchax.AutoencoderKLCogVideoX.from_pretrained(model_directory).to('jax')\n"
        "flax_vae = FlaxAutoencoderKLCogVideoX.from_pretrained(model_directory)\n"
        "cogvideox_torchax.enable()\n"
        "on_jax = torch.ones(4).to('jax')\n"
        "print(said_in_a_child(lambda: (tuple(on_jax.shape), vae.dtype, torchax.disable_globally())))\n"
        f"for use in {list(USES.values())}:\n"
        "    print(said_in_a_child(lambda: eval(use)))\n"
    ).splitlines()
    assert said[0] == "got ((4,), torch.float32, None)"
    assert {use: line.partition(":")[0] for use, line in zip(USES, said[1:], strict=True)} == dict.fromkeys(
        USES, "ForkError"
    )
    assert 'multiprocessing_context="spawn"' in said[1]


def test_jax_works_in_a_child_that_was_forked_before_it_started():
    said = printed_by(
        f"{SCRIPT}\n"
        "def use():\n"
        "    cogvideox_torchax.enable()\n"
        "    return (torch.ones(2).to('jax') + 1).tolist()\n"
        "print(said_in_a_child(use))"
    )
    assert said == "got [2.0, 2.0]\n"
