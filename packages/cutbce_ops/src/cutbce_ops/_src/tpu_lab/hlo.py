"""What the optimised HLO of a program says: collectives, estimated cycles, kernels, HBM traffic."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

from cutbce_ops._src.tpu_lab.hlo_text import (
    Computation,
    Execution,
    Instruction,
    Module,
    arrays_of,
    executions,
    parse_module,
)

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
_KIND = re.compile(rf"^({'|'.join(KINDS)})(-start)?$")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_COST = re.compile(r'"bytes_accessed":"?(\d+)')
_BODY = re.compile(r'"body":"([^"]*)"')
# The cost model answers 2^63 - 1, or about 1e9, where it has no estimate.
_NO_ESTIMATE = 2**62
_NO_ESTIMATE_RANGE = (990_000_000, 1_010_000_000)
_KERNEL = 'custom_call_target="tpu_custom_call"'
_ALLOCATION = 'custom_call_target="AllocateBuffer"'
_NO_TRAFFIC = frozenset({
    "bitcast", "call", "call-done", "call-start", "call-update", "collective-permute-done",
    "conditional", "constant", "copy-done", "after-all", "async-done", "async-start",
    "async-update", "get-tuple-element",
    "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of a program that are alike."""

    kind: str
    """`all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, ..."""
    shape: str
    """Shape of what arrives on a device, as HLO writes it, without layouts."""
    num_bytes: int
    """Bytes of the whole: what one device has after a gather, or before a scatter."""
    count: int
    """Runs in one call of the program; those in loops count once per trip."""
    axes: tuple[str, ...]
    """Mesh axes that it spans; empty where the groups match none."""
    group_size: int
    """Devices that take part in one of them."""
    is_async: bool
    """Whether the program may compute between its start and its end."""


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
        elif not any(_collectives_in(module, instruction)):
            operations.append(_operation(module, run))
    return HloSummary(
        tuple(item for item in operations if item.cycles or item.hbm_bytes),
        tuple(kernels),
        tuple(_collectives(module, runs, mesh_shape, axis_names)),
        tuple(_notes(runs)),
    )


def collectives(
    hlo_text: str, mesh_shape: Sequence[int] = (), axis_names: Sequence[str] = ()
) -> tuple[Collective, ...]:
    r"""Collectives in optimised HLO text, alike ones together, the largest first.

    Args:
        hlo_text: `compiled.as_text()`.
        mesh_shape: devices along each axis of the program's mesh, to name a collective's axes.
        axis_names: one name per axis.

    Returns:
        Kind, shape, bytes, number of runs (loops multiplied out), axes and group size.

    Example:
        >>> from cutbce_ops import tpu_lab
        >>> tpu_lab.collectives(
        ...     "ENTRY %main (p: f32[8]) -> f32[32] {\n"
        ...     "  %p = f32[8] parameter(0)\n"
        ...     "  ROOT %all = f32[32] all-gather(%p), replica_groups={{0,1,2,3}}\n}",
        ...     (4,), ("data",),
        ... )[0].axes
        ('data',)
    """
    module = parse_module(hlo_text)
    return tuple(_collectives(module, list(executions(module)), mesh_shape, axis_names))


