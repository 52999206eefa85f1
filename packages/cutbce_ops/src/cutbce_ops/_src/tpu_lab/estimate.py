"""Times from cycles, bytes and links: puts a report together."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cutbce_ops._src.tpu_lab.bundles import KernelLoop, Schedule, parse_schedule
from cutbce_ops._src.tpu_lab.chips import Chip, chip
from cutbce_ops._src.tpu_lab.collectives import Collective
from cutbce_ops._src.tpu_lab.hlo import HEAVY, HloSummary, KernelCall, XlaOperation, summarize
from cutbce_ops._src.tpu_lab.program import Program
from cutbce_ops._src.tpu_lab.report import (
    CollectiveEstimate,
    KernelEstimate,
    Memory,
    OperationEstimate,
    TpuReport,
)

Iterations = Mapping[str, Mapping[int, int]]
COPY_BUNDLES = 64  # of a loop that copies a partial block, at most; 5 to 33 were seen


def make_report(
    topology: str,
    program: Program,
    answer: Mapping[str, Any],
    hlo: str,
    texts: Mapping[str, tuple[str, str]],
    loop_iterations: Iterations,
) -> TpuReport:
    """Report of a compiled program; `texts` are its schedules by instruction, if there are any."""
    known = chip(topology)
    summary = summarize(hlo, program.mesh_shape, program.axis_names)
    schedules = _schedules(texts, summary.kernels, loop_iterations)
    kernels = _kernels(summary.kernels, schedules, known)
    timed = tuple(_with_cycles(item, schedules) for item in summary.operations)
    summary = dataclasses.replace(summary, operations=timed)
    operations = [_operation(item, known) for item in timed]
    links = tuple(
        CollectiveEstimate(item, ring_seconds(item, known)) for item in summary.collectives
    )
    busy = _busy_seconds(summary, schedules, known)
    busy["ICI"] = sum(item.seconds for item in links)
    compute = sum(item.seconds for item in operations)
    compute += sum((item.seconds or 0.0) * item.count for item in kernels)
    blocking = sum(item.seconds for item in links if not item.collective.is_async)
    return TpuReport(
        topology=topology,
        chip=known,
        num_devices=_product(program.mesh_shape),
        memory=Memory(**answer["memory"]),
        kernels=kernels,
        operations=tuple(sorted(operations, key=lambda item: -item.seconds)),
        collectives=links,
        busy_seconds=busy,
        compute_seconds=compute,
        step_seconds=max(compute + blocking, busy["HBM"], busy["ICI"]),
        bound=max(busy, key=lambda name: busy[name]),
        notes=(*summary.notes, *_notes(timed), *_kernel_notes(kernels, bool(texts))),
        hlo=hlo,
    )


def ring_seconds(item: Collective, known: Chip) -> float:
    """Time of a collective over a ring that uses its links both ways, for all of its runs.

    `n` devices, `b` bytes of the whole and `w` bytes/s in both directions of a link:
    `(n - 1) / n * b / w` for a gather, scatter or exchange, twice that for an all-reduce, `b` over
    one direction for a permutation. A collective over several axes of the torus may be faster.

    Args:
        item: the collective.
        known: the chip.

    Returns:
        Seconds.
    """
    both_ways = 2 * known.ici_bytes_per_s
    share = (item.group_size - 1) / max(1, item.group_size)
    if item.kind == "collective-permute":
        one = item.num_bytes / known.ici_bytes_per_s
    elif item.kind == "all-reduce":
        one = 2 * share * item.num_bytes / both_ways
    else:
        one = share * item.num_bytes / both_ways
    return one * item.count


def _schedules(
    texts: Mapping[str, tuple[str, str]], calls: Sequence[KernelCall], iterations: Iterations
) -> dict[str, Schedule]:
    found = {name: parse_schedule(*both) for name, both in texts.items()}
    for call in calls:
        if call.instruction in found:
            known = {**_stated(call, found[call.instruction]), **iterations.get(call.name, {})}
            if known:
                both = texts[call.instruction]
                found[call.instruction] = parse_schedule(*both, known)
    by_body = {call.body: found[call.instruction] for call in calls if call.instruction in found}
    for call in calls:  # the compiler schedules equal kernels once
        if call.instruction not in found and call.body in by_body:
            found[call.instruction] = by_body[call.body]
    return found


def _stated(call: KernelCall, schedule: Schedule) -> dict[int, int]:
    """Trips that the kernel itself states, by loop; none if the compiler made other loops of it.

    Loops that copy the part of a last block that is there are the compiler's own. They are short,
    run once, and are left out.
    """
    numbers = range(1, len(schedule.loops))
    copies = {
        number
        for number in numbers
        if schedule.loops[number].trips is None
        and schedule.loops[number].bundles <= COPY_BUNDLES
        and len(call.loop_iterations) < len(numbers)
    }
    own = [number for number in numbers if number not in copies]
    if not call.loop_iterations or len(call.loop_iterations) != len(own):
        return {}
    return {**dict(zip(own, call.loop_iterations, strict=True)), **dict.fromkeys(copies, 0)}


def _kernels(
    calls: Sequence[KernelCall], schedules: Mapping[str, Schedule], known: Chip
) -> tuple[KernelEstimate, ...]:
    kernels: dict[tuple[str, str], KernelEstimate] = {}
    for call in calls:
        schedule = schedules.get(call.instruction)
        cycles = schedule.cycles() if schedule else None
        traffic = call.hbm_bytes / known.hbm_bytes_per_s
        estimate = KernelEstimate(
            name=call.name,
            count=call.count,
            hbm_bytes=call.hbm_bytes,
            bundles=schedule.bundles if schedule else None,
            loops=schedule.loops if schedule else (),
            cycles=cycles,
            cycles_unconditional=schedule.cycles(conditional=False) if schedule else None,
            seconds=None if cycles is None else max(cycles / known.clock_hz, traffic),
        )
        key = (call.name, call.body)
        if key in kernels:
            estimate = dataclasses.replace(estimate, count=estimate.count + kernels[key].count)
        kernels[key] = estimate
    return tuple(kernels.values())


def _with_cycles(item: XlaOperation, schedules: Mapping[str, Schedule]) -> XlaOperation:
    """The operation, with the cycles of its schedule where the compiler's cost model has none."""
    schedule = schedules.get(item.name)
    if item.cycles is not None or schedule is None:
        return item
    return dataclasses.replace(item, cycles=schedule.cycles())


