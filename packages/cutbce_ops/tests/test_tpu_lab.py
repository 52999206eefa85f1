"""What the TPU lab reads from the compiler's texts; needs no libtpu.

The snippets keep the form of the compiler's output, shortened.
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cutbce_ops import tpu_lab
from cutbce_ops._src.hardware import HardwareSpec
from cutbce_ops._src.tpu_lab import topology
from cutbce_ops._src.tpu_lab.estimate import make_report, ring_seconds
from cutbce_ops._src.tpu_lab.program import Program, lower

# A grid of 4 steps (6 trips of the pipeline), in it a loop of 8 trips with its branch's delay
# slot printed one level up, and one of 16 trips, from 8 in steps of 4 to 72, under pl.when.
BUNDLES = """\
= control target key end
     0   :  { %s9_s9 = smov 0 }  /* entry bundle: %sweep.3 = custom-call(%a) */
   0x1 LB: > { %s8_s9 = sphi %s9_s9, %s7_s9 /* phi copy :: iteration index, stage = 0 */
 continued } /* Start region 101 :: Start region 25 */
   0x2   : > { %117 = sbr.rel (%p114_p2) target = $region28  ;;  %s5_s4 = smov (!%p114_p2), 0 }
   0x3 LB: >> { %s6_s4 = sadd.s32 1, %s3_s4 ;;  %s3_s4 = sphi %s5_s4, %s6_s4 } /* Start region 79 */
   0x4   : >> { %p153_p4 = scmp.ge.s32.totalorder %s6_s4, 8 /* loop exit test */ }
   0x5   : > { %155 = sbr.rel (!%p153_p4) target = $region79 }
   0x6   : >> { %v1 = vadd %v0 } /* End region 79 */
   0x7   : > { %489 = sbr.rel (%p599_p5) target = $region39  ;;  %s2_s5 = smov (!%p599_p5), 8 }
   0x8 LB: >> { %s1_s5 = sadd.s32 4, %s0_s5 ;;  %s0_s5 = sphi %s2_s5, %s1_s5 } /* Start region 90 */
   0x9   : >> { %p492_p6 = scmp.ge.s32.totalorder %s1_s5, 72 /* loop exit test */ }
   0xa   : >> { %494 = sbr.rel (!%p492_p6) target = $region90 }
   0xb PF: > { %s7_s9 = sadd.s32 1, %s8_s9 } /* Start/End empty region 39 :: Start region 28 */
   0xc   : > { %p9_p7 = scmp.ge.s32.totalorder %s7_s9, 6 /* loop exit test */ }
   0xd   :  { %11 = sbr.rel (!%p9_p7) target = $region101 }
   0xe   :  {}
   0xf   :  { %v9 = vst %v1 }
"""
UTILIZATION = """\
== CAPACTIY:
MXU, VALU, VLOAD:FILL
    2     4     3
== UTILIZATION:
""" + "\n".join(["0 0 0"] * 3 + ["2 4 0", "1 4 0", "1 2 0", "2 2 3"] + ["0 1 0"] * 9)

HLO = """\
HloModule jit_f, is_scheduled=true

%fused (param_0.1: f32[7,8,128], param_1: s32[]) -> f32[8,128] {
  %param_0.1 = f32[7,8,128]{2,1,0:T(8,128)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  ROOT %dynamic-slice.1 = f32[8,128]{1,0:T(8,128)} dynamic-slice(%param_0.1, %param_1)
}

%body (arg: (s32[], f32[7,8,128])) -> (s32[], f32[7,8,128]) {
  %arg = (s32[]{:T(128)}, f32[7,8,128]{2,1,0:T(8,128)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %step = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %copy.1 = s32[]{:T(128)S(6)} copy(%step)
  %next = s32[]{:T(128)} add(%copy.1, %one)
  %table = f32[7,8,128]{2,1,0:T(8,128)} get-tuple-element(%arg), index=1
  %slice_fusion = f32[8,128]{1,0:T(8,128)S(1)} fusion(%table, %step), kind=kLoop, calls=%fused, \
metadata={op_name="jit(f)/while/body/slice"}, backend_config={"estimated_cycles":"350"}
  %sweep.3 = f32[8,128]{1,0:T(8,128)} custom-call(%slice_fusion), \
custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"QQ=="}}
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[7,8,128]{2,1,0:T(8,128)}) tuple(%next, %table)
}

