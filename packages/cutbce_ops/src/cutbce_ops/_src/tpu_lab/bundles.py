"""Reads the static schedules (VLIW bundles) that the TPU compiler writes for every kernel.

One bundle is one issue cycle. In the text a bundle starts with its address and as many `>` as
loops surround it; `LB:` marks the first bundle of a loop; a loop that counts has a comparison
marked "loop exit test". The utilization file has one row per bundle, under a row of capacities.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) *(?:[A-Z]{2})? *: *(>*) *(?=\{)")
_LOOP = re.compile(r"^ *(?:0x)?[0-9a-f]+ *L[BH] *:")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"= sbr\.rel \(!?%p\w+\) target = \$region(\d+)")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder (%s\w+), (\d+) /\* loop exit test")
_PHI = re.compile(r"(%s\w+) = sphi (%s\w+), (%s\w+)")
_MOVE = re.compile(r"(%s\w+) = smov (?:\(!?%p\w+\), )?(%s\w+|-?\d+)")
_STEP = re.compile(r"(%s\w+) = sadd\.s32 (\d+), (%s\w+)")
_NAME = re.compile(r"entry bundle: %?([\w.\-]+) =")
# Of a grid loop's trips two fill and drain the pipeline around the steps of the grid.
_PIPELINE_MARK = "iteration index, stage"
_PIPELINE_EXTRA_TRIPS = 2
_DELAY_SLOTS = 6  # at most; they follow a branch and run before it is taken


@dataclasses.dataclass(frozen=True)
class KernelLoop:
    """A loop of a kernel, or the code outside of its loops (`depth` 0)."""

    depth: int
    """How many loops it is inside of, itself included."""
    bundles: int
    """Bundles of one trip, without those of the loops inside it."""
    trips: int | None
    """Trips each time it is entered; None where the schedule does not show it."""
    iterations: int | None
    """Trips in one call of the kernel, all of the surrounding loops counted."""
    innermost: bool
    """Whether no loop is inside it."""
    conditional: bool
    """Whether a branch can skip all of it, as `pl.when` does, so that `iterations` are the most;
    False where its iterations were given."""
    conditional_bundles: int
    """Those of its own bundles that a branch can skip."""
    utilization: Mapping[str, float]
    """Share of the slots of each unit that its bundles use, 0 to 1; above 1 is possible where the
    compiler counts one instruction for two slots."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Static schedule of one kernel or fusion."""

    name: str
    """Name of the instruction in the optimised HLO."""
    bundles: int
    """All bundles, each once."""
    loops: tuple[KernelLoop, ...]
    """Code outside of loops first, then the loops in the order of the program."""

    @property
    def inner_loops(self) -> tuple[KernelLoop, ...]:
        """The loops of the deepest level, each by itself."""
        deepest = max(loop.depth for loop in self.loops)
        return tuple(loop for loop in self.loops if loop.depth == deepest and deepest > 0)

    def cycles(self, *, conditional: bool = True) -> int | None:
        """Bundles of one call, every loop multiplied out; None if a loop's trips are not known.

        Args:
            conditional: whether code that a branch can skip counts, each time.

        Returns:
            Issue cycles without stalls.
        """
        total = 0
        for loop in self.loops:
            skipped = loop.bundles if loop.conditional else loop.conditional_bundles
            bundles = loop.bundles if conditional else loop.bundles - skipped
            if bundles and loop.iterations is None:
                return None
            total += bundles * (loop.iterations or 0)
        return total


@dataclasses.dataclass
class _Span:
    """A loop while the text is read: bundles `first` to `last`."""

    depth: int
    first: int
    last: int
    parent: int  # index of the loop around it; 0 is the code outside of loops


def parse_schedule(
    bundles_text: str, utilization_text: str, iterations: Mapping[int, int] | None = None
) -> Schedule:
    """Loops of a schedule with bundles, trips and use of the units.

    Args:
        bundles_text: a file `*-final_bundles.txt` of the compiler's dump.
        utilization_text: the file `*-final_hlo-static-per-bundle-utilization.txt` beside it.
        iterations: trips in one call of loops by their index in `Schedule.loops`, where the
            schedule does not show them, or shows more than will be taken.

    Returns:
        The schedule.
    """
    texts = _bundle_texts(bundles_text)
    spans = _loop_spans(texts)
    owner = _owners(spans, len(texts))
    rows = _utilization_rows(utilization_text)
    skippable = _skippable(texts, owner)
    given = iterations or {}
    total: list[int | None] = []
    loops: list[KernelLoop] = []
    for index, span in enumerate(spans):
        own = [i for i in range(span.first, span.last + 1) if owner[i] == index]
        trips = 1 if index == 0 else _trips(texts, span, own)
        around = 1 if index == 0 else total[span.parent]
        times = None if trips is None or around is None else trips * around
        total.append(given.get(index, times))
        inside_skipped = index > 0 and (
            loops[span.parent].conditional or span.first in skippable.get(span.parent, ())
        )
        loops.append(
            KernelLoop(
                depth=span.depth,
                bundles=len(own),
                trips=trips,
                iterations=total[-1],
                innermost=all(other.parent != index for other in spans[1:]),
                conditional=inside_skipped and index not in given,
                conditional_bundles=sum(i in skippable.get(index, ()) for i in own),
                utilization=_utilization(rows, own),
            )
        )
    name = _NAME.search(bundles_text)
    return Schedule(name[1] if name else "", len(texts), tuple(loops))


