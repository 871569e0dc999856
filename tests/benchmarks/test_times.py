"""Estimated times off made-up text, of links between chips, and beside what others have published."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command, calibration, pages
from benchmarks.plan import chips, hlo, links, programs

HLO = """
%fused.1 (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c = bf16[8,8]{1,0} convolution(%a, %a)
}

%fused.3 (b: bf16[64,128], c: bf16[8,128]) -> bf16[64,128] {
  %c = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(1)
  %b = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %updated = bf16[64,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%b, %c, %zero, %zero)
}

%fused.4 (d: bf16[64,128]) -> (bf16[8,128], bf16[64,128]) {
  %d = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %part = bf16[16,128]{1,0:T(8,128)(2,1)} slice(%d), slice={[0:16], [0:128]}
  %half = bf16[8,128]{1,0:T(8,128)(2,1)} convert(%part)
  %again = bf16[64,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%d, %part, %zero, %zero)
  ROOT %both = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)}) tuple(%half, %again)
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(0)
  %v = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %w = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(2)
  %f = bf16[8,8]{1,0:T(8,128)(2,1)} fusion(%x), kind=kOutput, calls=%fused.1, C={"estimated_cycles":"100"}
  %y = bf16[8,9]{0,1:T(8,128)(2,1)} copy(%f), C={"estimated_cycles":"9223372036854775807"}
  %z = bf16[8,8]{0,1:T(8,128)(2,1)S(1)} fusion(%v, %x), kind=kLoop, calls=%none, C={"estimated_cycles":"3"}
  %s = bf16[8,128]{1,0:T(8,128)(2,1)} slice(%w), slice={[0:8], [0:128]}, C={"estimated_cycles":"3"}
  %u = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%w, %s), calls=%fused.3, C={"estimated_cycles":"3"}
  %t = (bf16[8,128], bf16[64,128]) fusion(%u), calls=%fused.4, C={"estimated_cycles":"3"}
  %free = bf16[8,8]{1,0:T(8,128)(2,1)} bitcast(%x)
}
"""


def test_products_count_by_the_compilers_cycles_and_what_only_moves_by_bytes():
    # Seconds in which 8 x 128 numbers in bfloat16 move, to which arrays are padded.
    tile = 8 * 128 * 2 / (0.87 * chips.CHIPS["v6e"].bandwidth)
    times = programs.instruction_times(list(hlo.instructions(HLO)), chips.CHIPS["v6e"], {})
    assert times.pop("f") == (programs.PRODUCTS, 100 / chips.CHIPS["v6e"].clock)
    assert {name: seconds / tile for name, (_kind, seconds) in times.items()} == pytest.approx(
        {
            "y": 1 + 2,  # its minor axis is the first
            "z": 1,  # nothing of what is in VMEM
            "s": 2,
            "u": 2,  # of the array that it updates in place, the update alone
            "t": 2 + 1 + 2,  # two results: the part that it reads, and the update
        }
    )
    assert {kind for kind, _ in times.values()} == {programs.MOVES}


def test_published_times_give_the_intervals_of_estimates(monkeypatch):
    ratios = {programs.SCHEDULED: 1.2, programs.PRODUCTS: 0.9, calibration.SHORT: 9.0}
    rows = {kind: {"seconds": 2 * one, "estimate": 2.0, "bound": kind} for kind, one in ratios.items()}
    assert pages.kept("calibration")["rows"].keys() == calibration.CASES.keys(), (
        "python -m benchmarks calibrate"
    )
    monkeypatch.setattr(calibration, "kept", {"calibration": {"rows": rows}}.get)
    shares = {programs.SCHEDULED: 2.0, programs.PRODUCTS: 1.0, programs.MOVES: 1.0, programs.STREAMED: 1.0}
    found = calibration.interval({"shares": shares, "collective_seconds": {"all-to-all": 1.0}})
    assert found == pytest.approx((2.0 + 0.9 + 2 * 0.87 + 1.0, 2.4 + 1.0 + 2 * 1.15 + 1.0))


def test_calibrate_refuses_a_checkout_without_maxdiffusion_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibration, "estimated", None)
    assert command.main(["calibrate", "--maxdiffusion", str(tmp_path)]) == 2
    assert "has no src/maxdiffusion: give a checkout" in capsys.readouterr().err


def test_a_device_runs_the_published_programs_of_its_generation(monkeypatch):
    known = {kind: calibration.cases_of(kind) for kind in ("cpu", "TPU v6 lite")}
    assert known == {"cpu": [], "TPU v6 lite": ["v6e: attention, 75,600 tokens of 5 heads"]}
    monkeypatch.setitem(
        calibration.CASES, "v6e: small", (jnp.matmul, [(8, 8)] * 2, 1.0, programs.PRODUCTS, "")
    )
    assert calibration.measured("v6e: small")["runs"] == 11


@pytest.mark.parametrize(
    ("kind", "coordinates", "topology"),
    [
        ("TPU v6 lite", [[3, 1, 0]], "v6e:1x1"),
        ("TPU v6 lite", [[x, y, 0] for y in range(4) for x in range(2)], "v6e:2x4"),
        ("TPU v5", [[x, y, 0] for y in range(2) for x in range(2)], "v5p:2x2x1"),
    ],
)
def test_the_topology_of_real_devices_is_read_off_their_coordinates(kind, coordinates, topology):
    assert chips.topology_of(kind, coordinates) == topology


GB = 1e9
MESSAGE = 5e-6


def permute_seconds(size):
    return MESSAGE + size / (87 * GB)


def slice_of(generation, *lengths, cores=1):
    """Devices in the order of libtpu: the first axis fastest, a chip's cores together."""
    places = [
        (*reversed(place), *[0] * (3 - len(lengths)), core)
        for place in itertools.product(*map(range, reversed(lengths)))
        for core in range(cores)
    ]
    return links.Links(tuple(places), chips.CHIPS[generation])


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
def test_a_gigabyte_takes_what_arithmetic_says_and_each_message_a_time_of_its_own(links, kind, groups, want):
    rounds = {"all-to-all": 1, "all-reduce": 2 * (len(groups[0]) - 1)}.get(kind, len(groups[0]) - 1)
    messages = links.collective_seconds(kind, 0, groups)
    seconds = links.collective_seconds(kind, 87 * GB, groups) - messages
    assert (messages, seconds) == pytest.approx((rounds * MESSAGE, want))


