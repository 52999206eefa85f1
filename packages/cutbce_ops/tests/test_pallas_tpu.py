"""The TPU kernel in the interpreter: memory starts as NaN, and races between steps are reported."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import pointwise_loss
from tolerances import relative_l2

from cutbce_ops._src.binary_cross_entropy import pallas_tpu
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig, TileConfig
from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss
from cutbce_ops._src.binary_cross_entropy.sweep import Wanted
from cutbce_ops._src.hardware import CHIPS, HardwareSpec
from cutbce_ops._src.tuning import TpuTiles, load_table, sweep_tiles

V6E, V5E = HardwareSpec.of("v6e"), HardwareSpec.of("v5e")
PLAIN = PointwiseLoss()
EVERYTHING = Wanted(loss=True, counts=True, gradients=True)
# Room for one tile of positions only, so that several calls add up the gradients.
LITTLE_MEMORY = dataclasses.replace(V6E, vmem_bytes=7 * 2**20 // 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One sweep; sizes that divide nothing unless stated, in tiles of 128 x 256."""

    num_positions: int = 300
    num_rows: int = 700
    dim: int = 100
    mean_logit: float = 0.0
    logit_scale: float = 1.0
    bias: bool = False
    precision: str = "default"
    pointwise: PointwiseLoss = PLAIN
    chip: HardwareSpec = V6E
    wanted: Wanted = EVERYTHING
    vocab_offset: int | None = None
    vocab_size: int | None = None
    thresholds: tuple[float, ...] = (0.0,)


CASES = {
    "ragged": Case(),
    "no_bfloat16_unit": Case(chip=V5E),
    "small_probabilities_with_bias": Case(mean_logit=-14.0, bias=True),
    # The losses of a chain add up to far more than the fast sum can hold.
    "large_logits_take_the_exact_sum": Case(logit_scale=60.0, mean_logit=20.0, bias=True),
    "last_shard_with_unused_rows": Case(vocab_offset=1000, vocab_size=1500, bias=True),
    "shard_without_any_row": Case(vocab_offset=1500, vocab_size=1500, num_rows=300),
    "focal_and_capped": Case(
        pointwise=PointwiseLoss(0.1, 2.0, 2.0, 10.0), bias=True, thresholds=(-1.0, 0.0, 2.0)
    ),
    # The interpreter cannot add to an output that does not divide: hence the unused rows.
    "chunks_of_positions": Case(
        num_positions=700, num_rows=768, vocab_size=700, bias=True, chip=LITTLE_MEMORY
    ),
    "float32": Case(precision="highest", bias=True, mean_logit=-14.0, num_rows=500),
    "forward_only": Case(wanted=Wanted(loss=True, counts=True), thresholds=(0.0, 1.5)),
    "backward_only": Case(wanted=Wanted(gradients=True)),
}


def problem(case: Case):
    rng = np.random.default_rng(0)
    activations = rng.normal(size=(case.num_positions, case.dim))
    embeddings = rng.normal(size=(case.num_rows, case.dim)) * case.logit_scale * case.dim**-0.5
    bias = rng.normal(size=case.num_rows) + case.mean_logit if case.bias else None
    d_per_position = rng.uniform(0, 2, case.num_positions) / case.num_positions
    return [
        None if array is None else array.astype(np.float32)
        for array in (activations, embeddings, bias, d_per_position)
    ]


def config_of(case: Case) -> SweepConfig:
    return SweepConfig(
        vocab_size=case.vocab_size or case.num_rows,
        pointwise=case.pointwise,
        precision=case.precision,
        tiles=TileConfig(128, 256),
        logit_thresholds=case.thresholds,
    )


def run(case: Case):
    offset = None if case.vocab_offset is None else jnp.int32(case.vocab_offset)
    function = partial(
        pallas_tpu.sweep, config=config_of(case), wanted=case.wanted, hardware=case.chip,
        interpret=True,
    )  # fmt: skip
    return jax.jit(function)(*problem(case), offset)


def expected(case: Case) -> dict:
    """Dense float64 on operands rounded as the kernel rounds them."""
    activations, embeddings, bias, d = problem(case)
    dtype = jnp.float32 if case.precision == "highest" else jnp.bfloat16
    fold = np.float32(np.log2(np.e)) if case.pointwise.is_plain else np.float32(1)

    def rounded(array):
        return np.asarray(jnp.asarray(array).astype(dtype), np.float64)

    x = rounded(activations * fold) @ rounded(embeddings).T / np.float64(fold)
    x = x if bias is None else x + bias
    used = np.arange(case.num_rows) + (case.vocab_offset or 0) < config_of(case).vocab_size
    loss, d_logits = softplus_or(case.pointwise, x)
    loss, d_logits = loss * used, d_logits * used
    weighted = activations.astype(np.float64) * d[:, None]
    return {
        "loss": loss.sum(axis=1),
        "num_predicted": np.stack([(used & (x > t)).sum(1) for t in case.thresholds], axis=1),
        "d_activations": d[:, None] * (d_logits @ rounded(embeddings)),
        "d_embeddings": d_logits.T @ weighted,
        "d_bias": d_logits.T @ d.astype(np.float64),
    }


