"""Reads optimised HLO text: computations, instructions, and how often each of them runs."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_CALLED = re.compile(r"\b(?:body|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(\S+?)[,)])"
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(
    r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\](?P<layout>\{[^}]*\})?"
)
_PRED_BITS = 8
# The one attribute that is written over several lines.
_KERNEL_METADATA = re.compile(r"kernel_metadata=\{\n.*?\n\}", re.DOTALL)
# Fusions are one instruction for the machine: what is inside of them does not run by itself.
_CALLERS = frozenset({"call", "call-start", "async-start", "while", "conditional"})
_OTHER_THREAD = "async_execution_thread="
_COPIES = frozenset({"copy", "bitcast", "convert"})


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's shape."""

    num_bytes: int
    in_hbm: bool
    """False where the layout puts it in VMEM or another space on the chip."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    """The text after the operands."""
    arguments: str
    """The text between the parentheses, such as the value of a constant."""
    is_root: bool

    def arrays(self) -> list[Array]:
        """The arrays of its result."""
        return arrays_of(self.shape)

    def called(self) -> list[str]:
        """Computations that it runs or applies."""
        names = _CALLED.findall(self.attributes)
        for listed, single in _BRANCHES.findall(self.attributes):
            names += _OPERAND.findall(listed) + [single.lstrip("%")] * bool(single)
        return names


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations of a program by name, in the order of their instructions."""

    computations: Mapping[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction of the machine with its number of runs in one call of the program."""

    instruction: Instruction
    computation: str
    times: int
    known: bool
    """False inside a loop whose trips are unknown; `times` then counts one trip of it."""
    offloaded: bool
    """Whether another core than the TensorCore runs it, such as the SparseCore."""


def arrays_of(shape: str) -> list[Array]:
    """Arrays of a shape's text; a tuple has several."""
    found = []
    for match in _ARRAY.finditer(shape):
        sizes = [int(size) for size in match["dims"].split(",") if size]
        bits = math.prod(sizes) * int(match["bits"] or _PRED_BITS)
        found.append(Array(math.ceil(bits / 8), "S(" not in (match["layout"] or "")))
    return found


def parse_module(text: str) -> Module:
    """Computations and instructions of optimised HLO text."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in _KERNEL_METADATA.sub(_in_one_line, text).splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = computations.setdefault(header["name"], {})
                entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match)
            current[instruction.name] = instruction
    return Module(computations, entry)


def _in_one_line(match: re.Match[str]) -> str:
    return match[0].replace("\n", "")


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match["rest"]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, call = rest[:end], rest[end:].lstrip()
    opening = call.find("(")
    closing = _closing(call, opening)
    arguments = call[opening + 1 : closing]
    return Instruction(
        name=match["name"],
        opcode=call[:opening],
        shape=shape,
        operands=tuple(_OPERAND.findall(arguments)),
        attributes=call[closing + 1 :],
        arguments=arguments,
        is_root=bool(match["root"]),
    )


def _closing(text: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at `opening`."""
    level = 0
    for position in range(opening, len(text)):
        level += {"(": 1, ")": -1}.get(text[position], 0)
        if level == 0:
            return position
    return len(text) - 1


def executions(module: Module) -> Iterator[Execution]:
    """Every instruction that runs, loops multiplied out; of a conditional, all branches."""
    yield from _run(module, Execution(_START, module.entry, 1, known=True, offloaded=False))


_START = Instruction("", "", "", (), "", "", is_root=False)


def _run(module: Module, caller: Execution) -> Iterator[Execution]:
    """What runs in the computation of `caller`, and in those that it calls in turn."""
    times = caller.times
    computation = module.computations.get(caller.computation, {})
    for instruction in computation.values():
        here = dataclasses.replace(caller, instruction=instruction)
        yield here
        if instruction.opcode not in _CALLERS:
            continue
        trips = loop_trips(module, computation, instruction) if instruction.opcode == "while" else 1
        inside = times * (1 if trips is None else trips)
        for called in instruction.called():
            inner = Execution(
                instruction=instruction,
                computation=called,
                times=inside,
                known=here.known and trips is not None,
                offloaded=here.offloaded or _OTHER_THREAD in instruction.attributes,
            )
            yield from _run(module, inner)


def loop_trips(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a `while`: the compiler's own count, or one that goes from a constant to another.

    Returns:
        None if it is neither.
    """
    if stated := _KNOWN_TRIPS.search(loop.attributes):
        return int(stated[1])
    condition, body = _CONDITION.search(loop.attributes), _BODY.search(loop.attributes)
    if not condition or not body or not loop.operands:
        return None
    compared = _compared(module.computations.get(condition[1], {}))
    if compared is None:
        return None
    position, bound = compared
    start = _constant(computation, _element(computation, loop.operands[0], position))
    if start is None or not _adds_one(module.computations.get(body[1], {}), position):
        return None
    return max(0, bound - start)


def _compared(condition: Computation) -> tuple[int, int] | None:
    """Position in the loop's state and bound, if the condition is `state[position] < bound`."""
    root = next((item for item in condition.values() if item.is_root), None)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    left = _source(condition, root.operands[0])
    bound = _constant(condition, root.operands[1])
    index = _INDEX.search(left.attributes) if left else None
    if left is None or left.opcode != "get-tuple-element" or index is None or bound is None:
        return None
    return int(index[1]), bound


def _adds_one(body: Computation, position: int) -> bool:
    root = next((item for item in body.values() if item.is_root), None)
    if root is None or root.opcode != "tuple" or position >= len(root.operands):
        return False
    added = _source(body, root.operands[position])
    if added is None or added.opcode != "add":
        return False
    values = [_source(body, name) for name in added.operands]
    ones = [_constant(body, name) == 1 for name in added.operands]
    counters = [_reads(value, position) for value in values]
    return any(ones) and any(counters)


def _reads(value: Instruction | None, position: int) -> bool:
    if value is None or value.opcode != "get-tuple-element":
        return False
    index = _INDEX.search(value.attributes)
    return index is not None and int(index[1]) == position


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction behind copies."""
    found = computation.get(name)
    while found is not None and found.opcode in _COPIES and found.operands:
        found = computation.get(found.operands[0])
    return found


def _element(computation: Computation, name: str, position: int) -> str:
    state = _source(computation, name)
    if state is None or state.opcode != "tuple" or position >= len(state.operands):
        return ""
    return state.operands[position]


def _constant(computation: Computation, name: str) -> int | None:
    found = _source(computation, name)
    if found is None or found.opcode != "constant":
        return None
    return int(found.arguments) if re.fullmatch(r"-?\d+", found.arguments) else None
