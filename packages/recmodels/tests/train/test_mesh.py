"""Training on a mesh of eight devices equals training on one, whatever the layout."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from mesh_runs import MESHES
from train_cases import NUM_ITEMS, chain_store, small_recipe

from recmodels import UserError, evaluate
from recmodels._src.recipe import parse_mesh
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.placement import SHARDED_FROM_ITEMS, Placement
from recmodels._src.train.run_directory import RunDirectory

VOCAB = NUM_ITEMS + 1
FOLDER = Path(__file__).parent
_ENVIRONMENT = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "PYTHONPATH": os.pathsep.join(
        [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    ),
}


def _run_on_eight_devices(*arguments: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    chain_store(folder / "store")
    _run_on_eight_devices(str(FOLDER / "mesh_runs.py"), str(folder))
    return folder


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_sharded_training_equals_one_device(runs, mesh):
    one, many = read_metrics(runs / MESHES[0]), read_metrics(runs / mesh)
    assert [(line["step"], line["split"]) for line in one] == [
        (line["step"], line["split"]) for line in many
    ]
    for expected, got in zip(one, many, strict=True):
        if expected["split"] == "train":
            np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-5)
        else:  # a rank or two may flip where scores differ in their last digit
            np.testing.assert_allclose(
                list(got.values())[2:], list(expected.values())[2:], atol=0.04
            )
    states = [RunDirectory.open(runs / name).restore() for name in (MESHES[0], mesh)]
    for expected, got in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("mesh", MESHES)
def test_unused_rows_stay_zero_and_are_not_exported(runs, mesh):
    run = RunDirectory.open(runs / mesh)
    state = run.restore()
    assert run.num_rows == state.params["item_embeddings"].shape[0] == 1024
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.shape[:1] == (1024,):
            assert not np.any(leaf[VOCAB:]), path
    vectors = np.load(runs / mesh / "bundle" / "item_embeddings.npy")
    assert vectors.shape == (VOCAB, 9)
    np.testing.assert_array_equal(vectors[1:, :8], state.params["item_embeddings"][1:VOCAB])
    manifest = json.loads((runs / mesh / "bundle" / "bundle.json").read_text())
    assert manifest["vocab_size"] == VOCAB


def test_exported_vectors_equal_those_of_one_device(runs):
    one, many = (
        np.load(runs / mesh / "bundle" / "item_embeddings.npy") for mesh in (MESHES[0], MESHES[-1])
    )
    np.testing.assert_allclose(many, one, rtol=2e-3, atol=2e-4)


def test_resumed_on_a_mesh_equals_unbroken(runs):
    unbroken, resumed = runs / MESHES[-1], runs / "resumed"
    assert read_metrics(resumed) == read_metrics(unbroken)
    states = [RunDirectory.open(run).restore() for run in (resumed, unbroken)]
    for got, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(got, expected)
    bundles = [
        json.loads((run / "bundle" / "bundle.json").read_text()) for run in (resumed, unbroken)
    ]
    assert bundles[0]["files"] == bundles[1]["files"]


def test_a_run_of_a_mesh_is_evaluated_on_one_device(runs):
    summary = json.loads((runs / MESHES[-1] / "summary.json").read_text())
    again = evaluate(runs / MESHES[-1], progress=False)
    assert again.num_items == NUM_ITEMS
    for name, value in summary["test"]["model"].items():
        assert again.model[name] == pytest.approx(value, abs=0.04)


def test_rows_are_read_and_added_without_moving_the_table():
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from test_step import VOCAB, _batch, _counts, small_recipe
        from cutbce_ops import tpu_lab
        from recmodels._src.train.placement import Placement
        from recmodels._src.train.sharded import add_rows, take_rows

        rng = np.random.default_rng(0)
        table = jnp.asarray(rng.normal(size=(64, 5)), jnp.float32)
        rows = jnp.asarray(rng.integers(0, 64, (8, 3)), jnp.int32).at[0].set(63).at[1, 0].set(0)
        vectors = jnp.asarray(rng.normal(size=(8, 3, 5)), jnp.float32)
        for mesh in ("data=8", "data=4,model=2"):
            for layout in ("sharded", "replicated"):
                recipe = small_recipe(mesh=mesh, table=layout)
                placement = Placement.of_this_machine(recipe, VOCAB)
                sharding = placement.loss_sharding
                take = jax.jit(lambda table, rows: take_rows(table, rows, sharding))
                np.testing.assert_array_equal(take(table, rows), table[rows])
                add = jax.jit(lambda table, rows, vectors: add_rows(table, rows, vectors, sharding))
                expected = table.at[rows].add(vectors)
                np.testing.assert_allclose(add(table, rows, vectors), expected, rtol=1e-5)

            placement = Placement.of_this_machine(small_recipe(mesh=mesh, table="sharded"), VOCAB)
            state = placement.state(recipe)
            table_shape = state.params["item_embeddings"]
            assert table_shape.sharding.shard_shape(table_shape.shape) == (128, 8)
            step = placement.compile_step(recipe)
            hlo = step.lower(state, *_batch(), None).compile().as_text()
            sizes = [entry.num_bytes for entry in tpu_lab.collectives(hlo)]
            assert sizes and max(sizes) < 1024 * 8 * 4 / 4, sizes  # the table takes 1024 * 8 * 4
    """
    _run_on_eight_devices("-c", textwrap.dedent(script))


