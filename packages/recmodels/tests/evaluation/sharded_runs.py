"""Evaluates one fresh model on one device and on a mesh of eight, in its own process.

    python sharded_runs.py FOLDER

FOLDER gets a small store; the evaluations are printed as JSON, by mesh.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from train_cases import chain_store, small_recipe

from recmodels._src.evaluate import evaluate_params, training_counts
from recmodels._src.train.placement import Placement


def main(folder: Path) -> None:
    """Makes and prints the evaluations."""
    store = chain_store(folder / "store")
    found = {}
    for mesh in ("data=1", "data=4,model=2"):
        recipe = small_recipe(mesh=mesh, table="sharded")
        counts = training_counts(store, recipe)
        placement = Placement.of_this_machine(recipe, store.num_items + 1)
        params = placement.initial_state(recipe, counts).params
        evaluation = evaluate_params(
            params, recipe, store, part="test", step=0, hide_seen=True, item_counts=counts,
            sharding=placement.loss_sharding, detail="full", progress=False,
        )  # fmt: skip
        found[mesh] = evaluation.to_dict()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
