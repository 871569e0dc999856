"""Final schedules: of a kernel that the TPU's compiler schedules here, and of text made up."""

import math
from pathlib import Path

import pytest

from benchmarks.plan import chips, hlo, programs, schedule
from tests.processes import printed_by

CHIP = chips.CHIPS["v6e"]

# A grid of 3 behind a loop of 4: the loop's body is 0x2 to 0x8, its branch 0x4 with the slots behind it. What
# 0xb skips runs in the second iteration alone; that bundle writes the register that it reads, as phis do.
TEXT = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s10_s1 = smov 0 }
   0x1   :  { %s20_s2 = smov 0 }
   0x2 LB: > { %s21_s2 = sadd.s32 1, %s22_s2  ;;  %s22_s2 = sphi %s20_s2, %s21_s2 } /* Start region 5 */
   0x3   : > { %p23_p0 = scmp.ge.s32.totalorder %s21_s2, 4 /* loop exit test */ }
   0x4   : > { %24 = sbr.rel (!%p23_p0) target = $region5 }
   0x5   : > {}
   0x6   : > {}
   0x7   : > {}
   0x8   : > {} /* End region 5 */
   0x9 LB: > { %s11_s1 = sadd.s32 1, %s12_s1  ;;  %s12_s1 = sphi %s10_s1, %s11_s1 } /* Start region 7 */
   0xa   : > { %p30_p1 = scmp.ne.s32.totalorder %s11_s1, GUARD }
   0xb   : > { %31 = sbr.rel (%p30_p1) target = $region8 }
   0xc   : > {}
   0xd   : > {}
   0xe   : > {}
   0xf   : > {}
  0x10   : > { %v40_v0 = vld [vmem:[%s0] sm:$0xff] /* over
two lines */ }
  0x11 PF: > { %p13_p2 = scmp.ge.s32.totalorder %s11_s1, BOUND } /* Start/End empty region 8 */
  0x12   : > { %14 = sbr.rel (!%p13_p2) target = $region7 }
  0x13   : > {}
  0x14   : > {}
  0x15   : > {}
  0x16   : > {} /* End region 7 */
  0x17   :  { %50 = vsyncpa [#allocation3], 1 }
"""


def text(*, guard="2", bound="3"):
    return TEXT.replace("GUARD", guard).replace("BOUND", bound)


# Of the loop, of 7 bundles; of the grid's, as long; of what is skipped, of one bundle; and of a copy.
PATHS = """
New basic block in region: region94 {members=9 hlo=made.1 parent=1}
  Length to end: 10, %s21 = sadd.s32 1, %s22
  Length to end: 8, %s999 = smov %s21 /* copy, of a name that is not kept */
  Length to end: 7, %p23 = scmp.ge.s32.totalorder %s21, 4

New basic block in region: region7 {members=9 hlo=made.1 parent=1}
  Length to end: 6, %s11 = sadd.s32 1, %s12

New basic block in region: region8 {members=1 hlo=made.1 parent=7}
  Length to end: 6, %v40 = vld [vmem:[%s0] sm:$0xff]

New basic block in region: region9 {members=1 hlo=made.1 parent=7}
  Length to end: 1000, %s999 = smov 0 /* copy */
"""


def made(instruction):
    """Return the schedule with the result of an instruction as the guard's number."""
    return text(guard="%s98_s8").replace("0x5   : > {}", f"0x5   : > {{ %s98_s8 = {instruction} }}")


@pytest.mark.parametrize(
    ("bundles", "skipped", "assumed"),
    [
        # 3 without the loops, 4 trips of 7, 3 of the 13 that run always, and what the guard skips.
        pytest.param(text(), 1, 0, id="of the second iteration, counted once"),
        pytest.param(text(guard="%s99_s9"), 3, 1, id="that hangs on data, counted as open and told"),
        pytest.param(made("smul.f32 0.5, 3.0"), 3, 1, id="that hangs on floats, counted as open and told"),
        pytest.param(
            made("smov [#allocation9]"), 3, 1, id="that hangs on an address, counted as open and told"
        ),
        pytest.param(
            text().replace("scmp.ne.s32.totalorder %s11_s1, 2", "scmp.eq.f32.partialorder %s98_s8, 0.0"),
            *(0, 1),
            id="of numbers that are not right, left out and told",
        ),
    ],
)
def test_bundles_count_as_often_as_they_run(bundles, skipped, assumed):
    found = schedule.read_schedule(bundles, "", 4)
    assert (found.cycles, found.assumed) == (3 + 4 * 7 + 3 * 13 + skipped, assumed)
    # A block waits as often as it runs, for what its path is longer.
    waiting = schedule.read_schedule(bundles, PATHS, 4)
    assert waiting.cycles - found.cycles == 4 * (10 - 7) + skipped * (6 - 1)


def test_products_count_as_often_as_they_run_and_take_at_least_the_units_peak():
    products = "{ %70 = vmatmul.mubr.bf16.gmra.mxu0 %v1  ;;  %71 = vmatmul.msk.bf16.vlgmr.mxu1 %v2 }"
    found = schedule.read_schedule(text().replace("0xe   : > {}", f"0xe   : > {products}"), "", 4)
    assert found.flops == 3 * 2 * 16 * (256**2 + 128**2)
    schedules = {
        "made.1": schedule.Schedule(10, 10**12, 0),
        "made.2.refs_3_of_12": schedule.Schedule(10, 0, 0),
    }
    times = programs.kernel_times(list(hlo.instructions(HLO)), CHIP, schedules)["made"]
    assert times["schedule_seconds"] == pytest.approx(10**12 / CHIP.flops + 10 / CHIP.clock)


@pytest.mark.parametrize(
    ("kind", "taken", "trips"),
    [
        ("kRem", "%s64_s6 = spop.drf %99", 4 + 1),
        ("kDivAndRem", "%s64_s6 = spop.drf %99  ;;  %s66_s8 = spop.drf %99", 4 + 3),
        ("kDivAndRem", "%s66_s8 = spop.drf %99  ;;  %s64_s6 = spop.drf %99", 4 + 1),
    ],
)
def test_a_product_and_a_division_of_words_are_followed(kind, taken, trips):
    # 3 = the upper word of 2^31 times 7; 10 divided by that is 3, and 1 remains.
    divided = (
        text(bound="%s65_s7")
        .replace("smov 0 }", "smov 0  ;;  %s61_s5 = smulhi.u32 2147483648, 7 }", 1)
        .replace("0xd   : > {}", f"0xd   : > {{ %99 = sdivrem.u32 10, %s61_s5 /* {kind} */ }}")
        .replace("0xe   : > {}", f"0xe   : > {{ {taken} }}")
        .replace("0xf   : > {}", "0xf   : > { %s65_s7 = sadd.s32 4, %s64_s6 }")
    )
    assert schedule.read_schedule(divided, "", 4).cycles == 3 + 4 * 7 + trips * 13 + 1


@pytest.mark.parametrize(("guard", "trips"), [("%p60_p4", 5), ("!%p60_p4", 3)])
def test_stores_and_loads_with_a_guard_have_effect_only_where_the_guard_says_so(guard, trips):
    stored = (
        text(bound="%s65_s7")
        .replace("smov 0 }", "smov 0  ;;  %p60_p4 = scmp.eq.s32.totalorder 1, 1  ;;  %s61_s5 = smov 3 }", 1)
        .replace("%s20_s2 = smov 0 }", "%s20_s2 = smov 0  ;;  %62 = sst [smem:[#allocation9]] %s61_s5 }")
        .replace("0x5   : > {}", f"0x5   : > {{ %63 = sst [smem:[#allocation9]] ({guard}), %s64_s6 }}")
        .replace("0x3   : > {", "0x3   : > { %s64_s6 = smov 5  ;; ")
        .replace("0xd   : > {}", "0xd   : > { %s65_s7 = sld [smem:[#allocation9]] }")
    )
    for load in ("]] }", "]] (%p60_p4) }"):
        assert schedule.read_schedule(stored.replace("]] }", load), "", 4) == schedule.Schedule(
            3 + 4 * 7 + trips * 13 + 1, 0, 0
        )
    with pytest.raises(schedule.UnknownDumpError, match="hangs on data"):  # nothing else writes the register
        schedule.read_schedule(stored.replace("]] }", "]] (!%p60_p4) }"), "", 4)


@pytest.mark.parametrize(
    ("opcode", "values", "want"),
    [
        ("por", (1, None), 1),
        ("por", (0, None), None),
        ("por", (0, 0), 0),
        ("pand", (0, None), 0),
        ("pand", (1, None), None),
        ("pand", (1, 1), 1),
        ("pnand", (0, None), 1),
        ("pnand", (1, 1), 0),
        ("pneg", (None,), None),
    ],
)
def test_a_predicate_is_known_where_what_is_unknown_cannot_change_it(opcode, values, want):
    assert schedule._OPERATIONS[opcode](*values) == want


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("", "no bundles"),
        ("another format altogether", "no bundles"),
        (text(bound="%s99_s9"), "hangs on data"),
        (text().replace("Start region 7", ""), "region 7"),
        (text().replace("sbr.rel (!%p13_p2)", "sbr.abs (!%p13_p2)"), "another form"),
        (text(bound="100000000"), "steps"),
    ],
    ids=["empty", "format", "data", "region", "branch", "long"],
)
def test_a_schedule_that_cannot_be_followed_is_refused(monkeypatch, broken, words):
    monkeypatch.setattr(schedule, "LONGEST", 10_000)
    with pytest.raises(schedule.UnknownDumpError, match=words):
        schedule.read_schedule(broken, "", 4)