def _operation(item: XlaOperation, known: Chip) -> OperationEstimate:
    seconds = max((item.cycles or 0) / known.clock_hz, item.hbm_bytes / known.hbm_bytes_per_s)
    return OperationEstimate(
        name=item.name,
        source=item.source,
        count=item.count,
        cycles=item.cycles,
        hbm_bytes=item.hbm_bytes,
        seconds=0.0 if item.is_async else seconds * item.count,
    )


def _busy_seconds(
    summary: HloSummary, schedules: Mapping[str, Schedule], known: Chip
) -> dict[str, float]:
    """Seconds that units of the core, and HBM, need by themselves."""
    cycles: dict[str, float] = {}
    traffic = 0
    for call in summary.kernels:
        traffic += call.hbm_bytes * call.count
        schedule = schedules.get(call.instruction)
        # A kernel of unknown time is left out here too.
        for loop in schedule.loops if schedule and schedule.cycles() is not None else ():
            for unit, share in loop.utilization.items():
                used = share * loop.bundles * (loop.iterations or 0) * call.count
                cycles[unit] = cycles.get(unit, 0.0) + used
    for item in summary.operations:
        traffic += item.hbm_bytes * item.count
        schedule = schedules.get(item.name)
        for unit, share in _average_use(schedule).items():
            used = share * (item.cycles or 0) * item.count
            cycles[unit] = cycles.get(unit, 0.0) + used
    busy = {unit: used / known.clock_hz for unit, used in cycles.items()}
    return {**busy, "HBM": traffic / known.hbm_bytes_per_s}


def _average_use(schedule: Schedule | None) -> dict[str, float]:
    """Use of the units over a whole operation, loops weighted by their trips."""
    if schedule is None:
        return {}
    weights = [(loop, _weight(loop)) for loop in schedule.loops]
    total = sum(weight for _, weight in weights)
    units = schedule.loops[0].utilization
    return {
        unit: sum(loop.utilization[unit] * weight for loop, weight in weights) / max(1, total)
        for unit in units
    }


def _weight(loop: KernelLoop) -> int:
    return loop.bundles * (loop.iterations or 1)


def _notes(operations: Sequence[XlaOperation]) -> list[str]:
    heavy = [item for item in operations if item.cycles is None and item.opcode in HEAVY]
    waiting = sorted({item.name for item in heavy if not item.is_async})
    beside = sorted({item.name for item in heavy if item.is_async})
    notes = []
    if waiting:
        notes.append(f"Only HBM traffic is counted, without an estimate, of {', '.join(waiting)}.")
    if beside:
        notes.append(f"Run by another core, and not timed: {', '.join(beside)}.")
    return notes


def _kernel_notes(kernels: Sequence[KernelEstimate], has_schedules: bool) -> list[str]:
    notes = []
    for kernel in kernels:
        unknown = [str(i) for i, loop in enumerate(kernel.loops) if loop.iterations is None]
        if unknown:
            notes.append(
                f"Kernel {kernel.name} is left out of the times: the schedule does not show the "
                f"trips of loop(s) {', '.join(unknown)}. Give `loop_iterations`."
            )
        elif skipped := [str(i) for i, loop in enumerate(kernel.loops) if loop.conditional]:
            notes.append(
                f"Kernel {kernel.name}: loop(s) {', '.join(skipped)} are counted each time, though "
                "a branch can skip them. Give `loop_iterations` if it does."
            )
        elif has_schedules and kernel.bundles is None:
            notes.append(f"Kernel {kernel.name} is left out of the times: no schedule was written.")
    if kernels and not has_schedules:
        notes.append("Kernels are left out of the times: compiled without schedules.")
    return notes


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
