"""One of two processes that train the small recipe together; run by test_processes.py.

    python process_of_two.py PORT PROCESS_ID STORE RUN MESH

With MESH "alone" it trains without the other one, on the devices of its own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
from train_cases import small_recipe

import recmodels


def main(port: str, process_id: str, store: str, run_dir: str, mesh: str) -> None:
    """Trains and prints the final loss and a metric, which all processes know."""
    if mesh == "alone":
        mesh = "data=4"
    else:
        jax.distributed.initialize(f"localhost:{port}", 2, int(process_id))
    recipe = small_recipe(mesh=mesh, table="sharded", weight_decay=0.1)
    result = recmodels.train(recipe, store, run_dir, progress=False)
    print("result", result.loss_curve[-1], result.test.model["hit@8"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
