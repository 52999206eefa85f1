"""The TPU kernel that adds up the targets' rows, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_positives import loss_and_gradients
from tolerances import relative_l2

from cutbce_ops._src.binary_cross_entropy import pallas_tpu, positives, sharded
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss

# L, T, D, dtype of the table, precision; sizes around the block of positions.
CASES = {
    "one block": (8, 128, 128, jnp.float32, "default"),
    "ragged blocks": (31, 300, 128, jnp.float32, "default"),
    "few positions": (3, 5, 256, jnp.float32, "highest"),
    "bfloat16 table": (5, 200, 128, jnp.bfloat16, "default"),
    "bfloat16 products": (2, 130, 128, jnp.float32, "bfloat16"),
}


def config_of(precision: str) -> SweepConfig:
    return SweepConfig(1000, PointwiseLoss(), precision, None)


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_float64(name: str):
    num_targets, num_positions, dim, dtype, precision = CASES[name]
    rng = np.random.default_rng(0)
    targets = rng.integers(-5, 10, (num_targets, num_positions)).astype(np.int32)
    rows = rng.normal(size=(num_targets, num_positions, dim))
    rows[targets < 0] = np.nan  # whatever is gathered where there is no target
    rows = jnp.asarray(rows, dtype)
    activations = rng.normal(size=(num_positions, dim)).astype(np.float32)
    d_logits = rng.normal(size=num_positions).astype(np.float32)
    config = config_of(precision)
    logits, d_activations = pallas_tpu.add_up_targets(
        rows, jnp.asarray(targets), jnp.asarray(activations), jnp.asarray(d_logits), config,
        interpret=True,
    )  # fmt: skip
    rounded = rows.astype(jnp.bfloat16 if precision == "bfloat16" else jnp.float32)
    total = np.where(targets[:, :, None] >= 0, np.asarray(rounded, np.float64), 0).sum(axis=0)
    assert relative_l2(logits, (total * activations).sum(axis=1)) <= 5e-7
    assert relative_l2(d_activations, d_logits[:, None] * total) <= 5e-7


@pytest.mark.parametrize("without", ["activations", "d_logits"])
def test_only_what_is_wanted_comes_back(without: str):
    factors = {"activations": jnp.ones((128, 128)), "d_logits": jnp.ones(128)}
    factors[without] = None
    logits, d_activations = pallas_tpu.add_up_targets(
        jnp.ones((2, 128, 128)), jnp.zeros((2, 128), jnp.int32), **factors,
        config=config_of("default"), interpret=True,
    )  # fmt: skip
    assert (logits is None) == (without == "activations")
    assert (d_activations is None) == (without == "d_logits")


@pytest.mark.parametrize("at_once", [2, 5])
def test_loss_and_gradients_with_the_kernel_are_those_without(monkeypatch, at_once: int):
    want = loss_and_gradients()
    for module in (positives, sharded):
        monkeypatch.setattr(module, "takes_tpu_kernel", lambda *_: True)
    monkeypatch.setattr(sharded, "may_target_tpu", lambda: True)  # whole registers of features

    def on_platform(arrays, tpu, *_):
        return tpu(*arrays, interpret=True)

    monkeypatch.setattr(positives, "on_platform", on_platform)
    monkeypatch.setattr(pallas_tpu, "most_targets", lambda _: at_once)
    got = loss_and_gradients()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), got, want)
