"""One machine's loop over clips: what overlaps, and which errors are a clip's own."""

import threading

import pytest

from cogvideox_torchax.dataset import loop
from cogvideox_torchax.files.whole import OutputError


def test_reading_and_writing_overlap_with_computing():
    kept, third_is_read, second_is_computed = [], threading.Event(), threading.Event()

    def read(job):
        if job == 2:
            third_is_read.set()
        return job

    def compute(job):
        if job == 0:
            assert third_is_read.wait(30)  # while the first is computed
        if job == 1:
            second_is_computed.set()
        return job

    def keep(job, _):
        if job == 0:
            assert second_is_computed.wait(30)  # while the first is written
        kept.append(job)

    steps = list(loop.work(range(5), read, compute, keep, lambda *_: None, readers=2))
    assert [step.job for step in steps] == kept == list(range(5))


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (MemoryError(), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (OverflowError("value too large"), True),
        (ValueError("bad"), True),
        (ValueError(), True),
        (RuntimeError("a broken program"), False),
        (OutputError("not writable"), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("half", ["read", "compute"])
def test_an_error_of_one_clip_is_its_own_and_one_of_the_program_ends_the_loop(error, own, half):
    def fail(job):
        if job == 1:
            raise error
        return job

    halves, kept, refused = {"read": lambda job: job, "compute": lambda job: job, half: fail}, [], []
    given = {
        "jobs": range(3),
        **halves,
        "keep": lambda job, _: kept.append(job),
        "refuse": lambda job, reason: refused.append((job, reason)),
    }
    if own:
        words = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
        assert [step.error is None for step in loop.work(**given)] == [True, False, True]
        assert (kept, refused) == ([0, 2], [(1, str(error) or words)])
    elif (half, type(error)) != ("read", OutputError):
        with pytest.raises(type(error)):
            list(loop.work(**given))
