"""Runs of the command line that are killed, each at another step: the next one ends as an undisturbed one."""

import re

import pytest

from cogvideox_torchax import cli
from tests.dataset.conftest import OPTIONS, tree
from tests.processes import printed_by

pytestmark = [pytest.mark.usefixtures("torchax_off"), pytest.mark.slow]

WAYS = {
    "encode": ("encode", "{clips}", "--model", "{model}", *OPTIONS),
    "encode windows": ("encode", "{clips}", "--model", "{model}", "--windows", "--frames", "4", *OPTIONS),
    "pack": ("pack", "{latents}", "--format", "parquet", "--shard-size", "1"),
    "decode": ("decode", "{latents}", *OPTIONS),
    "generate": ("generate", "--prompts", "{prompts}", "--model", "{pipeline}", "--steps", "2", "--quiet"),
}
MOMENTS = (*range(2, 12, 2), *range(18, 90, 16))
HIDDEN = re.compile(r"\.(partial|lock)(/|$)")
RECORD = re.compile(r"\d\.json$")  # of a video, which comes before it
KILLED = """
import os, signal, sys
import pyarrow.parquet, torch  # these here once, not in each child
from diffusers import AutoencoderKLCogVideoX
from cogvideox_torchax import cli

def killer(place, moment):
    left = moment
    def hook(event, args):
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir") and place in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return hook

for given in sys.argv[1:]:  # each in a process of its own, which need not import all that again
    place, *command = given.split("|")
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        # At the so many-th opening, renaming and so on in the place, whose name is the number.
        sys.addaudithook(killer(place, int(os.path.basename(place))))
        os._exit(cli.main([*command, "-o", os.path.join(place, "out")]))
    print("ended by", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("way", WAYS)
def test_what_a_killed_run_left_is_whole_and_the_next_completes_it_bit_for_bit(
    small, encoded, saved, tmp_path, way
):
    given = {"clips": small.clips, "model": small.model, "latents": encoded / "latents"}
    given |= {"prompts": tmp_path / "prompts.txt", "pipeline": saved()}
    given["prompts"].write_text("a panda\nthe sea\nan egg\n")
    command = [word.format_map(given) for word in WAYS[way]]
    code = cli.main([*command, "-o", str(tmp_path / "whole")])
    wanted = tree(tmp_path / "whole")
    outputs = [tmp_path / str(moment) / "out" for moment in MOMENTS]
    for out in outputs:
        out.parent.mkdir()
    ended = printed_by(KILLED, *("|".join((str(out.parent), *command)) for out in outputs))
    assert ended.count("ended by -9") > 4
    for out in outputs:
        left = {name: data for name, data in tree(out).items() if not HIDDEN.search(name)}
        assert left.items() <= wanted.items(), "only whole files have their names"
        times = {name: (out / name).stat().st_mtime_ns for name in left if not RECORD.search(name)}
        assert cli.main([*command, "-o", str(out)]) in ((code,) if way != "pack" or not left else (2,))
        assert tree(out) == wanted
        assert times == {name: (out / name).stat().st_mtime_ns for name in times}, "nothing is made again"
        assert not [path for path in out.parent.rglob(".*") if path.suffix in (".partial", ".lock")]