def _operation(module: Module, run: Execution) -> XlaOperation:
    instruction = run.instruction
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    cycles = _estimated_cycles(instruction)
    idle = instruction.opcode in _NO_TRAFFIC or _ALLOCATION in instruction.attributes
    traffic = 0 if idle else _hbm_bytes(module, run)
    return XlaOperation(
        name=instruction.name,
        opcode=instruction.opcode,
        source=match[1] if match else "",
        count=run.times,
        cycles=cycles,
        hbm_bytes=traffic,
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
    cost, body = (expr.search(instruction.attributes) for expr in (_COST, _BODY))
    return KernelCall(
        name=re.sub(r"(\.\d+|\.clone)+$", "", instruction.name),
        instruction=instruction.name,
        body=body[1] if body else "",
        count=run.times,
        hbm_bytes=int(cost[1]) if cost else _hbm_bytes(module, run),
    )


def _hbm_bytes(module: Module, run: Execution) -> int:
    """Operands read and results written, as far as they live in HBM; slices count as slices."""
    instruction = run.instruction
    computation = module.computations[run.computation]
    fused = next(
        (
            module.computations.get(name, {})
            for name in instruction.called()
            if instruction.opcode == "fusion"
        ),
        {},
    )
    total = 0
    operands = [computation[name] for name in instruction.operands if name in computation]
    updated = _bytes_replaced(instruction, computation, fused)
    for index, operand in enumerate(operands):
        size = sum(array.num_bytes for array in operand.arrays() if array.in_hbm)
        part = _part_read(instruction, fused, index)
        total += min(size, part) if part is not None else size
    results = [array for array in instruction.arrays() if array.in_hbm]
    if instruction.opcode == "copy-start":  # the result lists source and destination
        results = results[:1] if arrays_of(instruction.shape)[0].in_hbm else []
    written = sum(array.num_bytes for array in results)
    return total + (min(written, updated) if updated is not None else written)


def _parameters(fused: Computation) -> dict[int, str]:
    return {int(item.arguments): name for name, item in fused.items() if item.opcode == "parameter"}


def _part_read(instruction: Instruction, fused: Computation, index: int) -> int | None:
    """Bytes read of an operand that is only sliced or only written into; None if all of it is."""
    if instruction.opcode == "dynamic-slice" and index == 0:
        return sum(array.num_bytes for array in instruction.arrays())
    if instruction.opcode == "dynamic-update-slice" and index == 0:
        return 0
    name = _parameters(fused).get(index)
    users = [item for item in fused.values() if name in item.operands]
    slices = [u for u in users if u.opcode == "dynamic-slice" and u.operands[0] == name]
    writes = [u for u in users if u.opcode == "dynamic-update-slice" and u.operands[0] == name]
    if name is None or not users or len(slices) + len(writes) < len(users):
        return None
    return sum(array.num_bytes for item in slices for array in item.arrays())


def _bytes_replaced(
    instruction: Instruction, computation: Computation, fused: Computation
) -> int | None:
    """Bytes written if the result is an operand with a slice replaced; None otherwise."""
    root: Instruction | None = instruction
    if instruction.opcode == "fusion":
        computation = fused
        root = next((item for item in fused.values() if item.is_root), None)
        while root is not None and root.opcode in {"bitcast", "copy"} and root.operands:
            root = fused.get(root.operands[0])
    if root is None or root.opcode != "dynamic-update-slice":
        return None
    update = computation.get(root.operands[1])
    return None if update is None else sum(array.num_bytes for array in update.arrays())


def _collectives_in(module: Module, instruction: Instruction) -> Iterable[Instruction]:
    """The collective that an instruction is, or that its fusion holds."""
    if _KIND.match(instruction.opcode):
        yield instruction
    elif instruction.opcode == "fusion":
        for name in instruction.called():
            for inner in module.computations.get(name, {}).values():
                if _KIND.match(inner.opcode):
                    yield inner


def _collectives(
    module: Module,
    runs: Iterable[Execution],
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
) -> list[Collective]:
    found: dict[tuple[object, ...], Collective] = {}
    called_async = {
        name
        for computation in module.computations.values()
        for item in computation.values()
        if item.opcode in {"call-start", "async-start"}
        for name in item.called()
    }
    for run in runs:
        for item in _collectives_in(module, run.instruction):
            one = _collective(module, run, item, mesh_shape, axis_names)
            is_async = item.opcode.endswith("-start") or run.computation in called_async
            one = dataclasses.replace(one, is_async=is_async)
            key = dataclasses.astuple(dataclasses.replace(one, count=0))
            if key in found:
                one = dataclasses.replace(one, count=one.count + found[key].count)
            found[key] = one
    return sorted(found.values(), key=lambda one: -one.num_bytes * one.count)


def _collective(
    module: Module,
    run: Execution,
    item: Instruction,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
) -> Collective:
    kind = item.opcode.removesuffix("-start")
    shape = item.shape
    if item.opcode.endswith("-start") and shape.startswith("("):
        shape = _last_array(kind, shape)
    num_bytes = sum(array.num_bytes for array in arrays_of(shape))
    axes, size = _axes(item, mesh_shape, axis_names)
    if kind == "reduce-scatter":
        num_bytes *= size
    return Collective(
        kind=kind,
        shape=", ".join(re.findall(r"\w+\[[\d,]*\]", shape)),
        num_bytes=num_bytes,
        count=run.times,
        axes=axes,
        group_size=size,
        is_async=False,
    )


def _last_array(kind: str, shape: str) -> str:
    """A start's result lists operands, results and flags: the results."""
    arrays = re.findall(r"\w+\[[\d,]+\](?:\{[^}]*\})?", shape)
    if kind == "all-reduce":
        return shape
    return arrays[len(arrays) // 2] if len(arrays) > 1 else shape


def _axes(
    item: Instruction, mesh_shape: Sequence[int], axis_names: Sequence[str]
) -> tuple[tuple[str, ...], int]:
    """Mesh axes that a collective spans, and the devices in one of its groups."""
    groups = _replica_groups(item.attributes)
    total = math.prod(mesh_shape)
    if groups is None and _PAIRS.search(item.attributes):
        return _axes_of_pairs(item, mesh_shape, axis_names)
    if groups is None:  # all devices, in one group
        groups = {tuple(range(max(1, total)))}
    size = len(next(iter(groups)))
    for count in range(1, len(axis_names) + 1):
        for chosen in itertools.combinations(range(len(axis_names)), count):
            if _groups_along(mesh_shape, chosen) == {tuple(sorted(group)) for group in groups}:
                return tuple(axis_names[axis] for axis in chosen), size
    return (), size


def _replica_groups(attributes: str) -> set[tuple[int, ...]] | None:
    if match := _MESH.search(attributes):
        sizes = re.findall(r"'([^']+)'=(\d+)", match[1])
        named = set(re.findall(r"'([^']+)'", match[2]))
        chosen = [axis for axis, (name, _) in enumerate(sizes) if name in named]
        return _groups_along([int(size) for _, size in sizes], chosen)
    if match := _GROUPS.search(attributes):
        return {
            tuple(int(device) for device in group.split(","))
            for group in re.findall(r"\{([\d,]+)\}", match[1])
        }
    if match := _IOTA.search(attributes):
        rows, columns = int(match[1]), int(match[2])
        dims = [int(size) for size in match[3].split(",")]
        order = [int(axis) for axis in match[4].split(",")] if match[4] else range(len(dims))
        flat = _transposed(dims, list(order))
        return {tuple(flat[row * columns : (row + 1) * columns]) for row in range(rows)}
    return None


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... as an array of `dims`, its axes reordered, flattened."""
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    ranges = [range(dims[axis]) for axis in order]
    return [
        sum(place * strides[axis] for place, axis in zip(places, order, strict=True))
        for places in itertools.product(*ranges)
    ]


def _groups_along(mesh_shape: Sequence[int], chosen: Sequence[int]) -> set[tuple[int, ...]]:
    """Groups of devices that differ in the chosen axes only."""
    rest = [axis for axis in range(len(mesh_shape)) if axis not in chosen]
    flat = _transposed(mesh_shape, [*rest, *chosen])
    size = math.prod(mesh_shape[axis] for axis in chosen)
    return {tuple(sorted(flat[i : i + size])) for i in range(0, len(flat), size)}


def _axes_of_pairs(
    item: Instruction, mesh_shape: Sequence[int], axis_names: Sequence[str]
) -> tuple[tuple[str, ...], int]:
    """Axes in which source and target of a permutation differ."""
    match = _PAIRS.search(item.attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", match[1]) if match else []
    different = set()
    for pair in pairs:
        one, other = (_coordinates(int(device), mesh_shape) for device in pair)
        different |= {axis for axis in range(len(mesh_shape)) if one[axis] != other[axis]}
    names = tuple(axis_names[axis] for axis in sorted(different))
    return names, math.prod(mesh_shape[axis] for axis in different)


def _coordinates(device: int, mesh_shape: Sequence[int]) -> list[int]:
    strides = [math.prod(mesh_shape[axis + 1 :]) for axis in range(len(mesh_shape))]
    return [device // stride % size for stride, size in zip(strides, mesh_shape, strict=True)]


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
    silent = [
        r.instruction.name
        for r in runs
        if _CYCLES.search(r.instruction.attributes) and _estimated_cycles(r.instruction) is None
    ]
    if silent:
        yield f"The compiler has no estimate for {', '.join(sorted(set(silent)))}."
