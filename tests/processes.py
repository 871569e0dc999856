"""The root of the checkout, and Python code that is run in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
USERS = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=900",
    "COGVIDEOX_TORCHAX_COMPILE_CACHE": "off",
}
"""Variables of a process that compiles as users' do, and not as tests/conftest.py asks."""


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with this checkout's packages; its exit code may be any."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def printed_by(code: str, *arguments: object, **environment: str) -> str:
    """Return what code prints in a process of its own, which must succeed."""
    ended = run_python(code, *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
