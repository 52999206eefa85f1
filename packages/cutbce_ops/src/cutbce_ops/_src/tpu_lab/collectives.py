"""Collectives in the optimised HLO of a program: kind, bytes, number of runs, mesh axes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

from cutbce_ops._src.tpu_lab.hlo_text import (
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
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


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
    return tuple(grouped(module, list(executions(module)), mesh_shape, axis_names))


def collectives_in(module: Module, instruction: Instruction) -> Iterable[Instruction]:
    """The collective that an instruction is, or that its fusion holds."""
    if _KIND.match(instruction.opcode):
        yield instruction
    elif instruction.opcode == "fusion":
        for name in instruction.called():
            for inner in module.computations.get(name, {}).values():
                if _KIND.match(inner.opcode):
                    yield inner


def grouped(
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
        for item in collectives_in(module, run.instruction):
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
    names = tuple(str(axis_names[axis]) for axis in sorted(different))
    return names, math.prod(mesh_shape[axis] for axis in different)


def _coordinates(device: int, mesh_shape: Sequence[int]) -> list[int]:
    strides = [math.prod(mesh_shape[axis + 1 :]) for axis in range(len(mesh_shape))]
    return [device // stride % size for stride, size in zip(strides, mesh_shape, strict=True)]
