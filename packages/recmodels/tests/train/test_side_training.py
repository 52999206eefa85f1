"""Runs that read categories and time gaps: what they learn, resume, export and recommend."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.export
import numpy as np
import polars as pl
import pytest
from store_cases import tiny_store
from train_cases import NUM_ITEMS, category_store, chain_store, small_recipe

from recmodels import UserError, evaluate, recommend, train
from recmodels._src.bundle import write_bundle
from recmodels._src.data.pipeline import history_batches, train_batches
from recmodels._src.data.splits import Split
from recmodels._src.evaluate import evaluate_params, make_query_function
from recmodels._src.evaluation.blocks import UserBlock, user_blocks
from recmodels._src.evaluation.model import ModelRanker
from recmodels._src.models.side_inputs import SideInputs
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.placement import Placement, item_categories
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.warm_start import start_from

FOLDER = Path(__file__).parent
BOTH = {"item_categories": True, "time_gaps": True}
NUM_KINDS = 8  # categories, and lengths of gaps, in the store below


def _signal_store(path, num_users=64, num_pairs=4):
    """What follows every second event is told by its category or, for half of them, by its gap.

    Rows 1..8 follow a category each, rows 9..16 a gap. Every other item occurs once in the whole
    store, so that its own vector is untrained wherever it counts.
    """
    rng = np.random.default_rng(0)
    first_rows = range(1, 2 * NUM_KINDS + 1)  # user 0 has them all, before anything else
    rows, times, categories = [list(first_rows)], [list(first_rows)], [[] for _ in first_rows]
    for user in range(1, num_users):
        row, time = [1], [0]
        for pair in range(num_pairs):
            kind, by_gap = int(rng.integers(NUM_KINDS)), (user + pair) % 2
            categories.append([] if by_gap else [f"kind {kind}"])
            row += [len(categories), 1 + kind + by_gap * NUM_KINDS]
            begin = time[-1] + (4 ** (kind + 1) if by_gap else 1)
            time += [begin, begin + 1]
        rows.append(row)
        times.append(time)
    return tiny_store(path, rows, times=times, categories=categories)


def _hits(store, **options):
    """Hit@1 on the test part after a short training."""
    recipe = small_recipe(
        protocol="leave-one-out", num_targets=1, max_length=12, batch_size=32, dropout=0.0,
        num_steps=150, learning_rate=2e-2, hidden_dim=16, weight_decay=0.0, **options,
    )  # fmt: skip
    num_categories = store.num_categories if recipe.item_categories else 0
    placement = Placement.of_this_machine(recipe, store.num_items + 1, num_categories)
    state = placement.initial_state(recipe, np.ones(store.num_items + 1))
    step, batches = placement.compile_step(recipe), train_batches(store, recipe)
    categories = item_categories(recipe, store, placement.num_rows, None)
    for _ in range(recipe.num_steps):
        batch = next(batches)
        side = placement.side_inputs(batch, categories)
        state, _ = step(state, *placement.global_batch(batch), None, *side)
    found = evaluate_params(
        state.params, recipe, store, part="test", step=0, hide_seen=False, ks=(1,),
        baselines="none", progress=False,
    )  # fmt: skip
    return found.model["hit@1"]


def test_side_inputs_tell_what_nothing_else_does(tmp_path):
    store = _signal_store(tmp_path / "store")
    assert _hits(store) < 0.2  # one of sixteen
    # With one of the two it would be right for its half, and for one in eight of the others: 0.56.
    assert _hits(store, **BOTH) > 0.8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("side")
    store = category_store(folder / "store")
    return store, train(small_recipe(**BOTH), store, folder / "run", progress=False)


def _encode(bundle, store, user, stop=None):
    """Query of a stored history from the bundle alone, as `recserve` computes it."""
    encoder = jax.export.deserialize((bundle / "query_encoder.stablehlo").read_bytes())
    vectors = np.load(bundle / "item_embeddings.npy")
    sequence = store.sequence(user)[:stop]
    stamps = np.load(bundle / "history_times.npy")[slice(*store.offsets[user : user + 2])][:stop]
    gaps = np.concatenate([[-1], np.diff(stamps)])
    rows, read = np.zeros((1, 8), np.int32), np.full((1, 8), -1, np.int32)
    length = min(8, len(sequence))
    rows[0, 8 - length :], read[0, 8 - length :] = sequence[-length:], gaps[-length:]
    return vectors, np.asarray(encoder.call(vectors[rows], rows > 0, read))[0], (rows, read)


def test_bundle_scores_as_the_model(run):
    store, result = run
    state = RunDirectory.open(result.run_dir).restore()
    queries = make_query_function(small_recipe(**BOTH))
    categories = jax.numpy.asarray(store.item_categories.table)
    manifest = json.loads((result.bundle / "bundle.json").read_text())
    assert manifest["encoder"]["inputs"][2] == "history_gaps int32[b,N]"
    assert manifest["vector_dim"] == 8 + 1 + 8
    assert "history_times.npy" in manifest["files"]
    for user in (0, 1, 7):
        vectors, query, (rows, gaps) = _encode(result.bundle, store, user)
        own = queries(state.params, rows, SideInputs(categories, gaps))[0]
        expected = state.params["item_embeddings"] @ own + state.params["output_bias"]
        np.testing.assert_allclose((vectors @ query)[1:], expected[1:], rtol=1e-4, atol=1e-4)


def test_recommendations_are_those_of_the_bundle(run):
    store, result = run
    path = recommend(result.run_dir, k=5, progress=False).path
    lists = pl.read_csv(path).group_by("user_id", maintain_order=True).agg("item_id")
    ids = store.item_ids()
    for user, (_, items) in zip(range(0, store.num_users, 9), lists.rows()[::9], strict=True):
        vectors, query, _ = _encode(result.bundle, store, user)
        scores = (vectors @ query)[1:]
        assert items == ids[np.argsort(-scores, kind="stable")[:5]].tolist()


def test_evaluation_ranks_as_recommendation_does(run, tmp_path):
    # A store without the held-out items is what recommendation would see of the same users.
    store, result = run
    state = RunDirectory.open(result.run_dir).restore()
    split, recipe = Split("next-8"), small_recipe(**BOTH)
    users = np.flatnonzero(split.is_evaluated(store.lengths))
    stops = split.evaluation(store.lengths[users], "test").input_stop
    times = [store.timestamps[slice(*store.offsets[user : user + 2])] for user in users]
    lists = pl.read_parquet(store.path / "items.parquet")["categories"].to_list()
    known = tiny_store(
        tmp_path / "known",
        [*(store.sequence(u)[:n] for u, n in zip(users, stops, strict=True)), [NUM_ITEMS]],
        times=[*(each[:n] for each, n in zip(times, stops, strict=True)), [0]],
        categories=lists,
    )
    rankers = [ModelRanker.of_store(state.params, recipe, each, 12) for each in (store, known)]
    evaluated = {}
    for block in user_blocks(store, split, "test", max_length=20, hide_seen=False, size=64):
        rows = rankers[0].rank(block, 8).rows
        evaluated |= dict(zip(block.user[block.is_user], rows[block.is_user], strict=True))
    recommended = {}
    for batch in history_batches(known, 8, 64):
        block = UserBlock(
            user=batch["user"], history=batch["history"], gaps=batch["gaps"],
            targets=np.full((64, 1), -1), hidden=np.empty((64, 0), np.int32),
        )  # fmt: skip
        rows = rankers[1].rank(block, 8).rows
        recommended |= dict(zip(block.user[block.is_user], rows[block.is_user], strict=True))
    assert len(evaluated) == len(users)
    for place, user in enumerate(users):
        np.testing.assert_array_equal(evaluated[user], recommended[place])


def test_evaluate_repeats_the_test_of_the_training(run):
    _, result = run
    again = evaluate(result.run_dir, baselines="none", progress=False)
    assert again.model == pytest.approx(result.test.model)


def test_resumed_equals_unbroken(run, tmp_path):
    store, result = run
    copy = tmp_path / "run"
    shutil.copytree(result.run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "12")
    shutil.rmtree(copy / "bundle")
    (copy / "summary.json").unlink()
    train(small_recipe(**BOTH), store, copy, progress=False)
    assert read_metrics(copy) == read_metrics(result.run_dir)
    states = [RunDirectory.open(path).restore() for path in (copy, result.run_dir)]
    for got, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(got, expected)
    files = [json.loads((p / "bundle/bundle.json").read_text()) for p in (copy, result.run_dir)]
    for name in ("item_embeddings.npy", "history_times.npy"):
        assert files[0]["files"][name] == files[1]["files"][name]


def test_start_from_finds_categories_by_name(run, tmp_path):
    _, result = run
    chains = chain_store(tmp_path / "chains")
    sequences = [chains.sequence(user) for user in range(chains.num_users)]
    names = [["a new one"], ["c4", "c0"], *[["c2"]] * (NUM_ITEMS - 2)]
    times = [range(len(each)) for each in sequences]
    store = tiny_store(tmp_path / "store", sequences, times=times, categories=names)
    recipe = small_recipe(**BOTH)
    placement = Placement.of_this_machine(recipe, NUM_ITEMS + 1, store.num_categories)
    new = RunDirectory.create_or_resume(tmp_path / "run", recipe, store, num_rows=NUM_ITEMS + 1)
    fresh = placement.initial_state(recipe, np.ones(NUM_ITEMS + 1))
    begun = start_from(fresh, result.run_dir, new, store, placement).params
    old = RunDirectory.open(result.run_dir).restore().params
    np.testing.assert_array_equal(begun["gap_embeddings"], old["gap_embeddings"])
    got, wanted = begun["category_embeddings"], old["category_embeddings"]
    assert store.item_categories.names == ["a new one", "c0", "c2", "c4"]
    np.testing.assert_array_equal(
        got[2:], wanted[jax.numpy.array([1, 3, 5])]
    )  # of c0, c1, c2, c3, c4
    np.testing.assert_array_equal(got[1], fresh.params["category_embeddings"][1])


@pytest.mark.parametrize("option", list(BOTH))
def test_a_store_that_lacks_what_the_recipe_reads(tmp_path, option):
    store, recipe = chain_store(tmp_path / "store"), small_recipe(**{option: True})
    message = rf"`{option}` needs .*, and .*store has none; prepare it with --"
    with pytest.raises(UserError, match=message):
        train(recipe, store, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=message):
        write_bundle(tmp_path / "bundle", recipe, {}, store, step=0)
    assert not (tmp_path / "bundle").exists()


def test_eight_devices_equal_one(tmp_path):
    script = """
        import sys, jax, numpy as np
        from train_cases import category_store, small_recipe
        from recmodels._src.data.pipeline import train_batches
        from recmodels._src.evaluate import evaluate_params
        from recmodels._src.train.placement import Placement, item_categories
        store, results = category_store(sys.argv[1]), []
        for mesh, table in (("data=1", "replicated"), ("data=4,model=2", "sharded")):
            recipe = small_recipe(
                item_categories=True, time_gaps=True, mesh=mesh, table=table, num_heads=1
            )
            vocab_size, num_categories = store.num_items + 1, store.num_categories
            placement = Placement.of_this_machine(recipe, vocab_size, num_categories)
            state = placement.initial_state(recipe, np.ones(vocab_size))
            sharding = placement.loss_sharding
            categories = item_categories(recipe, store, placement.num_rows, sharding)
            step, batches = placement.compile_step(recipe), train_batches(store, recipe)
            for _ in range(2):
                batch = next(batches)
                side = placement.side_inputs(batch, categories)
                state, metrics = step(state, *placement.global_batch(batch), None, *side)
            found = evaluate_params(
                state.params, recipe, store, part="test", step=2, hide_seen=False,
                sharding=sharding, baselines="none", progress=False,
            )
            results.append((state.params, metrics.loss, found.model))
        shard = categories.sharding.shard_shape(categories.shape)
        assert shard == (1024 // 8, categories.shape[1]), shard
        (one, loss, model), (many, other_loss, other_model) = results
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        for name in ("item_embeddings", "category_embeddings", "gap_embeddings"):
            many[name] = np.asarray(many[name])[: len(one[name])]
            np.testing.assert_allclose(many[name], one[name], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(
            list(other_model.values()), list(model.values()), atol=0.04
        )
    """
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
