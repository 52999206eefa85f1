"""Checks that imports point one way and that devices and collectives stay in their files.

    python tools/check_layers.py

Prints one line per offence and exits 1 if there are any.
"""

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What each package must not import; recmodels uses recserve's input format, not its code.
FORBIDDEN_IMPORTS = {
    "cutbce_ops": {"recmodels", "recserve"},
    "recmodels": {"recserve"},
    "recserve": {"cutbce_ops", "recmodels"},
}
# Tile sizes and the choice of implementation must not depend on the devices at hand, so that a
# machine without a TPU can compile for one.
DEVICE_QUERIES = {
    "default_backend", "device_count", "devices", "local_device_count", "local_devices",
    "process_count", "process_index", "xla_bridge",
}  # fmt: skip
DEVICE_FILE = "hardware.py"
COLLECTIVES = {
    "all_gather", "all_to_all", "axis_index", "pbroadcast", "pmax", "pmean", "pmin", "ppermute",
    "pshuffle", "psum", "psum_scatter", "shard_map",
}  # fmt: skip
COLLECTIVES_FILE = "sharded.py"


@dataclasses.dataclass(frozen=True)
class Use:
    """A dotted name, such as `jax.lax.psum`, that a file imports or reads."""

    line: int
    name: str

    @property
    def parts(self) -> list[str]:
        """The name, split at its dots."""
        return self.name.split(".")


def uses_of(source: str) -> list[Use]:
    """All dotted names of a file that start at an import, aliases undone."""
    tree = ast.parse(source)
    origin: dict[str, str] = {}  # local name -> what it stands for
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                origin[alias.asname or first] = alias.name if alias.asname else first
                uses.append(Use(node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                origin[alias.asname or alias.name] = f"{module}.{alias.name}"
                uses.append(Use(node.lineno, f"{module}.{alias.name}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            first, _, rest = name.partition(".")
            if first in origin:
                uses.append(Use(node.lineno, f"{origin[first]}.{rest}"))
    return uses


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def public_names(init: str) -> set[str]:
    """Names that an `__init__.py` with this text re-exports."""
    return {
        alias.asname or alias.name
        for node in ast.parse(init).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def offences(root: Path) -> Iterator[str]:
    """One line for every offence in the packages under `root`."""
    packages = root / "packages"
    outside = {"tools", "tests", "conftest", *_modules(root / "tools")}
    for package in FORBIDDEN_IMPORTS:
        folder = packages / package
        helpers = {name for tests in folder.rglob("tests") for name in _modules(tests)}
        for path in sorted(folder.rglob("*.py")):
            is_source = (folder / "src") in path.parents
            banned = outside | helpers if is_source else outside - {"tests", "conftest"}
            where = path.relative_to(root).as_posix()
            found = uses_of(path.read_text(encoding="utf-8"))
            if is_source:
                ops_init = packages / "cutbce_ops" / "src" / "cutbce_ops" / "__init__.py"
                yield from _source_offences(package, path, where, found, ops_init)
            for use in found:
                if use.parts[0] in banned:
                    yield f"{where}:{use.line}: {use.name} is outside the package"


def _modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")}


def _source_offences(
    package: str, path: Path, where: str, found: list[Use], ops_init: Path
) -> Iterator[str]:
    public_modules = {name for name in _modules(ops_init.parent) if not name.startswith("_")}
    public_ops = public_names(ops_init.read_text(encoding="utf-8")) | public_modules
    for use in found:
        first, *rest = use.parts
        place = f"{where}:{use.line}: {use.name}"
        if first == "":
            yield f"{place}: imports are absolute"
        if first in FORBIDDEN_IMPORTS[package]:
            yield f"{place}: {package} must not import {first}"
        if package == "recmodels" and first == "cutbce_ops" and rest and rest[0] not in public_ops:
            yield f"{place}: not a public name of cutbce_ops"
        if first != "jax":
            continue
        if package == "cutbce_ops" and path.name != DEVICE_FILE and DEVICE_QUERIES & {*rest}:
            yield f"{place}: only {DEVICE_FILE} asks JAX for devices"
        if path.name != COLLECTIVES_FILE and COLLECTIVES & {*rest}:
            yield f"{place}: shard_map and collectives live in {COLLECTIVES_FILE}"


def main() -> int:
    found = sorted(set(offences(ROOT)))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
