"""What `plan` found out about a training step, as objects, text and JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Any

ESTIMATE = "estimated by the TPU compiler, not run on a TPU"
_GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """Per-chip memory, collectives and time of one training step, from the TPU compiler.

    A chip is a device as JAX counts them: on v4 and 7x, one of a chip's two cores.
    """

    recipe: str  # name of the recipe
    topology: str  # slice the step was compiled for, e.g. "v6e:2x4"
    num_items: int  # catalog without the padding row
    batch_size: int  # sequences of a step, over all chips
    max_length: int  # positions of a sequence
    mesh: str  # chips along each axis, e.g. "data=4,model=2"; the batch is split over "data"
    num_chips: int  # chips of the slice
    is_table_sharded: bool  # rows split over all chips; False: the table is on every chip
    chip_bytes: int  # HBM that a chip has
    classes_bytes: dict[str, int]  # HBM per chip of what a step is given, by what it is
    arguments_bytes: int  # HBM per chip: state and batch, with the padding of their layouts
    outputs_bytes: int  # HBM per chip: new state and metrics
    aliased_bytes: int  # outputs that reuse the memory of an argument
    temporaries_bytes: int  # HBM per chip: gradients, activations and whatever is in between
    peak_bytes: int  # highest use of HBM per chip, the program included
    collectives: list[dict[str, Any]]  # kind, shape, bytes, count, axes and ms of alike ones
    step_ms: float  # estimated time of a step, without the kernels of unknown time
    sequences_per_s: float  # trained at that rate, over all chips
    model_flops: float  # arithmetic of the model and its loss in a step, see `plan`
    mfu: float  # share of the chips' bfloat16 peak that this arithmetic reaches, 0 to 1
    untimed_kernels: list[str]  # kernels that the compiler gives no time for
    bound: str  # the resource that is busy longest: a unit of the core, HBM or ICI (the links)
    busy_ms: dict[str, float]  # how long each resource would be busy by itself
    slowest: list[dict[str, Any]]  # name, source, count and ms of kernels and XLA operations
    notes: list[str]  # what is missing from the time or was guessed

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return {"label": ESTIMATE, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclasses.dataclass(frozen=True)
class PlanSweep:
    """One step after another, each with another value of one field of the recipe."""

    field: str  # "batch_size" or "max_length"
    reports: list[PlanReport]  # those that fit, by value
    does_not_fit: list[int]  # values that were tried and need too much memory

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        reports = [report.to_dict() for report in self.reports]
        return {"label": ESTIMATE, **dataclasses.asdict(self), "reports": reports}

    def __str__(self) -> str:
        rows = [_row(report, self.field) for report in self.reports]
        rows += [(str(value), "does not fit", *[""] * 6) for value in sorted(self.does_not_fit)]
        table = _table((self.field, *_COLUMNS), rows)
        head = [_title(self.reports[0])] if self.reports else []
        return "\n".join((*head, *table))


_COLUMNS = ("HBM per chip", "of it", "step", "sequences/s", "MFU", "bound", "without")


def _row(report: PlanReport, field: str) -> tuple[str, ...]:
    return (
        str(getattr(report, field)),
        f"{report.peak_bytes / _GIB:.2f} GiB",
        f"{100 * report.peak_bytes / report.chip_bytes:.1f} %",
        f"{report.step_ms:.2f} ms",
        f"{report.sequences_per_s:.0f}",
        f"{100 * report.mfu:.1f} %",
        report.bound,
        ", ".join(report.untimed_kernels),
    )


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterable[str]:
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    widths = {column: max(len(row[column]) for row in (header, *rows)) for column in used}
    for row in (header, *rows):
        yield "  ".join(row[column].rjust(widths[column]) for column in used).rstrip()


def _title(report: PlanReport) -> str:
    table = "sharded" if report.is_table_sharded else "replicated"
    return (
        f"{report.recipe} on {report.topology} ({report.mesh}), {report.num_items} items, "
        f"table {table}: {ESTIMATE}"
    )


def _lines(report: PlanReport) -> Iterable[str]:
    yield _title(report)
    yield from _memory_lines(report)
    yield "collectives of one step"
    for entry in report.collectives:
        shapes = entry["shape"].split(", ")
        shape = shapes[0] if len(shapes) == 1 else f"{len(shapes)} arrays"
        yield (
            f"  {entry['count']} x {entry['kind']} over {','.join(entry['axes']) or '?'} of "
            f"{shape}, {entry['bytes'] / 1024**2:.3f} MiB each, {entry['ms']:.3f} ms in all"
        )
    missing = f" without {', '.join(report.untimed_kernels)}" if report.untimed_kernels else ""
    yield (
        f"one step of {report.batch_size} sequences of {report.max_length}: "
        f"{report.step_ms:.2f} ms{missing}, bound by {report.bound} ({ESTIMATE})"
    )
    yield (
        f"  {report.sequences_per_s:.0f} sequences/s, {report.model_flops / 1e12:.3g} TFLOP, "
        f"MFU {100 * report.mfu:.1f} % of the bfloat16 peak"
    )
    busy = sorted(report.busy_ms.items(), key=lambda item: -item[1])[:5]
    yield "  busy: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in busy)
    slowest = (f"{part['name']} {part['ms']:.2f} ms" for part in report.slowest[:5])
    yield "  slowest: " + ", ".join(slowest)
    yield from (f"  note: {note}" for note in report.notes)


def _memory_lines(report: PlanReport) -> Iterable[str]:
    yield f"HBM per chip, of {report.chip_bytes / _GIB:.4g} GiB"
    given = {name: size for name, size in report.classes_bytes.items() if size}
    for name, size in (given | {"temporaries": report.temporaries_bytes}).items():
        yield f"  {name:12}{size / _GIB:9.3f} GiB"
    share = 100 * report.peak_bytes / report.chip_bytes
    yield f"  {'peak':12}{report.peak_bytes / _GIB:9.3f} GiB, {share:.1f} %"
