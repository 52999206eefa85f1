import importlib.util

import pytest
from train_cases import small_recipe

from recmodels import UserError, plan
from recmodels._src.plan import ESTIMATE
from recmodels._src.plan_worker import collectives

_HLO = """
  %a = f32[100,8]{1,0:T(8,128)} all-reduce(%x), channel_id=1
  %b = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%y, %z), channel_id=2
  %c = (s32[1,8]{1,0}, s32[8,8]{1,0}) all-gather-start(%w), dimensions={0}
  %d = s32[8,8]{1,0} all-gather-done(%c)
  %e = pred[16]{0} all-reduce(%v), channel_id=3
  %f = f32[100,8]{1,0} all-reduce(%u), channel_id=4
  %g = f32[9]{0} add(%p, %q)
"""


def test_collectives_are_read_from_hlo():
    found = [(e["kind"], e["shape"], e["bytes"], e["count"]) for e in collectives(_HLO)]
    assert found == [
        ("all-reduce", "f32[100,8]", 3200, 2),
        ("all-gather", "s32[1,8], s32[8,8]", 288, 1),
        ("all-reduce", "f32[4], bf16[2,3]", 28, 1),
        ("all-reduce", "pred[16]", 16, 1),
    ]


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
    assert any("f32[5001,8]" in shape for shape in summed)  # the gradient of the table
    assert ESTIMATE in str(report)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "batch_size", "message"),
    [
        ("v6e:2x4", 12, "`batch_size` must be a multiple of the 8 devices; got 12"),
        ("v9:2x4", 8, "`topology` 'v9:2x4' is not known to libtpu"),
    ],
)
def test_plan_names_the_mistake(topology, batch_size, message):
    with pytest.raises(UserError, match=message):
        plan(small_recipe(batch_size=batch_size), topology=topology, num_items=10)


@pytest.mark.tpu_compiler
def test_yambda_step_fits_the_published_slice():
    report = plan("sasrec-yambda-50m", topology="v6e:2x4", num_items=876_938)
    assert report.peak_bytes <= 4.3 * 1024**3  # published: 7.67 GiB cut, 22.37 GiB standard
