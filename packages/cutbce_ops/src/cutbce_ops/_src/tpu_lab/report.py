"""What the lab found out about a program, as an object, a table and JSON."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cutbce_ops._src.tpu_lab.bundles import KernelLoop
from cutbce_ops._src.tpu_lab.chips import Chip
from cutbce_ops._src.tpu_lab.collectives import Collective

LABEL = "estimated by the TPU compiler, not run on a TPU"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one device, in bytes, as the compiler assigned it."""

    arguments_bytes: int
    """Arguments of the program."""
    outputs_bytes: int
    """Results, those that overwrite arguments included."""
    aliased_bytes: int
    """Results that overwrite donated arguments; in arguments and outputs, but held once."""
    temporaries_bytes: int
    """What the program allocates while it runs."""
    peak_bytes: int
    """Most that is in use at once, the program's own code included."""


@dataclasses.dataclass(frozen=True)
class CollectiveEstimate:
    """Collectives that are alike, with their time on the links."""

    collective: Collective
    seconds: float
    """All of its runs in one call of the program, by the formula of a ring."""


@dataclasses.dataclass(frozen=True)
class KernelEstimate:
    """A Pallas kernel with its loops."""

    name: str
    """Name of the kernel."""
    count: int
    """Runs in one call of the program."""
    hbm_bytes: int
    """HBM bytes of one run: from the kernel's `CostEstimate`, else operands and results once."""
    bundles: int | None
    """Bundles of the whole kernel, each once; None without a schedule."""
    loops: tuple[KernelLoop, ...]
    """Code outside of loops, then each loop by itself, in the order of the program."""
    cycles: int | None
    """Issue cycles of one run, all loops multiplied out and everything under `pl.when` taken each
    time: an upper bound, without stalls. None where a loop's trips are unknown."""
    cycles_unconditional: int | None
    """The same without anything that a branch can skip."""
    seconds: float | None
    """One run: its cycles, or its HBM bytes if they take longer."""

    @property
    def inner_loops(self) -> tuple[KernelLoop, ...]:
        """The loops of the deepest level, each by itself."""
        deepest = max((loop.depth for loop in self.loops), default=0)
        return tuple(loop for loop in self.loops if loop.depth == deepest > 0)


@dataclasses.dataclass(frozen=True)
class OperationEstimate:
    """An XLA operation outside of Pallas kernels."""

    name: str
    source: str
    """Where it comes from, as JAX names it."""
    count: int
    cycles: int | None
    """The compiler's estimate for one run; None where it has none."""
    hbm_bytes: int
    """HBM bytes of one run."""
    seconds: float
    """All runs: cycles, or HBM bytes if they take longer."""