def test_large_catalogs_are_sharded_by_default():
    recipe = small_recipe()
    devices = jax.local_devices() * 8  # enough to lay out shapes
    below = Placement.over(devices, recipe, SHARDED_FROM_ITEMS)
    above = Placement.over(devices, recipe, SHARDED_FROM_ITEMS + 1)
    assert (below.is_table_sharded, below.num_rows) == (False, SHARDED_FROM_ITEMS)
    assert (above.is_table_sharded, above.num_rows) == (True, 98 * 1024)
    assert not Placement.over(devices, recipe.override(table="replicated"), 10**6).is_table_sharded
    # The rows do not depend on the devices, so that a run can go on with other ones.
    assert Placement.over(devices[:1], recipe, SHARDED_FROM_ITEMS + 1).num_rows == 98 * 1024


@pytest.mark.parametrize(
    ("mesh", "batch_size", "message"),
    [
        ("data=8", 8, "`mesh` data=8 needs 8 devices; this machine has 1"),
        ("data=1,model=2", 8, "`mesh` data=1,model=2 needs 2 devices; this machine has 1"),
    ],
)
def test_mesh_larger_than_the_machine(mesh, batch_size, message):
    with pytest.raises(UserError, match=message):
        Placement.of_this_machine(small_recipe(mesh=mesh, batch_size=batch_size), VOCAB)


def test_mistakes_of_a_mesh():
    devices = jax.local_devices() * 8
    with pytest.raises(UserError, match="`mesh` data=4 does not fit the 8 devices"):
        Placement.over(devices, small_recipe(mesh="data=4"), VOCAB)
    with pytest.raises(UserError, match=r"a multiple of the 8 devices along \"data\"; got 12"):
        Placement.over(devices, small_recipe(batch_size=12), VOCAB)
    assert Placement.over(devices, small_recipe(batch_size=12, mesh="data=4,model=2"), VOCAB).mesh
    in_parts = small_recipe(batch_size=24, accumulate_steps=2)
    message = r"devices along \"data\", times `accumulate_steps` 2; got 24"
    with pytest.raises(UserError, match=message):
        Placement.over(devices, in_parts, VOCAB)
    assert Placement.over(devices, in_parts.override(batch_size=32), VOCAB).mesh
    odd = Placement.over(devices, small_recipe(table="sharded"), VOCAB)
    with pytest.raises(UserError, match="has 41 rows, which 8 devices cannot share evenly"):
        odd.with_rows(VOCAB)


@pytest.mark.parametrize(
    "mesh",
    ["", "8", "data", "data=0", "data=-1", "model=8", "data=2,data=4", "data=2,x=4", "data= 8"],
)
def test_mesh_that_is_not_one(mesh):
    with pytest.raises(UserError, match='`mesh` must be "auto" or device counts such as "data=8"'):
        small_recipe(mesh=mesh)


def test_mesh_is_parsed():
    assert parse_mesh("auto") == {}
    assert parse_mesh("data=4,model=2") == {"data": 4, "model": 2}
