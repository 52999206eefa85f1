"""Checks what no linter knows: machine-free text, constraints, public documentation, files.

    python tools/check_repository.py

Prints one line per offence and exits 1 if there are any.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("cutbce_ops", "recmodels", "recserve")

# Where packages come from is the installer's business: a mirror must work as well. Both lists
# are put together from parts, so that this file passes its own check.
_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("pypi", "python", "org"), ("pythonhosted", "org"), ("anaconda", "org"),
        ("npmjs", "org"), ("npmjs", "com"), ("crates", "io"), ("proxy", "golang", "org"),
        ("rubygems", "org"), ("docker", "io"), ("ghcr", "io"), ("quay", "io"),
    )
]  # fmt: skip
# An absolute path, not the tail of a relative one or of an address.
_MACHINE_PATH = re.compile(
    r"(?:(?<=file://)|(?<![\w.~$})\]>/-]))/(?:"
    + "|".join(["work", "home", "root", "Users", "mnt"])
    + r")(?![\w.-])"
)
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+]*")


def text_offences(where: str, text: str) -> Iterator[str]:
    """Names of registry hosts and paths of somebody's machine in a file."""
    for number, line in enumerate(text.splitlines(), 1):
        for host in _HOSTS:
            if host in line.lower():
                yield f"{where}:{number}: names a package registry's host ({host})"
        for found in _MACHINE_PATH.findall(line):
            yield f"{where}:{number}: names a folder of one machine ({found})"


def constraints_offences(where: str, text: str) -> Iterator[str]:
    """Lines of a constraints file that are more or less than name==version."""
    for number, line in enumerate(text.splitlines(), 1):
        if not _PINNED.fullmatch(line):
            yield f"{where}:{number}: must be name==version; got {line!r}"


def package_offences(package: Path) -> Iterator[str]:
    """What is missing from the folder of a package: files, or words about public names."""
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        if not (package / name).is_file():
            yield f"{package.name}: {name} is missing"
    changelog = package / "CHANGELOG.md"
    if changelog.is_file() and "Unreleased" not in changelog.read_text(encoding="utf-8"):
        yield f"{package.name}: CHANGELOG.md has no section Unreleased"
    source = package / "src"
    init = ast.parse((source / package.name / "__init__.py").read_text(encoding="utf-8"))
    for node in init.body:
        # `from a.b import c as c` is how a package publishes a name.
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package.name):
            path = source / (str(node.module).replace(".", "/") + ".py")
            for alias in node.names:
                if not (alias.asname or "_").startswith("_"):
                    yield from definition_offences(path, alias.name, f"{package.name}/{path.name}")


def definition_offences(path: Path, name: str, where: str) -> Iterator[str]:
    """What the documentation of one public name lacks."""
    text = path.read_text(encoding="utf-8")
    body = ast.parse(text).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        place = f"{where}:{node.lineno}: {name}"
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield from (f"{place} {what}" for what in _function_gaps(node))
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield from (f"{place} {what}" for what in _class_gaps(node, text.splitlines()))
        elif name in _assigned(node) and not _is_text(following):
            yield f"{place} has no documentation under it"


def _function_gaps(node: ast.FunctionDef) -> Iterator[str]:
    text = ast.get_docstring(node)
    if not text:
        yield "has no docstring"
        return
    arguments = node.args
    has_arguments = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    # A variant of a function may point to it, rather than repeat a dozen arguments.
    if has_arguments and not re.search(r"^Args:|\barguments\b[^.]* of\s+`", text, re.MULTILINE):
        yield "takes arguments, but its docstring has no section Args"
    returned = "None" if node.returns is None else ast.unparse(node.returns)
    # "Returns ..." as the first word says it all where there is no more to say.
    if returned != "None" and not re.search(r"^(Returns|Yields):|\AReturns ", text, re.MULTILINE):
        yield f"returns {returned}, but its docstring has no section Returns"


def _class_gaps(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        yield "has no docstring"
    kinds = " ".join(ast.unparse(each) for each in [*node.decorator_list, *node.bases])
    has_fields = re.search(r"\b(dataclass|NamedTuple)\b", kinds) is not None
    for member, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            if not ast.get_docstring(member):
                yield f"has a method without docstring: {member.name}"
        elif has_fields and isinstance(member, ast.AnnAssign):
            name = ast.unparse(member.target)
            above, own = lines[member.lineno - 2], lines[(member.end_lineno or 0) - 1]
            if not (
                _is_text(following)
                or "metadata=" in ast.unparse(member)
                or "  # " in own
                or above.lstrip().startswith("# ")
                or re.search(rf"^\s*`?{name}`?:", docstring or "", re.MULTILINE)
            ):
                yield f"has a field without documentation: {name}"


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def offences(root: Path) -> Iterator[str]:
    """One line for every offence in the repository at `root`."""
    for path in repository_files(root):
        where = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a binary file
            continue
        yield from text_offences(where, text)
        if where.startswith("constraints/"):
            yield from constraints_offences(where, text)
    for package in PACKAGES:
        yield from package_offences(root / "packages" / package)


def repository_files(root: Path) -> list[Path]:
    """Files that git has or would take in, so that a new file is checked before its commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := root / name).is_file()]


def main() -> int:
    found = list(offences(ROOT))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
