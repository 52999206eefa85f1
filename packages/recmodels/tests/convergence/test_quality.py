"""Quality that the built-in recipes reach on real data; half an hour each, so marked slow."""

import pytest
from real_data import real_data

import recmodels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "file", "format_name", "metric", "floor"),
    [
        # Popularity reaches 0.198 and 0.005.
        ("sasrec-ml-1m", "ml-1m/ml-1m.txt.gz", "pairs", "hit@8", 0.55),
        ("sasrec-beauty", "amazon_beauty/Beauty.txt.gz", "user-lines", "ndcg@10", 0.05),
    ],
)
def test_recipe_reaches_its_floor(tmp_path, recipe, file, format_name, metric, floor):
    store = tmp_path / "store"
    recmodels.prepare(real_data(file), store, format=format_name)
    result = recmodels.train(recipe, store, tmp_path / "run", progress=False)
    assert result.test.hide_seen
    assert result.test.model[metric] >= floor