HLO = """
ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %made.1 = bf16[1024,1024]{1,0} custom-call(%x), KERNEL
  ROOT %made.2.refs_3_of_12 = bf16[1024,1024]{1,0} custom-call(%made.1), KERNEL
}
""".replace(
    "KERNEL",
    'custom_call_target="tpu_custom_call"',
)


def test_kernels_that_are_alike_share_a_schedule_and_count_by_the_larger(tmp_path):
    for name, dump in {
        "18-made.1-01-final_bundles": text(),
        "17-made.1-01-final_bundles": text(bound="5"),  # given up by the compiler
        "18-made.1-00-critical-path": "",
        "17-TLP-00-deduplication-map": "key:made.1\nordinal:2\n"
        "equivalent_hlos[size=2]:\n  made.1\n  made.2.refs_3_of_12\n",
    }.items():
        (tmp_path / f"{name}.txt").write_text(dump)
    schedules = schedule.read_schedules(tmp_path, ["made.1", "made.2.refs_3_of_12", "made.3"], 4)
    assert set(schedules) == {"made.1", "made.2.refs_3_of_12"}
    longer = {name: schedule.Schedule(10**6, 0, 0) for name in schedules}
    moved = 2 * 2 * 1024 * 1024 * 2 / (0.87 * CHIP.bandwidth)
    for given, cycles in ((schedules, 2 * 71), (longer, 2e6)):
        found = programs.kernel_times(list(hlo.instructions(HLO)), CHIP, given)["made"]
        times = {"bytes_seconds": moved, "schedule_seconds": cycles / CHIP.clock, "unknown": 0}
        wanted = times | {"seconds": max(times.values())}
        assert {name: found[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("path", [None, ""], ids=["without its path", "of another format"])
def test_a_kernel_with_an_unknown_schedule_makes_the_time_unknown_and_never_its_bytes(tmp_path, path):
    (tmp_path / "17-made.1-01-final_bundles.txt").write_text(text() if path is None else "another format")
    if path is not None:
        (tmp_path / "17-made.1-00-critical-path.txt").write_text(path)
    assert schedule.read_schedules(tmp_path, ["made.1", "made.2.refs_3_of_12"], 4) == {}
    found = list(hlo.instructions(HLO))
    times = programs.kernel_times(found, CHIP, {})["made"]
    assert (times["unknown"], times["bytes_seconds"] > 0, math.isnan(times["seconds"])) == (2, True, True)
    assert math.isnan(sum(seconds for _, seconds in programs.instruction_times(found, CHIP, {}).values()))


KERNEL = """
import functools
import jax, jax.numpy as jnp, numpy as np, os, sys
from jax.experimental import pallas as pl
from benchmarks.plan import chips, schedule

def body(x, w, o, *, trips):
    def step(i, sums):
        return jnp.dot(sums.astype(jnp.bfloat16), w[...], preferred_element_type=jnp.float32)
    o[...] = jax.lax.fori_loop(0, trips, step, x[...].astype(jnp.float32)).astype(o.dtype)

def run(x, w):
    block = pl.BlockSpec((128, 256), lambda i: (i, 0))
    return pl.pallas_call(functools.partial(body, trips=TRIPS), grid=(GRID,),
                          in_specs=[block, pl.BlockSpec((256, 256), lambda i: (0, 0))],
                          out_specs=block, out_shape=x, name="looped")(x, w)

topology = sys.argv[1]
device = chips.topology_devices(topology, schedules=True)[0]
placed = jax.sharding.SingleDeviceSharding(device)
for GRID, TRIPS in ((4, 5), (8, 5), (4, 10)):
    shapes = ((128 * GRID, 256), (256, 256))
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed) for shape in shapes]
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("d",))):
        lowered = jax.jit(lambda x, w: run(x, w)).lower(*structs)
    _, found = schedule.compile_with_schedules(lowered, chips.chip_of(topology).delay_slots)
    (one,) = found.values()
    print(one.cycles)
assert not list(chips.dump_directory().iterdir())
assert chips.FLAGS not in os.environ  # a child of this process dumps elsewhere
print(chips.dump_directory())
"""


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "tpu7x:2x2x1"])
@pytest.mark.slow_cases(but=["v6e*"])
def test_a_kernels_loops_count_as_often_as_they_run(topology):
    # In a process of its own: libtpu takes its flags once, when it is loaded.
    *lines, directory = printed_by(KERNEL, topology).splitlines()
    few, grid, loop = map(int, lines)
    assert grid == pytest.approx(2 * few, rel=0.1)
    body, rest = divmod(loop - few, 4 * 5)  # five more trips in each of the grid's four
    assert rest == 0
    # A trip waits for its one product, which on a tpu7x takes longer than its bundles: 305 cycles.
    assert 50 < body < (400 if topology.startswith("tpu7x") else 300)
    assert body * 4 * 5 < few < 2 * body * 4 * 5  # the rest is what surrounds the loop
    assert not Path(directory).exists()
