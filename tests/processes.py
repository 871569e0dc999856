"""The root of the checkout, and Python code that is run in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