@dataclasses.dataclass(frozen=True)
class TpuReport:
    """What the TPU compiler says of a program on a slice that is not attached.

    `print(report)` shows a table. Every figure is estimated by the TPU compiler, not run on a TPU.
    """

    topology: str
    chip: Chip
    num_devices: int
    """Devices of the slice that the program uses."""
    memory: Memory
    kernels: tuple[KernelEstimate, ...]
    operations: tuple[OperationEstimate, ...]
    """XLA operations, the slowest first."""
    collectives: tuple[CollectiveEstimate, ...]
    busy_seconds: Mapping[str, float]
    """How long each resource would be busy by itself: units of the core (MXU, VALU, EUP, ...), HBM
    and ICI. The step cannot be faster than the longest."""
    compute_seconds: float
    """XLA operations and kernels, one after the other; kernels of unknown time are left out."""
    step_seconds: float
    """Estimated time of one call: compute and blocking collectives one after the other, or HBM or
    the links if they take longer."""
    bound: str
    """The resource that is busy longest."""
    notes: tuple[str, ...]
    """What is missing from the estimate or was guessed."""
    hlo: str = dataclasses.field(repr=False)
    """The optimised HLO."""

    label = LABEL

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the HLO, as values that JSON can hold."""
        found = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "hlo"
        }
        return {"label": LABEL, **found}

    def to_json(self) -> str:
        """Returns all but the HLO, as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        """Returns a table."""
        return "\n".join(_lines(self))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _lines(report: TpuReport) -> Iterable[str]:
    memory = report.memory
    yield f"{report.topology}, {report.num_devices} device(s) used: {LABEL}"
    yield ""
    capacity = report.chip.hbm_bytes
    rows = [
        ("arguments", memory.arguments_bytes),
        ("outputs", memory.outputs_bytes),
        ("aliased", memory.aliased_bytes),
        ("temporaries", memory.temporaries_bytes),
        ("peak", memory.peak_bytes),
    ]
    yield from _table(
        ("HBM per device", "MiB", "% of chip"),
        [(name, f"{size / _MIB:.1f}", f"{100 * size / capacity:.1f}") for name, size in rows],
    )
    if report.collectives:
        yield ""
        yield from _table(
            ("collective", "axes", "devices", "MiB", "runs", "ms", "overlaps"),
            [_collective_row(item) for item in report.collectives],
        )
    for kernel in report.kernels:
        yield ""
        yield from _kernel_lines(kernel)
    slow = [item for item in report.operations if item.seconds > 0][:10]
    if slow:
        yield ""
        yield from _table(
            ("slowest XLA operations", "runs", "cycles", "ms", "from"),
            [_operation_row(item) for item in slow],
        )
    yield ""
    yield from _table(
        ("busy by itself", "ms"),
        [
            (name, f"{seconds * 1e3:.3f}")
            for name, seconds in sorted(report.busy_seconds.items(), key=lambda item: -item[1])
            if seconds > 0
        ],
    )
    yield ""
    untimed = ", ".join(sorted({item.name for item in report.kernels if item.seconds is None}))
    step = f"{report.step_seconds * 1e3:.3f} ms"
    if untimed:
        yield f"step without the time of {untimed}: {step} ({LABEL})"
    else:
        yield f"step: {step}, bound by {report.bound} ({LABEL})"
    yield from (f"note: {note}" for note in report.notes)


def _collective_row(item: CollectiveEstimate) -> tuple[str, ...]:
    one = item.collective
    return (
        f"{one.kind} {one.shape}",
        ",".join(one.axes) or "-",
        str(one.group_size),
        f"{one.num_bytes / _MIB:.2f}",
        str(one.count),
        f"{item.seconds * 1e3:.3f}",
        "yes" if one.is_async else "no",
    )


def _operation_row(item: OperationEstimate) -> tuple[str, ...]:
    cycles = "-" if item.cycles is None else str(item.cycles)
    return (item.name, str(item.count), cycles, f"{item.seconds * 1e3:.3f}", item.source[-50:])


def _kernel_lines(kernel: KernelEstimate) -> Iterable[str]:
    time = "unknown" if kernel.seconds is None else f"{kernel.seconds * 1e3:.3f} ms"
    cycles = "unknown" if kernel.cycles is None else str(kernel.cycles)
    yield (
        f"kernel {kernel.name}: {kernel.count} run(s) of {time}, {cycles} cycles "
        f"({kernel.cycles_unconditional} without pl.when), {kernel.hbm_bytes / _MIB:.1f} MiB"
    )
    names = [
        name
        for name in (kernel.loops[0].utilization if kernel.loops else ())
        if any(loop.utilization[name] >= 0.005 for loop in kernel.loops)
    ]
    rows = []
    for index, loop in enumerate(kernel.loops):
        use = [f"{100 * loop.utilization[name]:.0f}" for name in names]
        trips = "?" if loop.trips is None else str(loop.trips)
        times = "?" if loop.iterations is None else str(loop.iterations)
        when = loop.bundles if loop.conditional else loop.conditional_bundles
        rows.append((f"{index}", f"{loop.depth}", f"{loop.bundles}", trips, times, f"{when}", *use))
    header = (
        "loop",
        "depth",
        "bundles",
        "trips",
        "in all",
        "skippable",
        *(f"{n} %" for n in names),
    )
    yield from _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        yield "  ".join(cells).rstrip()