def _bundle_texts(text: str) -> list[str]:
    """One text per bundle; comments may run over several lines."""
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += "\n" + line
    return bundles


def _depth(bundle: str) -> int:
    match = _BUNDLE.match(bundle)
    return len(match[2]) if match else 0


def _loop_spans(texts: Sequence[str]) -> list[_Span]:
    depths = [_depth(text) for text in texts]
    heads = [i for i, text in enumerate(texts) if _LOOP.match(text)]
    spans = [_Span(0, 0, len(texts) - 1, 0)]
    for number, head in enumerate(heads):
        depth = depths[head]
        after = (other for other in heads[number + 1 :] if depths[other] <= depth)
        end = next(after, len(texts))
        last = max(i for i in range(head, end) if depths[i] >= depth)
        # The branch back, and what runs in its delay slots, may be printed one level up.
        regions = set(_START.findall(texts[head]))
        back = [i for i in range(head, end) if regions & set(_BRANCH.findall(texts[i]))]
        if back and back[-1] >= last:
            last = back[-1]
            while last + 1 < end and last - back[-1] < _DELAY_SLOTS and "{}" in texts[last + 1]:
                last += 1
        around = [i for i, span in enumerate(spans) if span.first <= head <= span.last]
        spans.append(_Span(depth, head, last, around[-1]))
    return spans


def _owners(spans: Sequence[_Span], length: int) -> list[int]:
    """For every bundle the innermost loop that it belongs to."""
    owner = [0] * length
    for index, span in enumerate(spans):
        owner[span.first : span.last + 1] = [index] * (span.last + 1 - span.first)
    return owner


def _trips(texts: Sequence[str], span: _Span, own: Sequence[int]) -> int | None:
    """Trips from the counter's start, step and bound; None unless all three are constants."""
    text = "\n".join(texts[i] for i in own)
    exits = _EXIT.findall(text)
    if len(exits) != 1:
        return None
    tested, bound = exits[0]
    moves = dict(_MOVE.findall(text))
    steps = {name: (int(step), start) for name, step, start in _STEP.findall(text)}
    before = dict(_MOVE.findall("\n".join(texts[: span.first])))
    for counter, first, following in _PHI.findall(text):
        following = _follow(following, moves)
        if following not in steps or tested not in {following, counter}:
            continue
        step, base = steps[following]
        start = _follow(first, before)
        if base != counter or not re.fullmatch(r"-?\d+", start) or step == 0:
            return None
        trips = math.ceil((int(bound) - int(start)) / step)
        if tested == counter:  # the old value is compared, one trip later
            trips += 1
        if _PIPELINE_MARK in text:
            trips -= _PIPELINE_EXTRA_TRIPS
        return max(trips, 1)
    return None


def _follow(name: str, moves: Mapping[str, str]) -> str:
    for _ in range(len(moves)):
        if name not in moves:
            break
        name = moves[name]
    return name


def _skippable(texts: Sequence[str], owner: Sequence[int]) -> dict[int, set[int]]:
    """For every loop, the bundles that the branches of its own code can jump over."""
    starts = {region: i for i, text in enumerate(texts) for region in _START.findall(text)}
    jumps: dict[int, list[tuple[int, int]]] = {}
    for i, text in enumerate(texts):
        for region in _BRANCH.findall(text):
            if starts.get(region, 0) > i:
                jumps.setdefault(owner[i], []).append((i, starts[region]))
    for index in {owner[i] for i, text in enumerate(texts) if _PIPELINE_MARK in text}:
        # The widest is the pipeline's own: the body waits until its first block is there.
        widest = max(jumps.get(index, []), key=lambda jump: jump[1] - jump[0], default=None)
        jumps[index] = [jump for jump in jumps.get(index, []) if jump != widest]
    return {
        index: {i for start, end in found for i in range(start + 1, end)}
        for index, found in jumps.items()
    }


def _utilization_rows(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    lines = [line for line in text.splitlines() if line.strip()]
    names = next(line for line in lines if "," in line).split(",")
    numbers = [
        [int(value) for value in line.split()] for line in lines if re.fullmatch(r"[\d\s]+", line)
    ]
    return [name.strip() for name in names], numbers[0], numbers[1:]


def _utilization(
    rows: tuple[list[str], list[int], list[list[int]]], own: Sequence[int]
) -> dict[str, float]:
    names, capacity, used = rows
    sums = [0] * len(names)
    for i in own:
        if i < len(used):
            sums = [total + value for total, value in zip(sums, used[i], strict=True)]
    slots = [max(1, size * len(own)) for size in capacity]
    return {
        name: round(total / slot, 4) for name, total, slot in zip(names, sums, slots, strict=True)
    }