%condition (arg.1: (s32[], f32[7,8,128])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, f32[7,8,128]{2,1,0:T(8,128)}) parameter(0)
  %bound = s32[]{:T(128)} constant(7)
  %step.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%step.1, %bound), direction=LT
}

ENTRY %main (p: f32[7,8,128]) -> f32[] {
  %p = f32[7,8,128]{2,1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %tuple.2 = (s32[]{:T(128)}, f32[7,8,128]{2,1,0:T(8,128)}) tuple(%zero, %p)
  %while = (s32[]{:T(128)}, f32[7,8,128]{2,1,0:T(8,128)}) while(%tuple.2), \
condition=%condition, body=%body
  %ragged = f32[8,128]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%other, \
backend_config={"estimated_cycles":"9223372036854775807"}
  %dot = f32[8,128]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%other, \
backend_config={"estimated_cycles":"1000000000"}
  ROOT %sum = f32[]{:T(128)S(6)} reduce(%p), dimensions={0}, \
backend_config={"estimated_cycles":"90"}
}
"""
ROW_BYTES = 8 * 128 * 4


def loops_of(text: str = BUNDLES, **options):
    return tpu_lab.parse_schedule(text, UTILIZATION, **options).loops


def test_loops_are_apart():
    schedule = tpu_lab.parse_schedule(BUNDLES, UTILIZATION)
    assert (schedule.name, schedule.bundles) == ("sweep.3", 16)
    outside, grid, inner, when = schedule.loops
    assert [loop.depth for loop in schedule.loops] == [0, 1, 2, 2]
    # 0 and 0xf outside; the branch back of a loop and its delay slots belong to the loop.
    assert [loop.bundles for loop in schedule.loops] == [2, 7, 4, 3]
    assert [loop.trips for loop in schedule.loops] == [1, 4, 8, 16]
    assert [loop.iterations for loop in schedule.loops] == [1, 4, 32, 64]
    assert [loop.conditional for loop in schedule.loops] == [False, False, False, True]
    assert [loop.conditional_bundles for loop in schedule.loops] == [0, 0, 0, 0]
    assert (inner.innermost, when.innermost, grid.innermost) == (True, True, False)
    assert schedule.inner_loops == (inner, when)
    assert outside.utilization["MXU"] == 0


def test_utilization_is_a_share_of_capacity():
    inner = loops_of()[2]
    assert inner.utilization == {
        "MXU": (2 + 1 + 1 + 2) / (4 * 2),
        "VALU": (4 + 4 + 2 + 2) / (4 * 4),
        "VLOAD:FILL": 3 / (4 * 3),
    }


def test_cycles_multiply_loops_out():
    schedule = tpu_lab.parse_schedule(BUNDLES, UTILIZATION)
    assert schedule.cycles() == 2 + 7 * 4 + 4 * 32 + 3 * 64
    assert schedule.cycles(conditional=False) == 2 + 7 * 4 + 4 * 32


def test_unknown_trips_are_not_invented():
    text = BUNDLES.replace("%s6_s4, 8 /*", "%s77_s7, %s6_s4 /*")
    schedule = tpu_lab.parse_schedule(text, UTILIZATION)
    assert schedule.loops[2].trips is None
    assert schedule.cycles() is None
    given = tpu_lab.parse_schedule(text, UTILIZATION, {2: 100, 3: 16})
    assert given.cycles() == 2 + 7 * 4 + 4 * 100 + 3 * 16


def test_stated_iterations_are_no_upper_bound():
    schedule = tpu_lab.parse_schedule(BUNDLES, UTILIZATION, {3: 16})
    assert not schedule.loops[3].conditional
    assert schedule.cycles() == schedule.cycles(conditional=False) == 2 + 7 * 4 + 4 * 32 + 3 * 16


def test_skippable_code_between_loops():
    text = BUNDLES.replace("target = $region39", "target = $region40")
    text = text.replace("0xd   :  {", "0xd   :  { /* Start region 40 */")
    grid = loops_of(text)[1]
    assert grid.conditional_bundles == 2  # 0xb and 0xc


def test_start_of_a_counter_must_be_constant():
    text = BUNDLES.replace("%s5_s4 = smov (!%p114_p2), 0", "%s5_s4 = sld [smem:3]")
    assert loops_of(text)[2].trips is None


def test_scan_is_multiplied_out():
    summary = tpu_lab.summarize(HLO)
    by_name = {item.name: item for item in summary.operations}
    assert (by_name["slice_fusion"].count, by_name["slice_fusion"].cycles) == (7, 350)
    assert (by_name["sum"].count, by_name["sum"].cycles) == (1, 90)
    (kernel,) = summary.kernels
    assert (kernel.name, kernel.instruction, kernel.count) == ("sweep", "sweep.3", 7)


def test_compilers_own_trip_count_comes_first():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    (kernel,) = tpu_lab.summarize(HLO.replace("body=%body", known)).kernels
    assert kernel.count == 12


@pytest.mark.parametrize(
    "change",
    [("direction=LT", "direction=NE"), ("constant(7)", "parameter(1)"), ("add(", "multiply(")],
    ids=["direction", "bound", "step"],
)
def test_unknown_loop_counts_once_and_says_so(change: tuple[str, str]):
    summary = tpu_lab.summarize(HLO.replace(*change))
    assert summary.kernels[0].count == 1
    assert any("unknown number of times" in note for note in summary.notes)


def test_sentinels_are_no_estimates():
    summary = tpu_lab.summarize(HLO)
    cycles = {item.name: item.cycles for item in summary.operations}
    assert cycles["ragged"] is None
    assert cycles["dot"] is None
    (note,) = [note for note in report().notes if "without an estimate" in note]
    assert "dot, ragged" in note


def test_hbm_bytes_count_slices_as_slices():
    by_name = {item.name: item for item in tpu_lab.summarize(HLO).operations}
    # One row of the table and the index from HBM; the result stays in VMEM.
    assert by_name["slice_fusion"].hbm_bytes == ROW_BYTES + 4
    assert by_name["ragged"].hbm_bytes == 7 * ROW_BYTES + ROW_BYTES


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("%g = f32[2,128]{1,0} gather(%p, %i), offset_dims={1}", 2 * 2 * 512 + 8),
        ("%g = f32[64,128]{1,0} scatter(%p, %i, %u), to_apply=%add", 3 * 2 * 512 + 8),
        ("%g = f32[64,128]{1,0} dynamic-update-slice(%p, %u, %j)", 2 * 2 * 512 + 4),
        ("%g = f32[2,128]{1,0:S(1)} slice-done(%s)", 2 * 512),
        ("%g = (f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%p)", 64 * 512),
        ("%g = f32[64,128]{1,0} copy(%p)", 2 * 64 * 512),
        ("%g = f32[64,128]{1,0:S(1)} copy(%p)", 64 * 512),
    ],
    ids=["gather", "scatter", "update", "slice", "fetch", "copy", "to VMEM"],
)
def test_hbm_bytes_of(line: str, num_bytes: int):
    text = f"""
ENTRY %main (p: f32[64,128]) -> f32[64,128] {{
  %p = f32[64,128]{{1,0}} parameter(0)
  %i = s32[2]{{0}} parameter(1)
  %u = f32[2,128]{{1,0}} parameter(2)
  %j = s32[]{{:T(128)}} parameter(3)
  ROOT {line}
}}
"""
    (found,) = tpu_lab.summarize(text).operations
    assert found.hbm_bytes == num_bytes


def test_bytes_of_a_scatter_inside_fusions():
    text = """
%inner (a: f32[64,128], b: s32[2], c: f32[2,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %b = s32[2]{0} parameter(1)
  %c = f32[2,128]{1,0} parameter(2)
  ROOT %s = f32[64,128]{1,0} scatter(%a, %b, %c), to_apply=%add
}

%outer (d: f32[64,128], e: s32[2], f: f32[2,128]) -> f32[64,128] {
  %d = f32[64,128]{1,0} parameter(0)
  %e = s32[2]{0} parameter(1)
  %f = f32[2,128]{1,0} parameter(2)
  ROOT %i = f32[64,128]{1,0} fusion(%d, %e, %f), kind=kCustom, calls=%inner
}

ENTRY %main (p: f32[64,128], i: s32[2], u: f32[2,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  %u = f32[2,128]{1,0} parameter(2)
  ROOT %o = f32[64,128]{1,0} fusion(%p, %i, %u), kind=kCustom, calls=%outer
}
"""
    (found,) = tpu_lab.summarize(text).operations
    assert found.hbm_bytes == 3 * 2 * 512 + 8


def test_kernel_bytes_come_from_its_cost_estimate():
    (plain,) = tpu_lab.summarize(HLO).kernels
    assert plain.hbm_bytes == ROW_BYTES  # its operand is in VMEM
    cost = '"cost_estimate":{"flops":"1","bytes_accessed":"5000"},"custom_call_config"'
    (stated,) = tpu_lab.summarize(HLO.replace('"custom_call_config"', cost)).kernels
    assert stated.hbm_bytes == 5000


def collective(line: str, *, before: str = ""):
    text = f"{before}\nENTRY %main (p: f32[8,128]) -> f32[8,128] {{\n  {line}\n}}\n"
    return tpu_lab.collectives(text, (2, 4), ("data", "model"))


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("model",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model"), 8),
        ("[2,4]<=[8]", ("model",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("mesh['data'=2,'model'=4] {'model'}", ("model",), 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", ("data", "model"), 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", (), 2),
    ],
)
def test_axes_of_replica_groups(groups: str, axes: tuple[str, ...], size: int):
    (found,) = collective(
        f"%g = bf16[32,128]{{1,0:T(8,128)(2,1)}} all-gather(%p), replica_groups={groups}"
    )
    assert (found.kind, found.axes, found.group_size) == ("all-gather", axes, size)
    assert (found.shape, found.num_bytes, found.count) == ("bf16[32,128]", 32 * 128 * 2, 1)
    assert not found.is_async


def test_bytes_of_a_scatter_are_those_before_it():
    (found,) = collective(
        "%r = f32[2,128]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add"
    )
    assert found.num_bytes == 4 * 2 * 128 * 4


def test_started_collectives_overlap():
    (found,) = collective(
        "%s = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]{:S(2)}) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    )
    assert (found.kind, found.axes, found.is_async) == ("collective-permute", ("model",), True)
    assert found.num_bytes == ROW_BYTES


def test_offloaded_collectives_are_found():
    before = """
%offloaded (q: f32[8,128]) -> f32[32,128] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %g = f32[32,128]{1,0} all-gather(%q), replica_groups=[2,4]<=[8], dimensions={0}
}

%called (r: f32[8,128]) -> f32[32,128] {
  %r = f32[8,128]{1,0} parameter(0)
  ROOT %f = f32[32,128]{1,0} fusion(%r), kind=kCustom, calls=%offloaded
}
"""
    (found,) = collective(
        '%c = ((), f32[32,128]{1,0}) call-start(%p), async_execution_thread="sparsecore", '
        "to_apply=%called",
        before=before,
    )
    assert (found.kind, found.count, found.is_async) == ("all-gather", 1, True)


def test_equal_collectives_are_counted_together():
    line = "%{} = f32[8,128]{{1,0}} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add"
    (found,) = collective(line.format("a") + "\n  " + line.format("b"))
    assert found.count == 2


def test_ring_formula():
    v6e = tpu_lab.chip("v6e")
    one = tpu_lab.Collective("all-gather", "f32[8]", 8_000_000, 3, ("data",), 8, False)
    seconds = 3 * 7 / 8 * 8_000_000 / (2 * v6e.ici_bytes_per_s)
    assert ring_seconds(one, v6e) == pytest.approx(seconds)
    reduced = tpu_lab.Collective("all-reduce", "f32[8]", 8_000_000, 3, ("data",), 8, False)
    assert ring_seconds(reduced, v6e) == pytest.approx(2 * seconds)


def report(hlo: str = HLO, texts=None, iterations=None) -> tpu_lab.TpuReport:
    program = Program(b"", (), (2, 4), ("data", "model"), ("Auto", "Auto"), ())
    memory = {
        "arguments_bytes": 3 * 2**20,
        "outputs_bytes": 2**20,
        "aliased_bytes": 0,
        "temporaries_bytes": 2**19,
        "peak_bytes": 5 * 2**20,
    }
    texts = {"sweep.3": (BUNDLES, UTILIZATION)} if texts is None else texts
    return make_report("v6e:2x4", program, {"memory": memory}, hlo, texts, iterations or {})


def test_report_adds_up():
    found = report()
    (kernel,) = found.kernels
    cycles = 2 + 7 * 4 + 4 * 32 + 3 * 64
    clock = found.chip.clock_hz
    assert (kernel.cycles, kernel.count, found.num_devices) == (cycles, 7, 8)
    assert kernel.seconds == pytest.approx(cycles / clock)
    operations = sum(item.seconds for item in found.operations)
    assert found.compute_seconds == pytest.approx(operations + 7 * cycles / clock)
    assert found.step_seconds >= max(found.busy_seconds.values())
    assert found.bound == max(found.busy_seconds, key=lambda name: found.busy_seconds[name])
    grid, inner = kernel.loops[1], kernel.loops[2]
    mxu = inner.utilization["MXU"] * 4 * 32 + grid.utilization["MXU"] * 7 * 4
    assert found.busy_seconds["MXU"] == pytest.approx(7 * mxu / clock)


def test_blocking_collectives_add_to_the_step():
    line = "  %g = f32[4096,4096]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add\n"
    found = report(HLO.replace("  ROOT %sum", line + "  ROOT %sum"))
    assert found.bound == "ICI"
    links = found.collectives[0].seconds
    assert found.step_seconds == pytest.approx(found.compute_seconds + links)


def test_report_table_and_json():
    found = report()
    text = str(found)
    assert text.count("estimated by the TPU compiler, not run on a TPU") == 2
    assert "kernel sweep: 7 run(s)" in text
    assert "peak" in text
    data = json.loads(found.to_json())
    assert data["label"] == "estimated by the TPU compiler, not run on a TPU"
    assert data["memory"]["peak_bytes"] == 5 * 2**20
    assert data["kernels"][0]["loops"][2]["bundles"] == 4
    assert "hlo" not in data


def test_report_without_trips_leaves_the_kernel_out():
    text = BUNDLES.replace("%s6_s4, 8 /*", "%s77_s7, %s6_s4 /*")
    found = report(texts={"sweep.3": (text, UTILIZATION)})
    assert found.kernels[0].seconds is None
    assert any("loop(s) 2" in note for note in found.notes)
    given = report(texts={"sweep.3": (text, UTILIZATION)}, iterations={"sweep": {2: 32}})
    assert given.kernels[0].cycles == report().kernels[0].cycles


STATED = 'kernel_metadata={\n"loop_iterations":"[4, 32, 64]",\n"mesh_axes":"(x)"\n}'


def with_metadata(metadata: str) -> str:
    assert "backend_config={" in HLO
    return HLO.replace("backend_config={", f"frontend_attributes={{{metadata}}}, backend_config={{")


def test_a_kernel_may_state_its_trips():
    text = BUNDLES.replace("%s6_s4, 8 /*", "%s77_s7, %s6_s4 /*")
    texts = {"sweep.3": (text, UTILIZATION)}
    found = report(with_metadata(STATED), texts)
    assert found.kernels[0].cycles == report().kernels[0].cycles
    other = report(with_metadata(STATED), texts, iterations={"sweep": {2: 33}})
    assert other.kernels[0].loops[2].iterations == 33


@pytest.mark.parametrize("stated", ["[4, 99]", "[]"])
def test_trips_of_other_loops_are_not_taken(stated: str):
    found = report(with_metadata(STATED.replace("[4, 32, 64]", stated)))
    assert found.kernels[0].cycles == report().kernels[0].cycles


def test_loops_of_the_compiler_need_no_statement():
    text = BUNDLES.replace("%s6_s4, 8 /*", "%s77_s7, %s6_s4 /*")
    found = report(
        with_metadata(STATED.replace("[4, 32, 64]", "[4, 64]")), {"sweep.3": (text, UTILIZATION)}
    )
    assert [loop.iterations for loop in found.kernels[0].loops] == [1, 4, 0, 64]


def test_metadata_over_several_lines_keeps_the_rest():
    (kernel,) = tpu_lab.summarize(with_metadata(STATED)).kernels
    (plain,) = tpu_lab.summarize(HLO).kernels
    assert kernel.loop_iterations == (4, 32, 64)
    assert (kernel.body, kernel.hbm_bytes) == (plain.body, plain.hbm_bytes)


def test_report_without_schedules_says_so():
    found = report(texts={})
    assert found.kernels[0].bundles is None
    assert any("compiled without schedules" in note for note in found.notes)


@pytest.mark.parametrize("name", tpu_lab.CHIPS)
def test_chips(name: str):
    known = tpu_lab.chip(f"{name}:2x2x1")
    assert known.name == name
    assert 8e9 < known.hbm_bytes < 200e9
    assert 0.5e12 < known.hbm_bytes_per_s < 8e12
    core = HardwareSpec.of(name.removeprefix("tpu"))  # the one table of chips
    assert (known.device_kind, known.clock_hz) == (core.device_kind, core.clock_hz)
    assert known.hbm_bytes == core.hbm_bytes * known.num_cores
    assert 16 * 2**20 <= known.vmem_bytes <= 128 * 2**20
    # The clock is the one that makes the peak a whole number of MXU operations per cycle.
    per_cycle = known.bf16_flops_per_s / known.clock_hz / known.num_cores / 2**17
    assert per_cycle == pytest.approx(round(per_cycle), rel=0.02)


def test_unknown_chips_and_slices():
    with pytest.raises(ValueError, match=r"must start with one of v4, v5e, v5p, v6e, tpu7x.*got"):
        tpu_lab.chip("v9")
    for wrong in ("v6e", "v6e:", "v6e:2xx", "h100:8", "v6e:0x4"):
        with pytest.raises(ValueError, match=r"`topology` must be a chip and its slice"):
            topology.check_name(wrong)


def test_mistakes_in_the_arguments_of_compile_for():
    class WithoutSchedules:
        schedule = False

    for wrong in (None, 3):
        with pytest.raises(TypeError, match=f"`topology` must be text such as .*; got {wrong}"):
            tpu_lab.compile_for(jnp.tanh, wrong, 1.0)
        with pytest.raises(ValueError, match=f"must start with one of v4, .*; got {wrong}"):
            tpu_lab.mesh_for(wrong, (1,), ("one",))
    with pytest.raises(ValueError, match="`compiler` was started with schedule=False"):
        tpu_lab.compile_for(jnp.tanh, "v6e:1x1", 1.0, compiler=WithoutSchedules())


def test_mesh_and_target():
    mesh = tpu_lab.mesh_for("tpu7x:2x2x1", (2, 4), ("data", "model"))
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert NamedSharding(mesh, PartitionSpec("model")).shard_shape((64, 8)) == (16, 8)
    with tpu_lab.target("v5e"):
        device = jax.sharding.get_abstract_mesh().abstract_device
        assert device.device_kind == "TPU v5 lite"
    assert jax.sharding.get_abstract_mesh().empty


def test_programs_carry_donation_and_mesh():
    mesh = tpu_lab.mesh_for("v6e:2x4", (2, 4), ("data", "model"))
    spec = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    program = lower(
        lambda a, b: (a["x"] + b, a["y"]),
        "v6e:2x4",
        ({"x": x, "y": x}, x),
        in_shardings=({"x": spec, "y": None}, None),
        donate_argnums=0,
    )
    assert program.donated == (0, 1)
    assert (program.mesh_shape, program.axis_names) == ((2, 4), ("data", "model"))
    alone = lower(jnp.sin, "v6e:1x1", (x,))
    assert (alone.mesh_shape, alone.donated) == ((1,), ())


def test_shardings_must_name_their_mesh():
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    with pytest.raises(TypeError, match="`in_shardings` must hold NamedSharding or None"):
        lower(jnp.sin, "v6e:2x4", (x,), in_shardings=PartitionSpec("data"))


def test_missing_libtpu_gives_the_install_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(
        tpu_lab.TpuCompilerMissingError, match=r'pip install "cutbce-ops\[tpu-lab\]"'
    ):
        tpu_lab.compile_for(jnp.sin, "v6e:1x1", x)
    assert issubclass(tpu_lab.TpuCompilerMissingError, ImportError)


def test_the_package_does_not_load_the_lab():
    code = "import sys, cutbce_ops; sys.exit(any('tpu_lab' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arguments_of_all_kinds():
    program = lower(
        lambda key, scale, x: jax.random.normal(key, (4,)) * scale + x["b"],
        "v6e:1x1",
        (jax.random.key(0), 2.0, {"b": jnp.ones(4)}),
    )
    assert program.mesh_shape == (1,)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_other_devices_stand_for_the_slice(kind: AxisType):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    x = jax.ShapeDtypeStruct(
        (16, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data", "model"))
    )
    program = lower(lambda x: (x * 2).sum(0), "v6e:2x4", (x,))
    assert (program.mesh_shape, program.device_ids) == ((2, 4), ())
    assert program.axis_types == (kind.name, kind.name)


def test_a_mesh_that_only_the_function_knows_must_be_given():
    mesh = tpu_lab.mesh_for("v6e:2x4", (8,), ("data",))
    rows = PartitionSpec("data")
    double = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=rows, out_specs=rows)
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    with pytest.raises(ValueError, match="give it as `mesh`"):
        lower(lambda x: double(x), "v6e:2x4", (x,))
    assert lower(lambda x: double(x), "v6e:2x4", (x,), mesh=mesh).mesh_shape == (8,)