def softplus_or(pointwise: PointwiseLoss, x):
    """Softplus in the plain family, else the loss of an item that is no target."""
    if pointwise.is_plain:
        return pointwise_loss(x, 0.0)
    cap = pointwise.logit_cap
    loss, d_capped = pointwise_loss(
        cap * np.tanh(x / cap), pointwise.label_smoothing / 2, pointwise.pos_weight,
        pointwise.focal_gamma,
    )  # fmt: skip
    return loss, d_capped / np.cosh(x / cap) ** 2


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_float64(name: str):
    case = CASES[name]
    got, want = run(case), expected(case)
    gradient_bound = 2e-6 if case.precision == "highest" else 5e-3
    if case.wanted.loss:
        np.testing.assert_allclose(got.loss, want["loss"], rtol=1e-6)
    if case.wanted.counts:
        np.testing.assert_array_equal(got.num_predicted, want["num_predicted"])
    if case.wanted.gradients:
        for field in ("d_activations", "d_embeddings") + (("d_bias",) if case.bias else ()):
            assert relative_l2(getattr(got, field), want[field]) <= gradient_bound, field
        unused = want["d_embeddings"].any(axis=1) == 0
        assert not np.asarray(got.d_embeddings)[unused].any()
    for name in ("loss", "num_predicted", "d_activations", "d_embeddings"):
        is_wanted = {"loss": case.wanted.loss, "num_predicted": case.wanted.counts}
        assert (getattr(got, name) is not None) == is_wanted.get(name, case.wanted.gradients)


def test_positions_are_cut_into_equal_chunks_that_fit():
    config = config_of(Case(precision="default"))
    config = dataclasses.replace(config, tiles=None)
    for chip in CHIPS.values():
        for num_positions in (1, 255, 4096, 100_000, 1_000_000):
            for dim in (32, 128, 256, 512):
                plan = pallas_tpu.plan_kernel(num_positions, dim, True, config, EVERYTHING, chip)
                assert plan.vmem_bytes < chip.vmem_bytes
                assert plan.num_chunks * plan.chunk_t >= num_positions
                granule = plan.tiles.block_t * plan.tiles.unroll
                assert (plan.num_chunks - 1) * plan.chunk_t < num_positions
                assert plan.num_chunks * (plan.chunk_t - granule) < num_positions


def test_what_does_not_fit_the_chip_is_refused():
    config = dataclasses.replace(config_of(Case()), tiles=TileConfig(8192, 8192))
    with pytest.raises(NotImplementedError, match=r"8192 x 8192 logits at D=128 .* bytes of VMEM"):
        pallas_tpu.plan_kernel(100_000, 128, False, config, EVERYTHING, HardwareSpec.of("v4"))


@pytest.mark.parametrize("chip", CHIPS)
def test_tuning_tables_are_legal(chip: str):
    for entry in load_table(chip, "binary_cross_entropy"):
        tiles = sweep_tiles(chip, entry["dim"], entry["mode"])
        assert dataclasses.asdict(tiles).items() <= entry.items()
        assert entry["bundles"] > 0


def test_a_dimension_between_two_entries_takes_the_larger():
    assert sweep_tiles("v6e", 192, "fused") == sweep_tiles("v6e", 256, "fused")
    assert sweep_tiles("v6e", 4096, "fused") == sweep_tiles("v6e", 256, "fused")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_v", 1000, r"`block_v` must be a positive multiple of 128; got 1000"),
        ("unroll", 3, r"`unroll` must be a positive multiple of 2; got 3"),
        ("row_slice", 48, r"`block_v` must be a multiple of `row_slice`; got 1024 and 48"),
    ],
)
def test_illegal_tiles_are_refused(field: str, value: int, message: str):
    fields = {"block_v": 1024, "block_t": 256, "unroll": 2, "row_slice": 16, field: value}
    with pytest.raises(ValueError, match=message):
        TpuTiles(**fields)


@pytest.mark.parametrize("spec", CHIPS.values(), ids=list(CHIPS))
def test_chips_are_what_jax_knows(spec: HardwareSpec):
    from jax.experimental.pallas import tpu as pltpu

    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(spec.chip), 1)
    assert info.vmem_capacity_bytes == spec.vmem_bytes
    assert info.hbm_capacity_bytes == spec.hbm_bytes
    assert info.mem_bw_bytes_per_second == spec.hbm_bytes_per_s
    assert info.bf16_ops_per_second == spec.bfloat16_flops_per_s
    assert info.mxu_column_size == spec.matmul_size


def test_unknown_chips():
    with pytest.raises(ValueError, match=r"`chip` must be one of v4, v5e, .*; got 'v9'"):
        HardwareSpec.of("v9")


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernel_lowers_inside_the_callers_shard_map(check_vma: bool):
    import cutbce_ops
    from cutbce_ops import tpu_lab

    mesh = tpu_lab.mesh_for("v6e:2x4", (8,), ("data",))
    positions, replica = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def gradients(activations, embeddings, targets):
        def loss(activations, embeddings):
            return cutbce_ops.cut_binary_cross_entropy(
                activations, embeddings, targets, implementation="mosaic_tpu"
            )

        d_activations, d_embeddings = jax.grad(loss, (0, 1))(activations, embeddings)
        # A checked shard_map has summed the gradient of what came in as a replica already.
        return d_activations, d_embeddings if check_vma else jax.lax.psum(d_embeddings, "data")

    step = jax.shard_map(
        gradients, mesh=mesh, in_specs=(positions, replica, positions),
        out_specs=(positions, replica), check_vma=check_vma,
    )  # fmt: skip
    lowered = jax.jit(step).trace(
        jax.ShapeDtypeStruct((2048, 128), jnp.float32),
        jax.ShapeDtypeStruct((3000, 128), jnp.float32),
        jax.ShapeDtypeStruct((2048, 8), jnp.int32),
    ).lower(lowering_platforms=("tpu",))  # fmt: skip
    assert "tpu_custom_call" in lowered.as_text()
