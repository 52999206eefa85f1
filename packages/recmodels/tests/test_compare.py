import dataclasses
import json
import re
import shutil

import numpy as np
import polars as pl
import pytest
from train_cases import finished_run, small_recipe

from recmodels import UserError, compare, evaluate, train
from recmodels._src.compare import paired_differences
from recmodels._src.train.run_directory import RunDirectory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the finished run and of one that has hardly begun to learn, on one store."""
    store, result = finished_run()
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(result.run_dir, folder / "long", ignore=shutil.ignore_patterns("ranks"))
    train(small_recipe(num_steps=2), store, folder / "short", progress=False)
    return folder


def _with_config(run, path, section, **changes):
    """A copy of the run whose config.json says something else."""
    shutil.copytree(run, path, ignore=shutil.ignore_patterns("ranks"))
    config = json.loads((path / "config.json").read_text())
    config[section] |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def _replaced(name, value):
    """Puts another value into the first place of a column of lists."""

    def damage(table):
        values = table[name].to_numpy().copy()
        values[0, 0] = value
        return table.with_columns(pl.Series(name, values))

    return damage


def test_a_run_equals_itself(runs):
    found = compare(runs / "long", runs / "long", progress=False)
    assert {"hit@8", "recall@8", "ndcg@8", "map@8", "mrr", "hit@8-head"} <= set(found.metrics)
    for each in found.metrics.values():
        assert each == dataclasses.replace(each, b=each.a, difference=0, low=0, high=0, p_value=1)


def test_two_runs_give_both_means_and_their_difference(runs):
    found = compare(runs / "short", runs / "long", part="dev", progress=False)
    both = [evaluate(runs / name, part="dev", progress=False) for name in ("short", "long")]
    assert found.num_users == both[0].num_users
    for name, each in found.metrics.items():
        assert (each.a, each.b) == tuple(pytest.approx(one.model[name]) for one in both)
        assert each.difference == pytest.approx(each.b - each.a)
        assert each.low <= each.difference <= each.high
    assert found.metrics["mrr"].low > 0  # one has learned, the other has not
    assert found.metrics["mrr"].p_value < 0.01
    text = str(found)
    mrr = found.metrics["mrr"]
    assert "dev of next-8: 54 users, 8 held-out item(s) each" in text
    assert f"{mrr.a:.4f}    {mrr.b:.4f}    {mrr.difference:+.4f}" in text
    assert json.loads(json.dumps(found.to_dict()))["metrics"]["mrr"]["low"] == mrr.low


def test_the_difference_of_equal_users_is_surer_than_two_means_are():
    # B is better by 0.05 for every user, though users differ far more than that.
    a = {"m": np.random.default_rng(0).random(200)}
    found = paired_differences(a, {"m": a["m"] + 0.05})["m"]
    assert (found.low, found.high) == (pytest.approx(0.05), pytest.approx(0.05))
    shuffled = paired_differences(a, {"m": np.random.default_rng(1).permutation(a["m"] + 0.05)})
    assert shuffled["m"].difference == pytest.approx(0.05)
    assert shuffled["m"].high - shuffled["m"].low > 0.05
    assert shuffled["m"].p_value > 0.02


def test_kept_ranks_are_used_for_the_same_checkpoint_only(runs, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(runs / "long", run)
    before = compare(run, run, hide_seen=True, progress=False)
    kept = run / "ranks" / "test-hidden.parquet"
    shutil.copyfile(kept, tmp_path / "kept")

    def measured_again(*_):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr("recmodels._src.compare.measure_run", measured_again)
        assert compare(run, run, hide_seen=True, progress=False) == before
    # Ranks of another model, and a damaged file, are made again.
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(runs / "short" / "checkpoints", run / "checkpoints")
    assert compare(run, run, hide_seen=True, progress=False).metrics != before.metrics
    content = kept.read_bytes()
    kept.write_bytes(content[: len(content) // 2])
    with pytest.warns(
        UserWarning, match=r"test-hidden\.parquet is damaged .*; it is measured again"
    ):
        compare(run, run, hide_seen=True, progress=False)
    assert kept.read_bytes() == content != (tmp_path / "kept").read_bytes()


DAMAGED_RANKS = {
    "cut": (lambda table: table.head(7), "it is not of the 54 users that are evaluated"),
    "other users": (lambda table: table.with_columns(pl.col("user") + 1), "it is not of the 54"),
    "no ranks": (lambda table: table.drop("ranks"), "ranks"),
    "words": (lambda table: table.with_columns(ranks=pl.lit("x")), "not integers [54, 8]"),
    "narrow": (
        lambda table: table.with_columns(pl.col("ranks").reshape((-1, 8)).arr.head(3)),
        "not integers [54, 8]",
    ),
    "rank outside": (_replaced("ranks", 41), "ranks are not all between -1 and 40"),
    "target outside": (_replaced("targets", -7), "targets are not all between -1 and 40"),
    "target without rank": (_replaced("ranks", -1), "not every target has a rank"),
}


@pytest.mark.parametrize("name", DAMAGED_RANKS)
def test_damaged_ranks_are_measured_again(runs, tmp_path, name):
    run, (damage, message) = tmp_path / "run", DAMAGED_RANKS[name]
    shutil.copytree(runs / "long", run)
    before = compare(run, run, progress=False)
    file = run / "ranks" / "test-shown.parquet"
    metadata, table = pl.read_parquet_metadata(file), pl.read_parquet(file)
    identity = {"recmodels": metadata["recmodels"]}
    damage(table).write_parquet(file, metadata=identity)
    with pytest.warns(UserWarning, match=rf"test-shown\.parquet is damaged .*{re.escape(message)}"):
        assert compare(run, run, progress=False) == before
    assert pl.read_parquet(file).equals(table)


def test_runs_that_cannot_be_compared(runs, tmp_path):
    other = _with_config(runs / "long", tmp_path / "other", "store", digest="0" * 64)
    with pytest.raises(UserError, match=r"long and .*other cannot be .* trained on different st"):
        compare(runs / "long", other)
    for changes, message in (
        ({"protocol": "leave-one-out"}, "protocol next-8 and leave-one-out hold out different"),
        ({"num_targets": 4}, "num_targets 8 and 4 hold out different items"),
        ({"hide_seen": True}, "hide_seen is False and True; choose one with --hide-seen"),
    ):
        other = _with_config(runs / "long", tmp_path / next(iter(changes)), "recipe", **changes)
        with pytest.raises(UserError, match=message):
            compare(runs / "long", other)
    chosen = compare(runs / "long", tmp_path / "hide_seen", hide_seen=True, progress=False)
    assert chosen.hide_seen
    assert chosen.metrics["mrr"].difference == 0
    with pytest.raises(UserError, match=r"is not a training run"):
        compare(runs / "long", tmp_path / "nowhere")


def test_leave_one_out_runs_with_other_training_targets_are_comparable(runs, tmp_path):
    # Both hold out the last item; how many items a position predicts in training is their choice.
    changes = {"protocol": "leave-one-out", "num_targets": 1}
    one = _with_config(runs / "long", tmp_path / "one", "recipe", **changes)
    changes["num_targets"] = 8
    many = _with_config(runs / "long", tmp_path / "many", "recipe", **changes)
    found = compare(one, many, progress=False)
    assert (found.protocol, found.num_targets) == ("leave-one-out", 1)
    assert RunDirectory.open(many).recipe.num_targets == 8
