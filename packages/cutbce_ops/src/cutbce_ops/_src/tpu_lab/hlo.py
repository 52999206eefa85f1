"""What the optimised HLO of a program says: collectives, estimated cycles, kernels, HBM traffic."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from cutbce_ops._src.tpu_lab.collectives import Collective, collectives_in, grouped
from cutbce_ops._src.tpu_lab.hlo_text import (
    Computation,
    Execution,
    Instruction,
    Module,
    arrays_of,
    executions,
    parse_module,
)

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_COST = re.compile(r'"bytes_accessed":"?(\d+)')
_BODY = re.compile(r'"body":"([^"]*)"')
_ITERATIONS = re.compile(r'kernel_metadata=\{[^}]*"loop_iterations":"\[([\d, ]*)\]"')
# The cost model answers 2^63 - 1, or about 1e9, where it has no estimate.
_NO_ESTIMATE = 2**62
_NO_ESTIMATE_RANGE = (990_000_000, 1_010_000_000)
_KERNEL = 'custom_call_target="tpu_custom_call"'
# They touch only a part of their first operand.
_PARTIAL = frozenset({"dynamic-slice", "gather", "dynamic-update-slice", "scatter"})
# Operations that take time even where little memory moves.
HEAVY = frozenset({
    "cholesky", "convolution", "custom-call", "dot", "fft", "fusion", "gather", "reduce",
    "reduce-window", "scatter", "select-and-scatter", "sort", "triangular-solve",
})  # fmt: skip
_APART = ("-start", "-update", "-done")
_SLICED = frozenset({"slice-done", "dynamic-slice-done"})
_FREE = re.compile(r'custom_call_target="(AllocateBuffer|Assume\w+|PrepareAsync\w+)"')
_NO_TRAFFIC = frozenset({
    "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element",
    "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class XlaOperation:
    """An instruction outside of Pallas kernels with the compiler's estimate of its time."""

    name: str
    opcode: str
    source: str
    """Where it comes from, as JAX names it."""
    count: int
    """Runs in one call of the program."""
    cycles: int | None
    """Estimated cycles of one run; None where the compiler has no estimate."""
    hbm_bytes: int
    """HBM bytes that one run reads and writes."""
    is_async: bool
    """Whether it runs beside the TensorCore: a copy that starts and ends apart, or an operation of
    the SparseCore."""


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of a Pallas kernel."""

    name: str
    """Name of the kernel."""
    instruction: str
    """Name of the instruction in the optimised HLO."""
    body: str
    """The kernel, encoded; equal for calls of the same kernel."""
    count: int
    """Runs in one call of the program."""
    hbm_bytes: int
    """HBM bytes of one run: those of its `CostEstimate`, or operands and results once."""
    loop_iterations: tuple[int, ...] = ()
    """Trips of all of its loops in one run, in the order of its schedule, if the kernel states them
    in its metadata; empty if not."""


@dataclasses.dataclass(frozen=True)
class HloSummary:
    """Everything the lab reads from the optimised HLO."""

    operations: tuple[XlaOperation, ...]
    kernels: tuple[KernelCall, ...]
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...]
    """What was left out or guessed."""


def summarize(
    hlo_text: str, mesh_shape: Sequence[int] = (), axis_names: Sequence[str] = ()
) -> HloSummary:
    """Reads a program's optimised HLO.

    Args:
        hlo_text: `compiled.as_text()`.
        mesh_shape: devices along each axis of the program's mesh, to name a collective's axes.
        axis_names: one name per axis.

    Returns:
        Operations, kernels and collectives, loops multiplied out.
    """
    module = parse_module(hlo_text)
    runs = list(executions(module))
    operations, kernels = [], []
    for run in runs:
        instruction = run.instruction
        if _KERNEL in instruction.attributes:
            kernels.append(_kernel(module, run))
        elif not _FREE.search(instruction.attributes) and not any(
            collectives_in(module, instruction)
        ):
            operations.append(_operation(module, run))
    return HloSummary(
        tuple(i for i in operations if i.cycles or i.hbm_bytes or i.opcode in HEAVY),
        tuple(kernels),
        tuple(grouped(module, runs, mesh_shape, axis_names)),
        tuple(_notes(runs)),
    )


def _operation(module: Module, run: Execution) -> XlaOperation:
    instruction = run.instruction
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    cycles = _estimated_cycles(instruction)
    starts_or_ends = instruction.opcode.endswith(_APART)
    idle = instruction.opcode in _NO_TRAFFIC
    if instruction.opcode in _SLICED:  # its start lists the whole operand: the slice comes from HBM
        traffic = sum(array.num_bytes for array in instruction.arrays())
    elif idle or (starts_or_ends and instruction.opcode != "copy-start"):
        traffic = 0
    else:
        traffic = _hbm_bytes(module, run)
    return XlaOperation(
        name=instruction.name,
        opcode=instruction.opcode,
        source=match[1] if match else "",
        count=run.times,
        cycles=cycles,
        hbm_bytes=traffic,
        is_async=run.offloaded or starts_or_ends,
    )


def _estimated_cycles(instruction: Instruction) -> int | None:
    match = _CYCLES.search(instruction.attributes)
    if match is None:
        return None
    cycles = int(match[1])
    low, high = _NO_ESTIMATE_RANGE
    return None if cycles >= _NO_ESTIMATE or low <= cycles <= high else cycles


def _kernel(module: Module, run: Execution) -> KernelCall:
    instruction = run.instruction
    cost, body, stated = (
        expr.search(instruction.attributes) for expr in (_COST, _BODY, _ITERATIONS)
    )
    return KernelCall(
        name=re.sub(r"(\.\d+|\.clone)+$", "", instruction.name),
        instruction=instruction.name,
        body=body[1] if body else "",
        count=run.times,
        hbm_bytes=int(cost[1]) if cost else _hbm_bytes(module, run),
        loop_iterations=tuple(map(int, re.findall(r"\d+", stated[1]))) if stated else (),
    )


def _hbm_bytes(module: Module, run: Execution) -> int:
    """Operands read and results written, as far as they live in HBM; slices count as slices."""
    instruction = run.instruction
    computation = module.computations[run.computation]
    total = 0
    operands = [computation[name] for name in instruction.operands if name in computation]
    updated = _bytes_replaced(module, instruction, computation)
    for index, operand in enumerate(operands):
        size = sum(array.num_bytes for array in operand.arrays() if array.in_hbm)
        part = _part_read(module, instruction, index)
        total += min(size, part) if part is not None else size
    results = [array for array in instruction.arrays() if array.in_hbm]
    if instruction.opcode == "copy-start":  # the result lists source and destination
        results = results[:1] if arrays_of(instruction.shape)[0].in_hbm else []
    written = sum(array.num_bytes for array in results)
    return total + (min(written, updated) if updated is not None else written)


def _parameters(fused: Computation) -> dict[int, str]:
    return {int(item.arguments): name for name, item in fused.items() if item.opcode == "parameter"}


def _fused(module: Module, instruction: Instruction) -> Computation:
    """The computation of a fusion; empty for other instructions."""
    names = instruction.called() if instruction.opcode == "fusion" else ()
    return next((module.computations.get(name, {}) for name in names), {})


def _part_read(module: Module, instruction: Instruction, index: int) -> int | None:
    """Bytes read of an operand that is only sliced or only written into; None if all of it is."""
    if instruction.opcode in _PARTIAL and index == 0:
        reads = instruction.opcode in {"dynamic-slice", "gather"}
        return sum(array.num_bytes for array in instruction.arrays()) if reads else 0
    fused = _fused(module, instruction)
    name = _parameters(fused).get(index)
    parts = [
        _part_read(module, user, place)
        for user in fused.values()
        for place, operand in enumerate(user.operands)
        if operand == name
    ]
    if name is None or not parts or None in parts:
        return None
    return sum(part for part in parts if part is not None)


def _bytes_replaced(
    module: Module, instruction: Instruction, computation: Computation
) -> int | None:
    """Bytes written if the result is an operand with a slice replaced; None otherwise."""
    root: Instruction | None = instruction
    followed = {"fusion", "bitcast", "copy"} if instruction.opcode == "fusion" else set()
    while root is not None and root.opcode in followed:
        if root.opcode == "fusion":
            computation = _fused(module, root)
            root = next((item for item in computation.values() if item.is_root), None)
        else:
            root = computation.get(root.operands[0]) if root.operands else None
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(root.opcode if root else "")
    if root is None or place is None:
        return None
    update = computation.get(root.operands[place])
    # A scatter reads what it adds to, too.
    return None if update is None else place * sum(array.num_bytes for array in update.arrays())


def _notes(runs: Sequence[Execution]) -> Iterable[str]:
    unknown = [r for r in runs if r.instruction.opcode == "while" and not r.known]
    inside = {r.computation for r in runs if not r.known}
    if unknown or inside:
        yield (
            f"{len(inside) or len(unknown)} loop(s) run an unknown number of times: "
            "one trip is counted."
        )
    conditionals = [r for r in runs if r.instruction.opcode == "conditional"]
    if conditionals:
        yield f"{len(conditionals)} conditional(s): all branches are counted."
