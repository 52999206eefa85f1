"""Importing recserve stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import recserve

CHECK = """
import sys
import recserve
heavy = ["jax", "jaxlib", "scann", "scann_pybind", "polars", "tqdm", "tensorflow"]
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, loaded
import recserve._src.cli
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, loaded
"""


def test_import_loads_nothing_heavy(child_environment):
    subprocess.run([sys.executable, "-c", CHECK], env=child_environment, check=True)


def test_source_imports_neither_trainer_nor_operators():
    for path in Path(recserve.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            modules = [*names, getattr(node, "module", None) or ""]
            assert not {name.split(".")[0] for name in modules} & {"recmodels", "cutbce_ops"}
