"""A loop over clips on one machine: while one is computed, next ones are read and the last one is written."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cogvideox_torchax import runtime
from cogvideox_torchax.files.whole import OutputError

Job = TypeVar("Job")

READERS = 2
"""Number of clips that are read at a time."""
WRITTEN_BEHIND = 2
"""Number of results that may wait to be written."""


@dataclass(frozen=True)
class Step:
    """The outcome of a job.

    Attributes:
        job: the job.
        error: why the job failed; None if it succeeded.
        waited: seconds for which the computation waited for the job's input.
        computed: seconds of the computation.
        result: of `compute`; None if the job failed.
    """

    job: Any
    error: str | None
    waited: float
    computed: float
    result: Any = None


CLIPS_OWN = (ValueError, OverflowError, MemoryError, RuntimeError)
IN_READING = (*CLIPS_OWN, OSError)
"""Errors that fail one clip, not the loop: `CLIPS_OWN` where it is computed, `IN_READING` where it is read.

`attempt` excepts some of them.
"""


def attempt(
    step: Callable[[Any], Any], given: Any, errors: tuple[type[Exception], ...]
) -> tuple[Any, str | None]:
    """Call `step(given)`; return (result, None), or (None, reason) if it raises one of `errors`.

    `errors` are those that the argument causes, not the machine. So an `OutputError` is raised even if it is
    one of them, and so is a `RuntimeError` that does not report exhausted memory.
    """
    try:
        return step(given), None
    except errors as error:
        exhausted = runtime.out_of_memory(error)
        if isinstance(error, OutputError) or (isinstance(error, RuntimeError) and not exhausted):
            raise
        # In one line. An error may have no message, as `MemoryError` from Python itself.
        return None, " ".join(str(error).split()) or ("out of memory" if exhausted else type(error).__name__)


def work(
    jobs: Iterable[Job],
    read: Callable[[Job], Any],
    compute: Callable[[Any], Any],
    keep: Callable[[Job, Any], None],
    refuse: Callable[[Job, str], None],
    *,
    readers: int = READERS,
) -> Iterator[Step]:
    """Run jobs in order; yield the outcome of each after its computation, and return when all are written.

    Args:
        jobs: anything that names a clip, such as its id.
        read: returns a job's input, in a thread of its own. An error of `IN_READING` fails that job alone.
        compute: returns an input's result, in the caller's thread. An error of `CLIPS_OWN` fails that job
            alone.
        keep: writes a job's result, in one thread for all jobs. Any error there ends the loop.
        refuse: called, in the thread of `keep`, with a job that failed and the reason.
        readers: number of jobs that are read at a time.
    """
    reading = ThreadPoolExecutor(readers, "read")
    writing = ThreadPoolExecutor(1, "write")
    started = ((job, reading.submit(read, job)) for job in jobs)  # reading begins when an item is taken
    behind: deque[Future[None]] = deque()  # results that wait to be written
    try:
        # One more than `readers`: while a clip that is read waits for its computation, no reader is idle.
        ahead = deque(itertools.islice(started, readers + 1))  # jobs, and the futures of their inputs
        while ahead:
            job, future = ahead.popleft()
            waiting_began = time.perf_counter()
            given, reason = attempt(Future.result, future, IN_READING)  # (input, None) or (None, reason)
            ahead.extend(itertools.islice(started, 1))  # begins to read one more job
            computing_began, result = time.perf_counter(), None
            if reason is None:
                result, reason = attempt(compute, given, CLIPS_OWN)
            given = None  # frees a clip's frames before the next clip is taken
            ended = time.perf_counter()
            behind.append(
                writing.submit(keep, job, result) if reason is None else writing.submit(refuse, job, reason)
            )
            # Waits while too many results are behind; `result` raises the error of a write that failed.
            while len(behind) > WRITTEN_BEHIND or (behind and behind[0].done()):
                behind.popleft().result()
            yield Step(job, reason, computing_began - waiting_began, ended - computing_began, result)
        while behind:
            behind.popleft().result()
    finally:
        reading.shutdown(wait=True, cancel_futures=True)
        writing.shutdown(wait=True)
