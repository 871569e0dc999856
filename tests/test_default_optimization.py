"""The contract at XLA's default optimization, as users run it; `conftest.py` turns it off for other tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = "tests/vae/torchax/test_real_programs.py::test_a"
TESTS = {
    "one device": (
        f"{PROGRAMS}_thread_that_enabled_nothing_streams_one_video_at_a_time_and_draws_of_the_posterior",
        f"{PROGRAMS}_subclass_is_ported_with_what_it_adds",  # two programs: without a cache and with one
    ),
    "meshes and Flax": (
        f"{PROGRAMS}_copy_stays_on_its_mesh_and_a_pickle_leaves_it",
        "tests/vae/test_first_frame.py::test_a_chunk_is_that_of_stock_diffusers"
        "[decode 5 over a mesh whose shards are padded-flax]",
        "tests/vae/test_first_frame.py::test_a_chunk_is_that_of_stock_diffusers[encode 13-flax]",
    ),
}
USERS = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=900",
    "COGVIDEOX_TORCHAX_COMPILE_CACHE": "off",
}


@pytest.mark.parametrize("tests", TESTS.values(), ids=TESTS)
@pytest.mark.slow_cases("meshes and Flax")
def test_the_contract_holds_as_users_run_it(tests):
    """In a process of its own: XLA reads its flags once."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:xdist", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, *tests], cwd=root, env=os.environ | USERS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
