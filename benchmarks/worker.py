"""A process that answers requests, one after another: `Worker` starts it and asks, `main` runs in it.

python -m benchmarks.worker < REQUESTS > ANSWERS
"""

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "benchmarks.worker")
ROOT = Path(__file__).parents[1]


class Worker:
    """A process that computes: it is replaced after a failure, and when the environment changes.

    Args:
        scratch: a directory for the process's stderr.
        limit: seconds that one request may take.
    """

    def __init__(self, scratch: Path, limit: float):
        """Keep the log's path and the seconds that a request may take; `ask` starts the process."""
        self._log, self._limit = scratch / "stderr", limit
        self._process: subprocess.Popen[str] | None = None
        self._environment: dict[str, str] = {}  # the variables that were set for the process

    def ask(self, do: str, request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        """Have the process call a function of `measure`; return the answer, with a "status".

        If the process crashes, is killed or hangs, the status is not "ok", and a "reason" says why. The
        process is then ended.

        Args:
            do: the function's name.
            request: its arguments; "case" has the fields of a `Case`.
            environment: variables to set for the process; if they differ from the last call's, a new process
                is started.
        """
        if self._process is None or environment != self._environment:
            self.close()
            self._environment = environment
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    COMMAND,
                    env=os.environ | {"PYTHONPATH": path} | environment,  # run from any directory
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        answer = self._answer(self._process, json.dumps({"do": do, "request": request}))
        if answer["status"] != "ok":
            self.close()
        return answer

    def _answer(self, process: Any, line: str) -> dict[str, Any]:
        """Send the process a request, one line of JSON; return its answer, or the failure of the process."""
        try:
            print(line, file=process.stdin, flush=True)
            readable, _, _ = select.select([process.stdout], [], [], self._limit)
            if not readable:
                return {"status": "failed", "reason": f"not done after {self._limit:.0f} s"}
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        # An empty answer is the end of the pipe: the process has ended.
        if process.wait() == -signal.SIGKILL:
            return {
                "status": "does not fit",
                "reason": "killed, as the system does when host memory runs out",
            }
        # The log's last line; "no message" if the log is empty.
        *_, last_line = ["no message", *self._log.read_text(errors="replace").strip().splitlines()]
        return {"status": "failed", "reason": f"exit code {process.returncode}: {last_line[:300]}"}

    def close(self) -> None:
        """Kill the process, if there is one; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # waits for its end, and closes the pipes
            self._process = None


def answer(do: str, request: dict[str, Any]) -> dict[str, Any]:
    """Call a function of `measure` in this process; return its result, or the `failure` for its error.

    The result's "status" is "ok", unless the function sets another.

    Args:
        do: the function's name.
        request: its arguments; "case" has the fields of a `Case`.
    """
    try:  # the import may fail too
        from benchmarks import measure
        from benchmarks.jobs import Size

        if "case" in request:
            case = request["case"]
            request = request | {"case": measure.Case(**case | {"size": Size(*case["size"])})}
        return {"status": "ok"} | getattr(measure, do)(**request)
    except Exception as error:
        return failure(error)


def failure(error: BaseException) -> dict[str, Any]:
    """Return the result for an error: "does not fit" where memory ran out, else "failed", and the reason."""
    from cogvideox_torchax import runtime  # imports torch, which starting workers does not need

    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"status": "does not fit" if runtime.out_of_memory(error) else "failed", "reason": text}


def main() -> None:
    """Answer the requests on stdin, a line of JSON each, on stdout; output of libraries goes to stderr."""
    from cogvideox_torchax.runtime.quiet import quiet_libraries

    quiet_libraries()
    if sys.platform == "linux":  # the system then kills this process with its parent: the device is freed
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # Answers go to a copy of stdout; stdout itself becomes stderr, as libraries print to it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
        gc.collect()  # frees the device's memory before the next request


if __name__ == "__main__":
    main()
