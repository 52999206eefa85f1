import json

import jax
import numpy as np
import pytest
from store_cases import distinct_store, tiny_store
from train_cases import chain_store, finished_run, small_recipe

from recmodels import TrainingDivergedError, UserError, train
from recmodels._src.evaluate import evaluate_params
from recmodels._src.train.loop import loss_capacity, usual_capacity
from recmodels._src.train.metrics_log import MetricsLog, read_metrics
from recmodels._src.train.run_directory import RunDirectory


def test_learns_and_beats_popularity():
    _, result = finished_run()
    assert result.test.model["ndcg@8"] > 1.5 * result.test.popularity["ndcg@8"]
    losses = [loss for _, loss in result.loss_curve]
    assert losses[-1] < 0.9 * losses[0]
    assert [step for step, _ in result.loss_curve] == list(range(2, 61, 2))
    assert result.step_ms > 0


def test_run_directory_holds_what_is_promised(tmp_path):
    store = chain_store(tmp_path / "store")
    result = train(small_recipe(num_steps=60), store, tmp_path / "run", progress=False)
    names = {entry.name for entry in result.run_dir.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoints", "bundle", "report.html",
        "summary.json",
    }  # fmt: skip
    config = json.loads((result.run_dir / "config.json").read_text())
    assert config["recipe"] == small_recipe(num_steps=60).to_dict()
    assert config["store"]["digest"] == store.digest
    splits = [(line["step"], line["split"]) for line in read_metrics(result.run_dir)]
    assert [step for step, split in splits if split == "dev"] == list(range(6, 61, 6))
    assert splits[-1] == (60, "test")
    steps = sorted(int(entry.name) for entry in (result.run_dir / "checkpoints").iterdir())
    assert steps == [56, 60]  # keep_checkpoints = 2
    assert any((result.run_dir / "tensorboard").iterdir())


def test_stops_at_the_first_bad_loss_and_keeps_the_good_checkpoint(tmp_path):
    store = chain_store(tmp_path / "store")
    recipe = small_recipe(learning_rate=1e30, warmup_steps=0, log_every=1, checkpoint_every=1)
    message = r"step 1: the parameters are not finite; .* no checkpoint was saved. Lower learning_r"
    with pytest.raises(TrainingDivergedError, match=message):
        train(recipe, store, tmp_path / "none", progress=False)
    with pytest.raises(UserError, match="has no complete checkpoint yet"):
        RunDirectory.open(tmp_path / "none").restore()
    # A good run of two steps that goes on with a rate that ruins it.
    run_dir = tmp_path / "run"
    train(recipe.override(num_steps=2, learning_rate=1e-3), store, run_dir, progress=False)
    (run_dir / "summary.json").unlink()
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(config | {"recipe": recipe.to_dict()}))
    with pytest.raises(TrainingDivergedError, match=r"step 3: .* the checkpoint of step 2 is kept"):
        train(recipe, store, run_dir, progress=False)
    kept = RunDirectory.open(run_dir).restore()
    assert int(kept.step) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("leaf", ["item_embeddings", "output_bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_a_model_that_is_not_finite_is_not_evaluated(leaf, value):
    store, result = finished_run()
    params = dict(RunDirectory.open(result.run_dir).restore().params)
    params[leaf] = params[leaf].at[3].set(value)
    with pytest.raises(TrainingDivergedError, match="step 7: the parameters or the scores of the"):
        evaluate_params(
            params, small_recipe(), store, part="test", step=7, hide_seen=False, progress=False
        )


def test_scores_that_overflow_are_not_evaluated():
    store, result = finished_run()
    params = dict(RunDirectory.open(result.run_dir).restore().params)
    params["item_embeddings"] = params["item_embeddings"].at[3].set(1e18)
    params["encoder"] = jax.tree.map(lambda leaf: leaf + 1e17, params["encoder"])
    with pytest.raises(TrainingDivergedError, match="step 7: the parameters or the scores of the"):
        evaluate_params(
            params, small_recipe(), store, part="test", step=7, hide_seen=False, progress=False
        )


def test_other_settings_other_store_other_folder(tmp_path):
    store, result = finished_run()
    recipe = small_recipe(num_steps=60)
    with pytest.raises(UserError, match=r"other settings \(dropout 0.2 -> 0.3, seed 0 -> 1\)"):
        train(recipe.override(dropout=0.3, seed=1), store, result.run_dir, progress=False)
    other = chain_store(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="is not the store that"):
        train(recipe, other, result.run_dir, progress=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="is not a training run; choose another"):
        train(recipe, store, tmp_path / "full", progress=False)


def test_damaged_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [([[1], [2]], "nothing to train on"), ([[1, 2, 3]], "no user to evaluate")],
)
def test_store_too_short_leaves_nothing_behind(tmp_path, sequences, message):
    store = tiny_store(tmp_path / "store", sequences)
    with pytest.raises(UserError, match=message):
        train(small_recipe(), store, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_capacity_is_the_usual_one_or_all_positions():
    targets = np.full((4, 8, 2), -1)
    sizes = []
    for num_positions in (0, 17, 18, 32):
        targets.reshape(32, 2)[:num_positions, 0] = 1
        sizes.append(loss_capacity(targets, usual=17))
    assert sizes == [17, 17, 32, 32]


def test_hardly_any_batch_exceeds_the_usual_capacity():
    recipe = small_recipe(batch_size=64, max_length=50)
    lengths = np.random.default_rng(0).integers(1, 51, 5000)
    usual = usual_capacity(lengths, recipe)
    totals = np.random.default_rng(1).choice(lengths, (2000, 64)).sum(1)
    assert (totals > usual).mean() < 1e-3
    assert usual < 0.75 * 64 * 50
    assert usual_capacity(np.full(10, 50), recipe) == 64 * 50  # no padding: nothing to save


def test_metrics_log_forgets_what_a_resume_repeats(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (2, 4, 6):
        log.write(step, "train", {"loss": float(step)})
    log.write(4, "test", {"hit@8": 1.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "spl')
    MetricsLog(tmp_path, 4).close()
    assert read_metrics(tmp_path) == [
        {"step": 2, "split": "train", "loss": 2.0},
        {"step": 4, "split": "train", "loss": 4.0},
    ]


def test_bundle_and_evaluation_do_not_need_the_training_process(tmp_path):
    store = distinct_store(tmp_path / "store", [30, 30, 4])
    result = train(small_recipe(num_steps=2), store, tmp_path / "run", progress=False)
    assert result.test.num_users == 2
    assert result.test.popularity["hit@8"] == 0.0  # no held-out item was ever seen before
