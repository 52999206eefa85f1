"""The layer check passes on this repository and names every kind of offence."""

from pathlib import Path

import check_layers
import pytest


@pytest.fixture
def repository(tmp_path):
    """A small repository without offences; `write` replaces a file of it."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return tmp_path

    write("packages/cutbce_ops/src/cutbce_ops/__init__.py", "from cutbce_ops._src.a import f as f")
    write("packages/cutbce_ops/tests/oracle.py", "import cutbce_ops._src.a")
    write("packages/cutbce_ops/src/cutbce_ops/_src/hardware.py", "import jax\njax.devices()")
    write("packages/cutbce_ops/src/cutbce_ops/_src/sharded.py", "import jax\njax.lax.psum(1, 'x')")
    write("packages/cutbce_ops/src/cutbce_ops/lab.py", "")
    write("tools/helper.py", "")
    return write


def test_this_repository_passes():
    assert list(check_layers.offences(check_layers.ROOT)) == []


def test_a_good_repository_passes(repository):
    root = repository(
        "packages/recmodels/src/recmodels/_src/b.py",
        "import cutbce_ops\nfrom cutbce_ops import f, lab\ncutbce_ops.f()\nmesh.devices\nx.psum()",
    )
    assert list(check_layers.offences(root)) == []


OPS = "packages/cutbce_ops/src/cutbce_ops/_src/a.py"
MODELS = "packages/recmodels/src/recmodels/_src/b.py"
SERVE = "packages/recserve/src/recserve/_src/c.py"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (OPS, "import recmodels", "recmodels: cutbce_ops must not import recmodels"),
        (OPS, "def f():\n    from recserve import build", "a.py:2: recserve.build: cutbce_ops"),
        (MODELS, "import recserve._src.build", "recmodels must not import recserve"),
        (SERVE, "import cutbce_ops as ops", "recserve must not import cutbce_ops"),
        (SERVE, "from recmodels import prepare", "recserve must not import recmodels"),
        (MODELS, "from cutbce_ops._src.a import f", "not a public name of cutbce_ops"),
        (MODELS, "import cutbce_ops as o\no._src.a.f()", "cutbce_ops._src.a.f: not a public"),
        (MODELS, "from cutbce_ops import hidden", "cutbce_ops.hidden: not a public name"),
        (MODELS, "from ..x import y", "imports are absolute"),
        (OPS, "import jax\njax.devices()", "a.py:2: jax.devices: only hardware.py asks"),
        (OPS, "import jax as j\nn = j.local_device_count()", "only hardware.py asks"),
        (OPS, "from jax import default_backend", "only hardware.py asks"),
        (OPS, "from jax import lax\nlax.psum(1, 'x')", "jax.lax.psum: shard_map and collectives"),
        (OPS, "import jax\njax.shard_map", "collectives live in sharded.py"),
        (MODELS, "from jax.experimental.shard_map import shard_map", "live in sharded.py"),
        (SERVE, "import helper", "c.py:1: helper is outside the package"),
        (OPS, "from tools import helper", "tools.helper is outside the package"),
        (OPS, "import oracle", "oracle is outside the package"),
        ("packages/recmodels/tests/test_b.py", "import helper", "helper is outside the package"),
    ],
)
def test_offences_are_named(name, text, message, repository):
    found = list(check_layers.offences(repository(name, text)))
    assert any(message in line for line in found), found
    assert all(line.startswith(name) for line in found)


def test_status_and_output(repository, monkeypatch, capsys):
    monkeypatch.setattr(check_layers, "ROOT", repository(OPS, "import recmodels"))
    assert check_layers.main() == 1
    assert capsys.readouterr().out == f"{OPS}:1: recmodels: cutbce_ops must not import recmodels\n"
