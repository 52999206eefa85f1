"""The GPU kernels against the float64 oracle: in Pallas' interpreter, or on a GPU if it is here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, make_problem
from tolerances import TOLERANCES, assert_close, relative_l2

import cutbce_ops
from cutbce_ops._src.binary_cross_entropy import (
    chunked_xla,
    pallas_gpu,
    pallas_gpu_tiles,
)
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss
from cutbce_ops._src.binary_cross_entropy.sweep import Wanted

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

INTERPRET = jax.default_backend() != "gpu"
TILES = cutbce_ops.TileConfig(16, 32)
THRESHOLDS = (0.04, 0.5, 0.97)
# Few, since the interpreter is slow: each is there for its masks, sizes or elementwise function.
CASES = [
    Case(num_positions=29, vocab_size=301, dim=13, num_targets=3, bias=True, weights="random"),
    Case(vocab_size=5, dim=3, num_targets=2),
    Case(num_positions=1),
    Case(mean_logit=-14.0),
    Case(label_smoothing=0.3, pos_weight=2.5, bias=True, weights="some_zero", unused_rows=37),
    Case(logit_cap=30.0, focal_gamma=1.5, logit_scale=3.0),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems then have several splits, and several blocks in each."""
    monkeypatch.setattr(pallas_gpu_tiles, "TARGET_PROGRAMS", 6)
    monkeypatch.setattr(pallas_gpu, "sweep", partial(pallas_gpu.sweep, interpret=INTERPRET))


def run(case: Case, dtype: str, tiles: cutbce_ops.TileConfig | None):
    """(loss, output) and gradients through the public function."""
    problem = make_problem(case, dtype)

    def loss(activations, embeddings, bias):
        return cutbce_ops.cut_binary_cross_entropy_with_aux(
            activations, embeddings, problem.targets, position_weights=problem.weights,
            thresholds=THRESHOLDS,
            **problem.options(
                bias=bias, tiles=tiles, implementation="gpu",
                precision="highest" if dtype == "float32" else "default",
            ),
        )  # fmt: skip

    argnums = (0, 1) if problem.bias is None else (0, 1, 2)
    function = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True))
    truth = oracle.binary_cross_entropy(
        problem.activations, problem.embeddings, problem.targets, thresholds=THRESHOLDS,
        **problem.oracle_options(),
    )  # fmt: skip
    return problem, truth, function(problem.activations, problem.embeddings, problem.bias)


COMBINATIONS = [(case, "float32", TILES) for case in CASES]
COMBINATIONS += [(CASES[0], "bfloat16", None), (CASES[3], "bfloat16", TILES)]


@pytest.mark.parametrize(
    ("case", "dtype", "tiles"), COMBINATIONS, ids=lambda value: getattr(value, "name", None)
)
def test_loss_counts_and_gradients_match_float64(case: Case, dtype: str, tiles):
    problem, truth, ((loss, output), gradients) = run(case, dtype, tiles)
    assert_close(loss, truth.loss, dtype, "loss")
    assert_close(output.per_position, truth.per_position, dtype, "per_position")
    quantity = "gradient_rare" if case.mean_logit < -10 else "gradient"
    wanted = [truth.d_activations, truth.d_embeddings, truth.d_bias][: len(gradients)]
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == dtype
        assert_close(got, want, dtype, quantity)
    is_counted = np.ones(case.num_positions, int)
    if problem.weights is not None:
        is_counted = np.asarray(problem.weights != 0).astype(int)
    for name in ("tp", "fp", "fn", "tn"):
        want = getattr(truth, name) * is_counted[:, None]
        np.testing.assert_array_equal(getattr(output.counts, name), want, err_msg=name)


def config_of(vocab_size: int, **options) -> SweepConfig:
    defaults = {"pointwise": PointwiseLoss(), "precision": "highest", "tiles": TILES}
    return SweepConfig(vocab_size=vocab_size, **(defaults | options))


