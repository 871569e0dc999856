"""Times of collectives on the links: by hand for small slices, and off made-up text."""

import itertools

import pytest

from benchmarks.estimate.chips import CHIPS
from benchmarks.estimate.hlo import instructions, times_run
from benchmarks.estimate.links import Links

GB = 1e9


def slice_of(generation, *lengths, cores=1):
    """Devices in the order of libtpu: the first axis fastest, a chip's cores together."""
    places = [
        (*reversed(place), *[0] * (3 - len(lengths)), core)
        for place in itertools.product(*map(range, reversed(lengths)))
        for core in range(cores)
    ]
    return Links(tuple(places), CHIPS[generation])


EIGHT = slice_of("v6e", 2, 4)
HALVES, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)


@pytest.mark.parametrize(
    ("links", "kind", "groups", "want"),
    [
        (EIGHT, "all-gather", HALVES, 3 / 4 / 2),  # a closed ring: both ways
        (EIGHT, "all-reduce", HALVES, 2 * 3 / 4 / 2),
        (EIGHT, "all-gather", ALL, 7 / 8 / 2),
        (EIGHT, "all-gather", COLUMNS, 1 / 2 * 2),  # two apart, and each link in two groups' way
        (EIGHT, "all-gather", ((0, 1), (2, 3), (4, 5), (6, 7)), 1 / 2),
        (EIGHT, "reduce-scatter", HALVES, 4 * 3 / 4 / 2),  # of its result, a quarter
        (EIGHT, "all-to-all", HALVES, 4 / 8),
        (EIGHT, "all-to-all", ALL, 1.0),
        (slice_of("v6e", 1, 8), "all-gather", ALL, 7 / 8),  # a line: what comes to its end takes one link
        (slice_of("v6e", 1, 16), "all-gather", (tuple(range(16)),), 15 / 16 / 2),  # closed
        (slice_of("v5p", 4, 4, 4), "all-gather", (tuple(range(4)),), 3 / 4 / 2),  # closed as well
        (slice_of("v5p", 2, 2, 4), "all-gather", ((0, 4, 8, 12),), 3 / 4),  # not
        (slice_of("tpu7x", 2, 2, 1, cores=2), "all-gather", ((0, 1),), 1 / 2 / 6),  # two cores of a chip
    ],
)
def test_a_gigabyte_takes_what_arithmetic_says(links, kind, groups, want):
    assert links.collective_seconds(kind, 100 * GB, groups) == pytest.approx(want)


HLO = """
%all-reduce-scatter.1 (a: f32[1000]) -> f32[250] {
  %r = f32[1000]{0} all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%body (s: f32[1000]) -> f32[1000] {
  ROOT %b = f32[1000]{0} all-reduce(%s), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %w = f32[1000]{0} while(%x), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %f = f32[250]{0} fusion(%w), kind=kCustom, calls=%all-reduce-scatter.1
  %g = f32[1000]{0} all-gather(%f), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %p = f32[1000]{0} collective-permute(%g), source_target_pairs={{0,1},{1,0},{2,4}}
  %o = f32[1000]{0} all-gather(%f), replica_groups=[2,4]<=[2,4], dimensions={0}
  %t = (f32[500]{0}, f32[500]{0}) all-to-all(%g, %g), replica_groups={}
  %u = f32[1000]{0} while(%t), condition=%test, body=%other
}
"""


def test_groups_and_trips_are_read_off_the_text():
    found = {one.name: one for one in instructions(HLO)}
    assert found["r"].groups == found["b"].groups == HALVES
    assert [found[name].groups for name in "gopt"] == [COLUMNS, HALVES, ((0, 1), (1, 0), (2, 4)), ()]
    assert (found["w"].trips, found["u"].trips, found["g"].trips) == (5, None, 1)
    times = times_run(list(found.values()))
    assert times == times | {"main": 1, "body": 5, "all-reduce-scatter.1": 1}


def test_a_programs_collectives_add_up_by_kind():
    size = 4000
    assert EIGHT.seconds(list(instructions(HLO)), lambda _: 0.0) == pytest.approx(
        {
            "all-reduce": 5 * EIGHT.collective_seconds("all-reduce", size, HALVES),
            "reduce-scatter": EIGHT.collective_seconds("reduce-scatter", size / 4, HALVES),
            "all-gather": sum(EIGHT.collective_seconds("all-gather", size, g) for g in (COLUMNS, HALVES)),
            "collective-permute": size / (100 * GB),
            "all-to-all": EIGHT.collective_seconds("all-to-all", size, ALL),
        }
    )


def test_a_program_waits_for_what_its_schedule_does_not_hide():
    text = """
ENTRY %main (x: bf16[1000]) -> bf16[1000] {
  %one = (bf16[1000]{0}, bf16[1000]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %two = (bf16[4000]{0}, bf16[4000]{0}) all-to-all-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %work = bf16[1000]{0} fusion(%x), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"30"}
  %y = bf16[1000]{0} collective-permute-done((bf16[1000]{0}, bf16[1000]{0}) %one)
  %z = bf16[4000]{0} all-to-all-done(%two)
  %last = bf16[1000]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
}
"""
    one, two = 2000 / (100 * GB), EIGHT.collective_seconds("all-to-all", 8000, HALVES)

    def waiting(busy):
        found = EIGHT.seconds(list(instructions(text)), lambda one: busy if one.cycles == 30 else 0.0)
        return found["collective-permute"], found["all-to-all"]

    assert waiting(0.0) == pytest.approx((one + one, two))  # one after the other on the links
    assert waiting(one / 2) == pytest.approx((one / 2 + one, two))
    assert waiting(one + two / 4) == pytest.approx((one, two * 3 / 4))
    assert waiting(9.0) == pytest.approx((one, 0.0))  # the last one is synchronous


def test_a_reduce_scatter_in_two_halves_is_as_large_as_the_part_that_a_device_keeps():
    text = """
ENTRY %main (x: f32[1000]) -> f32[250] {
  %s = ((f32[1000]{0}), f32[250]{0}, u32[]) reduce-scatter-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %d = f32[250]{0} reduce-scatter-done(%s)
}
"""
    start, _done = found = list(instructions(text))
    assert start.bytes == 1000
    want = EIGHT.collective_seconds("reduce-scatter", 1000, HALVES)
    assert EIGHT.seconds(found, lambda _: 0.0) == pytest.approx({"reduce-scatter": want})
