import importlib.util

import pytest
from train_cases import small_recipe

from recmodels import UserError, get_recipe, plan
from recmodels._src.plan import ESTIMATE

_GIB = 1024**3


def test_missing_compiler_names_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jax\[tpu\]"'):
        plan(small_recipe(), topology="v6e:2x4", num_items=10)


def test_catalog_must_not_be_empty():
    with pytest.raises(UserError, match="`num_items` must be at least 1; got 0"):
        plan(small_recipe(), topology="v6e:2x4", num_items=0)


@pytest.mark.tpu_compiler
def test_plan_ignores_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    report = plan(small_recipe(), topology="v5e:2x4", num_items=5_000)
    assert report.num_chips == 8
    assert report.aliased_bytes > 3 * 5_001 * 8 * 4  # the state is updated in place
    summed = [e["shape"] for e in report.collectives if e["kind"] == "all-reduce"]
    assert sum("f32" in shape for shape in summed) >= 2  # the table's gradient and the encoder's
    assert (report.mesh, report.is_table_sharded) == ("data=8", False)
    assert ESTIMATE in str(report)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "batch_size", "message"),
    [
        ("v6e:2x4", 12, '`batch_size` must be a multiple of the 8 devices along "data"; got 12'),
        ("v9:2x4", 8, "`topology` 'v9:2x4' is not known to libtpu"),
    ],
)
def test_plan_names_the_mistake(topology, batch_size, message):
    with pytest.raises(UserError, match=message):
        plan(small_recipe(batch_size=batch_size), topology=topology, num_items=10)


def _yambda(**values):
    return get_recipe("sasrec-yambda-50m").override(**values)


@pytest.mark.tpu_compiler
def test_yambda_step_with_the_table_on_every_chip():
    report = plan(_yambda(table="replicated"), topology="v6e:2x4", num_items=876_938)
    assert not report.is_table_sharded
    assert report.peak_bytes <= 3.6 * _GIB  # published: 7.67 GiB cut, 22.37 GiB standard


@pytest.mark.tpu_compiler
def test_yambda_step_with_the_table_sharded():
    report = plan("sasrec-yambda-50m", topology="v6e:2x4", num_items=876_938)
    assert report.is_table_sharded  # by default, at this size
    assert report.peak_bytes <= 0.65 * _GIB
    assert _largest_collective(report) < 876_938 // 8 * 256 * 4  # no table travels, nor a shard


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_yambda_step_of_four_times_the_published_positions():
    recipe = _yambda(batch_size=128, max_length=512)
    report = plan(recipe, topology="v6e:2x4", num_items=876_938)
    assert report.peak_bytes <= 0.9 * _GIB


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_hundred_million_items_fit_eight_chips():
    report = plan(_yambda(hidden_dim=128), topology="v6e:2x4", num_items=100_000_000)
    assert report.peak_bytes <= 30 * _GIB
    assert _largest_collective(report) <= 64 * 256 * 128 * 4  # a batch of vectors


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_hundred_million_wide_items_compile_for_256_chips():
    recipe = _yambda(mesh="data=64,model=4")
    report = plan(recipe, topology="v6e:16x16", num_items=100_000_000)
    assert report.num_chips == 256
    assert report.peak_bytes <= 2.5 * _GIB  # a shard of the state is 1.1 GiB, its gradient 0.4


def _largest_collective(report):
    return max(entry["bytes"] for entry in report.collectives)
