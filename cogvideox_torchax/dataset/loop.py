"""A loop over clips on one machine: while one is computed, others are read and the last one is written."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cogvideox_torchax.files.whole import OutputError
from cogvideox_torchax.vae.memory import out_of_memory

Job = TypeVar("Job")

READERS = 2
"""Number of clips that are read at a time."""


@dataclass(frozen=True)
class Step:
    """The outcome of a job.

    Attributes:
        job: the job.
        error: why the job failed; None if it succeeded.
        waited: seconds for which the computation waited for the job's input.
        computed: seconds of the computation.
    """

    job: Any
    error: str | None
    waited: float
    computed: float


COMPUTING_ERRORS = (ValueError, ArithmeticError, MemoryError, RuntimeError)
READING_ERRORS = (*COMPUTING_ERRORS, OSError)
"""Errors in computing and in reading a clip that fail this clip alone; any other error ends the loop.

`attempt` raises some of these errors too.
"""


def attempt(
    step: Callable[[Any], Any], argument: Any, errors: tuple[type[Exception], ...]
) -> tuple[Any, str | None]:
    """Call `step(argument)`; return (result, None), or (None, reason) if it raises one of `errors`.

    `errors` are those that the clip may cause. An `OutputError`, and a `RuntimeError` that does not report
    exhausted memory, come from the machine or the program: they are raised even if they are in `errors`.
    """
    try:
        return step(argument), None
    except errors as error:
        is_out_of_memory = out_of_memory(error)
        if isinstance(error, OutputError) or (isinstance(error, RuntimeError) and not is_out_of_memory):
            raise
        message = " ".join(str(error).split())  # on one line; "" for Python's own `MemoryError`
        return None, message or ("out of memory" if is_out_of_memory else type(error).__name__)


def work(
    jobs: Iterable[Job],
    read: Callable[[Job], Any],
    compute: Callable[[Any], Any],
    write: Callable[[Job, Any], None],
    refuse: Callable[[Job, str], None],
    *,
    readers: int = READERS,
) -> Iterator[Step]:
    """Run jobs in order; yield the outcome of each after its computation, and return when all are written.

    Args:
        jobs: anything that names a clip, such as its id.
        read: returns a job's input, in one of `readers` threads; one of `READING_ERRORS` fails the job alone.
        compute: returns the result of an input, in the caller's thread; one of `COMPUTING_ERRORS` fails the
            job alone.
        write: writes a job's result in a thread, while the next job is computed. Any error ends the loop.
        refuse: called in place of `write` with a job that failed and the reason.
        readers: number of jobs that are read at a time.
    """
    with ThreadPoolExecutor(readers + 1) as threads:  # one more for writing
        # Jobs with the futures of their inputs. A generator: a job is submitted when its item is taken.
        submitted = ((job, threads.submit(read, job)) for job in jobs)
        written: Future[None] | None = None  # of the job before
        # One more than `readers`: while a clip that is read waits for its computation, no reader is idle.
        ahead = deque(itertools.islice(submitted, readers + 1))
        while ahead:
            job, future = ahead.popleft()
            waiting_began = time.perf_counter()
            # (input, None), or (None, reason) if reading failed: a future's `result` raises its job's error.
            job_input, reason = attempt(Future.result, future, READING_ERRORS)
            ahead.extend(itertools.islice(submitted, 1))  # begins to read one more job
            computing_began, result = time.perf_counter(), None
            if reason is None:
                result, reason = attempt(compute, job_input, COMPUTING_ERRORS)
            job_input = future = None  # frees a clip's frames, which both have, before the next clip is taken
            ended = time.perf_counter()
            if written:
                written.result()  # raises the error of a write that failed
            kept = (write, job, result) if reason is None else (refuse, job, reason)
            written = threads.submit(*kept)
            yield Step(job, reason, computing_began - waiting_began, ended - computing_began)
        if written:
            written.result()
