"""The contract at XLA's default optimization, as users run it; `conftest.py` turns it off for other tests."""

import json
import os
import subprocess
import sys

import pytest

from tests.default_optimization import CASES


@pytest.fixture(scope="module")
def outcomes():
    """Return each case's failure, "" for none; one process runs all of them."""
    users = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=900",
        "COGVIDEOX_TORCHAX_COMPILE_CACHE": "off",
    }
    command = [sys.executable, "-m", "tests.default_optimization"]
    done = subprocess.run(command, env=users, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_the_contract_holds_as_users_run_it(outcomes, case):
    assert outcomes[case] == "", outcomes[case]
