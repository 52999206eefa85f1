"""Index folders of every format version load and answer as on the day they were written."""

import json
from pathlib import Path

import numpy as np
import pytest

import recserve

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if (path / "index").is_dir())


def check(found, expected):
    """Compares a recommendation with its pinned form."""
    assert list(found.item_ids) == expected["item_ids"]
    np.testing.assert_allclose(found.scores, expected["scores"], rtol=1e-6)


def test_there_is_a_folder_for_the_current_version():
    from recserve._src.header import INDEX

    expected = [f"v{version}" for version in range(1, INDEX.version + 1)]
    assert expected == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_pinned_answers(version):
    recommender = recserve.Recommender.open(GOLDEN / version / "index")
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    vector = np.arange(-2, 3, dtype=np.float32)[None]
    check(recommender.search(vector, 5)[0], expected["vector"])
    check(recommender.recommend([1000, 1003, 1059], 5), expected["history"])
    check(recommender.recommend_user(12, 5, exclude_seen=False), expected["user"])
    check(recommender.recommend([], 5), expected["nothing"])


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_folders_stay_small(version):
    files = [path for path in (GOLDEN / version).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 50_000