def test_a_shard_with_unused_rows_equals_the_rows_that_count():
    rng = np.random.default_rng(0)
    num_used, first_row = 150, 400
    activations = jnp.asarray(rng.normal(size=(20, 24)), jnp.float32)
    embeddings = np.full((190, 24), np.nan, np.float32)  # rows beyond the catalog hold anything
    embeddings[:num_used] = rng.normal(size=(num_used, 24))
    bias = np.full(190, np.nan, np.float32)
    bias[:num_used] = rng.normal(size=num_used)
    arrays = (activations, jnp.asarray(embeddings), jnp.asarray(bias), jnp.ones(20) / 20)
    swept = jax.jit(
        lambda *arrays: pallas_gpu.sweep(
            *arrays, config_of(first_row + num_used), Wanted(True, True, True)
        )
    )(*arrays, jnp.int32(first_row))
    truth = oracle.binary_cross_entropy(
        activations, embeddings[:num_used], np.full((20, 1), -1), bias=bias[:num_used]
    )
    assert_close(swept.loss, truth.per_position * num_used, "float32", "per_position")
    np.testing.assert_array_equal(swept.num_predicted[:, 0], truth.fp)
    assert_close(swept.d_activations, truth.d_activations * num_used, "float32", "gradient")
    assert_close(swept.d_embeddings[:num_used], truth.d_embeddings * num_used, "float32",
                 "gradient")  # fmt: skip
    assert_close(swept.d_bias[:num_used], truth.d_bias * num_used, "float32", "gradient")
    assert not swept.d_embeddings[num_used:].any()
    assert not swept.d_bias[num_used:].any()


@pytest.mark.parametrize("wanted", [Wanted(loss=True), Wanted(counts=True), Wanted(gradients=True)])
def test_only_what_is_wanted_is_computed(wanted: Wanted):
    rng = np.random.default_rng(1)
    activations = jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)
    embeddings = jnp.asarray(rng.normal(size=(70, 16)), jnp.float32)
    arrays = (activations, embeddings, None, jnp.ones(16), None)
    config = config_of(70)
    swept = pallas_gpu.sweep(*arrays, config, wanted)
    expected = chunked_xla.dense_sweep(*arrays, config, wanted)
    errors = jax.tree.map(relative_l2, swept, expected)  # also compares which fields are None
    assert max(jax.tree.leaves(errors)) <= TOLERANCES["float32", "gradient"]


@pytest.mark.parametrize("dim", [1, 50, 64, 128, 200, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sizes", [(1, 1), (20, 1_000_000), (16_384, 100_000), (10_000_000, 512)])
def test_tiles_are_legal(dim: int, itemsize: int, sizes: tuple[int, int],
                         monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    monkeypatch.setattr(pallas_gpu_tiles, "TARGET_PROGRAMS", 512)
    num_held, num_streamed = sizes
    for is_full_float32 in {itemsize == 4, False}:
        tiles = pallas_gpu_tiles.kernel_tiles(
            num_held, num_streamed, dim, itemsize, is_full_float32=is_full_float32
        )
        for block in (tiles.held, tiles.streamed):
            assert block >= 16
            assert block & (block - 1) == 0
        assert tiles.shared_bytes(dim, itemsize) <= pallas_gpu_tiles.SHARED_BYTES
        assert tiles.num_splits * tiles.streamed < num_streamed + tiles.streamed
        # Partial sums are as large as the result, or as 512 blocks of it, whichever is more.
        assert tiles.num_splits == 1 or tiles.num_splits * num_held <= 512 * tiles.held


@pytest.mark.parametrize(
    ("dtype", "dim", "options", "reason"),
    [
        ("float16", 16, {}, "`activations` must be float32 or bfloat16 on this path; got float16"),
        ("float32", 257, {}, "the gradients of D > 256 do not fit the registers of a GPU; got D="),
        ("float32", 16, {"tiles": cutbce_ops.TileConfig(64, 24)},
         "`block_v` must be a power of two of at least 16 on a GPU; got 24"),
        ("float32", 16, {"tiles": cutbce_ops.TileConfig(8, 64)},
         "`block_t` must be a power of two of at least 16 on a GPU; got 8"),
        ("float32", 200, {"tiles": cutbce_ops.TileConfig(256, 64)},
         "needs about 576 KiB of shared memory at D=200; an SM is taken to have 160"),
    ],
)  # fmt: skip
def test_a_case_that_cannot_run_says_why(dtype: str, dim: int, options: dict, reason: str):
    activations, embeddings = jnp.zeros((4, dim), dtype), jnp.zeros((8, dim), dtype)
    config = config_of(8, **options)
    said = pallas_gpu.why_not(activations, embeddings, config)
    assert said is not None
    assert reason in said
    with pytest.raises(NotImplementedError, match='implementation="gpu": '):
        pallas_gpu.sweep(activations, embeddings, None, None, None, config, Wanted(loss=True))


def test_a_case_that_can_run_has_no_reason():
    shapes = (jax.ShapeDtypeStruct((4, 256), "float32"), jax.ShapeDtypeStruct((8, 256), "bfloat16"))
    assert pallas_gpu.why_not(*shapes, config_of(8, tiles=None)) is None
