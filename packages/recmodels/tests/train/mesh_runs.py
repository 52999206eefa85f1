"""Trains the small recipe on eight CPU devices, in its own process.

    python mesh_runs.py FOLDER

FOLDER/store is read; FOLDER gets one run for each of `MESHES`, named after it, and "resumed", which
is the last of them cut back to its second checkpoint and continued.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from train_cases import small_recipe

import recmodels

MESHES = ("data=1", "data=4,model=2")


def main(folder: Path) -> None:
    """Makes the runs."""
    store = folder / "store"
    for mesh in MESHES:
        recipe = small_recipe(mesh=mesh, table="sharded", weight_decay=0.1)
        recmodels.train(recipe, store, folder / mesh, progress=False)
    run = folder / "resumed"
    shutil.copytree(folder / MESHES[-1], run)
    shutil.rmtree(run / "checkpoints" / "12")
    shutil.rmtree(run / "bundle")
    (run / "summary.json").unlink()
    recmodels.train(recipe, store, run, progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
