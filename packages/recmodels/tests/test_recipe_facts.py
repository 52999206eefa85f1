"""The list of recipes: complete, and made from the recipes themselves."""

import json

import pytest

from recmodels import RECIPE_FACTS, RECIPES, Published, list_recipes
from recmodels._src.cli import main
from recmodels._src.evaluation.measure import DEFAULT_KS

_METRICS = {f"{name}@{k}" for name in ("hit", "recall", "ndcg", "map") for k in DEFAULT_KS}


def test_every_recipe_has_facts_and_a_row():
    assert list(RECIPE_FACTS) == list(RECIPES)
    assert [row.name for row in list_recipes().rows] == list(RECIPES)


@pytest.mark.parametrize("row", list_recipes().rows, ids=lambda row: row.name)
def test_row_follows_its_recipe(row):
    recipe = RECIPES[row.name]
    assert (row.protocol, row.loss, row.mesh) == (recipe.protocol, recipe.loss, recipe.mesh)
    assert row.model.startswith(f"{recipe.model} {recipe.num_layers}x{recipe.hidden_dim}, N=")
    assert all(row.cells())
    if row.published is not None:
        assert row.published.metric in _METRICS
        assert 0 < row.published.value < 1
        assert row.published.source.startswith("arXiv ")


def test_recipes_on_the_same_data_agree_on_its_catalog():
    sizes = {(facts.data, facts.num_items) for facts in RECIPE_FACTS.values()}
    assert len(sizes) == len({data for data, _ in sizes})


def test_table_and_json_hold_the_same(capsys):
    assert main(["recipes"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "name", "data", "protocol", "model", "loss", "mesh", "published", "measured",
    ]  # fmt: skip
    assert lines[-1].endswith("docs/results.md")
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for line, row in zip(lines[:-1], rows, strict=True):
        published = row.pop("published")
        texts = [text or "-" for text in row.values()]
        texts.append(str(Published(**published)) if published else "-")
        assert all(f"  {text}" in f"  {line}" for text in texts)


def test_published_is_read_as_a_sentence():
    assert str(Published("ndcg@10", 0.0531, "arXiv 1")) == "ndcg@10 0.0531 (arXiv 1)"
