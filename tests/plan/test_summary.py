"""The summary of a whole video's plan."""

from types import SimpleNamespace

from cogvideox_torchax.plan import summary
from cogvideox_torchax.plan.chips import CHIPS
from cogvideox_torchax.plan.jobs import Job
from cogvideox_torchax.vae.directions import DECODE


def test_a_video_takes_its_first_chunk_once_and_a_later_one_for_each_other_chunk_in_every_tile():
    times = ((3.0, 5), (1.0, 7))
    first, later = (
        SimpleNamespace(seconds=time, seconds_with_collectives=10 * time, peak_bytes=size)
        for time, size in times
    )
    found = summary.whole_video(Job(DECODE, 49, 480, 720), 6, 2, [first, later], CHIPS["v6e"])
    assert (found["whole_video_s"], found["with_collectives_s"]) == (16.0, 160.0)
    assert (found["peak_memory_GiB"], found["fits"]) == (7 / summary.GIB, True)
    assert "fits" not in summary.whole_video(Job(DECODE, 49, 480, 720), 6, 2, [first, later], None)