COLLECTIVES = """
%all-reduce-scatter.1 (a: f32[1000]) -> f32[250] {
  %r = f32[1000]{0} all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%then (s: f32[1000]) -> f32[1000] {
  ROOT %n = f32[1000]{0} negate(%s)
}

%branch (s: f32[1000]) -> f32[1000] {
  ROOT %e = f32[1000]{0} negate(%s)
}

%body (s: f32[1000]) -> f32[1000] {
  %c = f32[1000]{0} conditional(%at, %s, %s), true_computation=%then, false_computation=%other
  %d = f32[1000]{0} conditional(%of, %s, %s), branch_computations={%other, %branch}
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
    found = {one.name: one for one in hlo.instructions(COLLECTIVES)}
    groups = [HALVES, HALVES, COLUMNS, HALVES, ((0, 1), (1, 0), (2, 4)), ()]
    assert [found[name].groups for name in "rbgopt"] == groups
    assert (found["w"].trips, found["u"].trips, found["g"].trips) == (5, None, 1)
    times = hlo.times_run(list(found.values()))
    assert times == times | {"main": 1, "body": 5, "then": 5, "branch": 5, "all-reduce-scatter.1": 1}


def test_a_scan_counts_as_often_as_its_condition_says_and_another_loop_leaves_no_estimate():
    """The compiler's text has no trip count of a scan, which would count once."""

    def scan(x, ws):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    def search(x, limit):
        return jax.lax.while_loop(lambda h: h[0, 0] < limit, lambda h: jnp.tanh(h @ h), x)

    def plan(function, *shapes):
        structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        return programs.estimate_function(jax.jit(function), "v6e:1x1", structs, "loop", 1)

    short, long = (plan(scan, (512, 512), (trips, 512, 512)) for trips in (5, 50))
    assert short.open_loops == long.open_loops == 0
    assert long.shares[programs.PRODUCTS] == pytest.approx(10 * short.shares[programs.PRODUCTS], rel=0.05)
    unknown = plan(search, (512, 512), ())
    assert (unknown.open_loops, unknown.as_json()["seconds"]) == (1, None)
    assert programs.program_rows(unknown, chips.CHIPS["v6e"])["estimate ms"].startswith("none: ")


def test_a_programs_collectives_add_up_by_kind():
    size = 4000
    assert EIGHT.seconds(list(hlo.instructions(COLLECTIVES)), lambda _: 0.0) == pytest.approx(
        {
            "all-reduce": 5 * EIGHT.collective_seconds("all-reduce", size, HALVES),
            "reduce-scatter": EIGHT.collective_seconds("reduce-scatter", size / 4, HALVES),
            "all-gather": sum(EIGHT.collective_seconds("all-gather", size, g) for g in (COLUMNS, HALVES)),
            "collective-permute": permute_seconds(size),
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
    one, two = permute_seconds(2000), EIGHT.collective_seconds("all-to-all", 8000, HALVES)

    def waiting(busy):
        found = EIGHT.seconds(list(hlo.instructions(text)), lambda one: busy if one.cycles == 30 else 0.0)
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
    start, _done = found = list(hlo.instructions(text))
    assert start.bytes == 1000
    assert EIGHT.seconds(found, lambda _: 0.0) == pytest.approx(
        {"reduce-scatter": EIGHT.collective_seconds("reduce-scatter", 1000, HALVES)}
    )
