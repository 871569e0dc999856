"""Requests to processes of their own: `ask` starts one for a request, and `main` answers in it.

python -m benchmarks.worker < REQUEST > ANSWER
"""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from benchmarks.pages import ROOT

COMMAND = (sys.executable, "-m", "benchmarks.worker")


def ask(
    do: str, request: dict[str, Any], environment: dict[str, str], limit: float | None = None
) -> dict[str, Any]:
    """Have a new process call a function of `measure`, with `environment` set; return the answer.

    If the process crashes, is killed or takes longer than `limit` seconds, the answer has a "reason"
    and a "status" other than "ok". A request's "case" has the fields of a `Case`. `do` may name a function of
    another module too, such as "memory.peak".
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            COMMAND,
            env=os.environ | {"PYTHONPATH": path} | environment,  # run from any directory
            input=json.dumps({"do": do, "request": request}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done after {limit:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout)
    if done.returncode == -signal.SIGKILL:
        return {"status": "does not fit", "reason": "killed, as the system does when host memory runs out"}
    *_, last_line = ["no message", *done.stderr.strip().splitlines()]
    return {"status": "failed", "reason": f"exit code {done.returncode}: {last_line[:300]}"}


def figure(do: str, request: dict[str, Any], environment: dict[str, str]) -> Any:
    """`ask` for a function's only figure, "figure"; raise `RuntimeError` if there is none."""
    found = ask(do, request, environment)
    if found["status"] != "ok":
        raise RuntimeError(f"{do} of {request}: {found['reason']}")
    return found["figure"]


def answer(do: str, request: dict[str, Any]) -> dict[str, Any]:
    """Call a function, as for `ask`, in this process; return its result, or the `failure` for its error.

    The result's "status" is "ok", unless the function sets another.
    """
    module, _, name = do.rpartition(".")
    try:  # the import may fail too
        function = getattr(importlib.import_module(f"benchmarks.{module or 'measure'}"), name)
        if "case" in request:
            from benchmarks.jobs import Size
            from benchmarks.loading import Case

            case = request["case"]
            request = request | {"case": Case(**case | {"size": Size(*case["size"])})}
        return {"status": "ok"} | function(**request)
    except Exception as error:
        return failure(error)


def failure(error: BaseException) -> dict[str, Any]:
    """Return the result for an error: "does not fit" where memory ran out, else "failed", and the reason."""
    from cogvideox_torchax.vae.memory import out_of_memory  # imports torch, which asking does not need

    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"status": "does not fit" if out_of_memory(error) else "failed", "reason": text}


def main() -> None:
    """Answer the request on stdin, as JSON on stdout; output of libraries goes to stderr."""
    from cogvideox_torchax.terminal import quiet_libraries

    quiet_libraries()
    if sys.platform == "linux":  # the system then kills this process with its parent: the device is freed
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The answer goes to a copy of stdout; stdout itself becomes stderr, as libraries print to it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(answer(**json.load(sys.stdin))), file=answers, flush=True)


if __name__ == "__main__":
    main()
