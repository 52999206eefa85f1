"""Writes `v1/`: an index folder of format version 1 and what it must answer, for ever.

Run it only to add a folder for a new format version, on the oldest supported JAX, because encoders
are readable by newer releases than the one that wrote them:

    python packages/recserve/tests/golden/make_golden.py
"""

import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np

import recserve

HERE = Path(__file__).parent


def main() -> None:
    """Writes the folder of the current format version."""
    spec = importlib.util.spec_from_file_location("toys", HERE.parent / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    toys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toys)
    with tempfile.TemporaryDirectory() as scratch:
        source = toys.write_toy_bundle(Path(scratch) / "bundle", item_ids=range(1000, 1060, 3))
        config = recserve.SearcherConfig(searcher="exact")
        recserve.build(source.path, HERE / "v1" / "index", config=config)
    recommender = recserve.Recommender.open(HERE / "v1" / "index")
    vector = np.arange(-2, 3, dtype=np.float32)[None]
    answers = {
        "vector": recommender.search(vector, 5)[0],
        "history": recommender.recommend([1000, 1003, 1059], 5),
        "user": recommender.recommend_user(12, 5, exclude_seen=False),
        "nothing": recommender.recommend([], 5),
    }
    content = {
        name: {"item_ids": found.item_ids, "scores": found.scores}
        for name, found in answers.items()
    }
    text = json.dumps(content, indent=2) + "\n"
    (HERE / "v1" / "expected.json").write_text(text)


if __name__ == "__main__":
    main()
