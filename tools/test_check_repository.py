"""The repository check accepts good files and names every kind of offence."""

import subprocess
from pathlib import Path

import check_repository
import pytest


@pytest.mark.parametrize(
    "text",
    [
        "index = 'https://" + "py" + "pi.org/simple'",
        "mirror: files." + "python" + "hosted.org",
        "see https://crates." + "io/crates/x",
    ],
)
def test_registry_hosts(text):
    (line,) = check_repository.text_offences("a/b.md", "fine\n" + text)
    assert line.startswith("a/b.md:2: names a package registry's host")


def path(*parts: str) -> str:
    """A path put together from parts, so that this file names no folder of a machine itself."""
    return "/".join(parts)


@pytest.mark.parametrize(
    "folder", [path("work", "main"), path("home", "me", "data"), "root", path("Users", "me")]
)
@pytest.mark.parametrize("around", ["{}", "x = '{}'", "cd {} && ls", "file://{}", "(see {})"])
def test_machine_paths(folder, around):
    (line,) = check_repository.text_offences("b.py", around.format("/" + folder))
    assert "b.py:1: names a folder of one machine" in line


@pytest.mark.parametrize(
    "text",
    [
        path("..", "work", "data"),
        path("https:", "", "example.net", "home", "page"),
        path("net", "root", "x"),
        path("runs", "home"),
        path("", "workers", "x"),
    ],
)
def test_other_paths_are_fine(text):
    assert list(check_repository.text_offences("b.py", text)) == []


def test_constraints():
    assert (
        list(check_repository.constraints_offences("c.txt", "jax==0.12.0\nA-b_c==1.0.post1")) == []
    )
    for bad in ("jax>=0.12", "# note", "", "jax==1 ; python_version > '3'", "-e .", "x @ file:a"):
        (line,) = check_repository.constraints_offences("c.txt", f"numpy==2.0\n{bad}\n")
        assert line == f"c.txt:2: must be name==version; got {bad!r}"


GOOD = '''
def f(x: int) -> int:
    """Doubles.

    Args:
      x: any number.

    Returns:
      Its double.
    """

def g() -> int:
    """Returns one."""

def h(x: int) -> None:
    """Like f; the arguments are those of `f`."""

def i() -> Iterator[int]:
    """Counts.

    Yields:
      Numbers.
    """

@dataclasses.dataclass(frozen=True)
class C:
    """Holds things.

    Attributes:
      a: documented here.
    """
    a: int
    b: int
    """Documented under."""
    c: int  # documented beside
    # documented above
    d: int
    e: int = field(metadata=dict(help="documented in the metadata"))

    def method(self) -> None:
        """Documented."""

    def _private(self): ...

CONSTANT = 3
"""Documented."""
'''


def _package(folder: Path, definitions: str, names: list[str]) -> Path:
    package = folder / "packages" / "ops"
    source = package / "src" / "ops"
    (source / "_src").mkdir(parents=True)
    for name, text in (("README.md", ""), ("LICENSE", ""), ("CHANGELOG.md", "## Unreleased")):
        (package / name).write_text(text, encoding="utf-8")
    exports = "".join(f"from ops._src.a import {name} as {name}\n" for name in names)
    (source / "__init__.py").write_text(exports, encoding="utf-8")
    (source / "_src" / "a.py").write_text(definitions, encoding="utf-8")
    return package


def test_good_documentation(tmp_path):
    package = _package(tmp_path, GOOD, ["f", "g", "h", "i", "C", "CONSTANT"])
    assert list(check_repository.package_offences(package)) == []


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def f(): ...", "has no docstring"),
        ("class f: ...", "has no docstring"),
        ('def f(x) -> None:\n    """Text."""', "takes arguments, but its docstring has no section"),
        ('def f(*, x) -> None:\n    """Text."""', "takes arguments, but its docstring has no"),
        ('def f() -> int:\n    """Text."""', "returns int, but its docstring has no section"),
        ('class f:\n    """Text."""\n    def m(self): ...', "has a method without docstring: m"),
        ('@dataclass\nclass f:\n    """Text."""\n    a: int', "a field without documentation: a"),
        ('class f(NamedTuple):\n    """Text."""\n    a: int', "a field without documentation: a"),
        ("f = 3", "has no documentation under it"),
        ("f: int = 3", "has no documentation under it"),
    ],
)
def test_bad_documentation(definition, message, tmp_path):
    (line,) = check_repository.package_offences(_package(tmp_path, definition, ["f"]))
    assert line.startswith("ops/a.py:")
    assert message in line


def test_missing_files(tmp_path):
    package = _package(tmp_path, "", [])
    (package / "LICENSE").unlink()
    (package / "CHANGELOG.md").write_text("## 1.0", encoding="utf-8")
    assert list(check_repository.package_offences(package)) == [
        "ops: LICENSE is missing",
        "ops: CHANGELOG.md has no section Unreleased",
    ]


def test_whole_repository(tmp_path, monkeypatch, capsys):
    _package(tmp_path, GOOD, ["f"])
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "py3.12.txt").write_text("jax>=0.12\n", encoding="utf-8")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe/" + b"home/")
    (tmp_path / ".gitignore").write_text("ignored\n", encoding="utf-8")
    (tmp_path / "ignored").write_text("/" + "home/me", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    monkeypatch.setattr(check_repository, "PACKAGES", ("ops",))
    assert check_repository.main() == 1
    shown = capsys.readouterr().out
    assert shown == "constraints/py3.12.txt:1: must be name==version; got 'jax>=0.12'\n"
    (tmp_path / "constraints" / "py3.12.txt").write_text("jax==0.12\n", encoding="utf-8")
    assert check_repository.main() == 0
