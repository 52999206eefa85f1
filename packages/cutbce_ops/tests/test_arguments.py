"""Every caller mistake gives one error that names the argument, what came and what is allowed."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutbce_ops

GOOD = {
    "activations": jnp.ones((4, 3)),
    "embeddings": jnp.ones((10, 3)),
    "targets": jnp.zeros((4, 2), jnp.int32),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activations": jnp.ones((4, 3), jnp.int32)}, TypeError, "`activations` must be float32"),
        ({"embeddings": np.ones((10, 3))}, TypeError, "`embeddings` must be float32.*float64"),
        ({"targets": jnp.zeros((4, 2))}, TypeError, "`targets` must hold integer table rows"),
        ({"targets": jnp.zeros((3, 2), jnp.int32)}, ValueError, r"`targets`.*\[4, L\].*\(3, 2\)"),
        ({"targets": jnp.zeros((4,), jnp.int32)}, ValueError, r"`targets` must have shape"),
        ({"embeddings": jnp.ones((10, 5))}, ValueError, r"last axes.*\(4, 3\) and \(10, 5\)"),
        ({"embeddings": jnp.ones((10,))}, ValueError, r"`embeddings` \[V, D\]"),
        ({"activations": jnp.ones((0, 3)), "targets": jnp.zeros((0, 2), jnp.int32)}, ValueError,
         "must not be empty"),
        ({"bias": jnp.ones((9,))}, ValueError, r"`bias` must have shape \(10,\)"),
        ({"position_weights": jnp.ones((5,))}, ValueError, r"`position_weights`.*\(4,\).*\(5,\)"),
        ({"vocab_size": 11}, ValueError, r"`vocab_size` must lie in \[1, 10\].*got 11"),
        ({"vocab_size": jnp.int32(3)}, TypeError, "`vocab_size` must be a static Python int"),
        ({"label_smoothing": 1.5}, ValueError, r"`label_smoothing` must be .* in \[0.0, 1.0\]"),
        ({"label_smoothing": float("nan")}, ValueError, "`label_smoothing`"),
        ({"pos_weight": 0.0}, ValueError, r"`pos_weight` must be finite and above 0.0; got 0.0"),
        ({"pos_weight": float("inf")}, ValueError, "`pos_weight` must be finite"),
        ({"activations": [[1.0]]}, TypeError, "`activations` must be a JAX or NumPy array; got li"),
        ({"position_weights": jnp.ones(4, jnp.complex64)}, TypeError, "must be real"),
        ({"pos_weight": jnp.ones(10)}, TypeError, "`pos_weight` must be a Python number"),
        ({"gradient_mode": "fast"}, ValueError, "`gradient_mode` must be one of 'auto', 'fused'"),
        ({"precision": "float8"}, ValueError, "`precision` must be one of"),
        ({"implementation": "cuda"}, ValueError,
         "`implementation` must be one of None, 'mosaic_tpu', 'xla', 'gpu'; got 'cuda'"),
        ({"focal_gamma": -1.0}, ValueError, "`focal_gamma` must be .* at least 0.0; got -1"),
        ({"logit_cap": 0.0}, ValueError, r"`logit_cap` must be finite and above 0.0; got 0"),
        ({"logit_scale": -2.0}, ValueError, r"`logit_scale` must be finite and above 0.0; got -2"),
        ({"logit_scale": jnp.ones(3)}, ValueError, r"`logit_scale` must have shape \(\).*\(3,\)"),
        ({"logit_scale": jnp.int32(2)}, TypeError, "`logit_scale` must be float32.*int32"),
        ({"position_weights": "x"}, TypeError, "`position_weights` must be an array.*got 'x'"),
        ({"implementation": "gpu"}, NotImplementedError,
         '`implementation="gpu"` needs a program for a GPU, and this one is for cpu'),
        ({"tiles": (8, 8)}, TypeError, "`tiles` must be a TileConfig"),
        ({"sharding": "data"}, TypeError, "`sharding` must be a LossSharding"),
    ],
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=message):
        cutbce_ops.cut_binary_cross_entropy(**GOOD | changes)


@pytest.mark.parametrize("thresholds", [0.0, 1.0, (0.5, 0.5), (0.7, 0.2), (), None, "half"])
def test_thresholds(thresholds):
    with pytest.raises((ValueError, TypeError), match="`thresholds` must be"):
        cutbce_ops.cut_binary_cross_entropy_with_aux(**GOOD, thresholds=thresholds)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_tile_sizes(size):
    with pytest.raises(ValueError, match="`block_v` must be an integer of at least 1"):
        cutbce_ops.TileConfig(8, size)


@pytest.mark.parametrize("options", [{"implementation": "xla"}, {"precision": "highest"}])
def test_every_allowed_option_runs(options):
    loss = cutbce_ops.cut_binary_cross_entropy(**GOOD, **options)
    assert np.isfinite(loss)


def test_numpy_numbers_are_accepted():
    loss = cutbce_ops.cut_binary_cross_entropy(
        **GOOD, vocab_size=np.int64(10), label_smoothing=np.float32(0.5), logit_scale=np.float64(2),
        tiles=cutbce_ops.TileConfig(np.int64(2), np.int32(3)),
    )  # fmt: skip
    assert np.isfinite(loss)


@pytest.mark.parametrize("gradient_mode", ["fused", "recompute"])
def test_an_empty_list_of_targets_is_all_padding(gradient_mode):
    def loss(table, targets):
        return cutbce_ops.cut_binary_cross_entropy_with_aux(
            **GOOD | {"targets": targets, "embeddings": table, "gradient_mode": gradient_mode}
        )

    lists = (jnp.zeros((4, 0), jnp.int32), jnp.full((4, 2), -1))
    take_gradient = jax.value_and_grad(loss, has_aux=True)
    got, want = (take_gradient(GOOD["embeddings"], targets) for targets in lists)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("namespace", [np, jnp])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int64"])
def test_every_integer_dtype_means_the_same_rows(dtype, namespace):
    """300 rows, more than 8 bits can count, and the largest number of the dtype, which is none."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(300, 4)), jnp.float32)
    queries = jnp.ones((2, 4))
    past_the_end = np.iinfo(dtype).max if np.iinfo(dtype).max >= 300 else 0
    with jax.enable_x64(np.iinfo(dtype).bits == 64):
        ids = namespace.asarray(np.array([[1, 5], [100, past_the_end]], dtype))
        assert ids.dtype == dtype
        results = [
            cutbce_ops.cut_binary_cross_entropy(queries, table, ids),
            cutbce_ops.cut_softmax_cross_entropy(queries, table, ids[:, 1]),
            cutbce_ops.cut_target_ranks(queries, table, ids),
            cutbce_ops.cut_top_k(queries, table, 299, exclude=ids),
        ]
    rows = jnp.array([[1, 5], [100, -1 if past_the_end else 0]])
    want = [
        cutbce_ops.cut_binary_cross_entropy(queries, table, rows),
        cutbce_ops.cut_softmax_cross_entropy(queries, table, rows[:, 1]),
        cutbce_ops.cut_target_ranks(queries, table, rows),
        cutbce_ops.cut_top_k(queries, table, 299, exclude=rows),
    ]
    jax.tree.map(np.testing.assert_array_equal, results, want)


def test_numpy_arrays_are_accepted():
    arrays = {name: np.asarray(value) for name, value in GOOD.items()}
    got = cutbce_ops.cut_binary_cross_entropy(**arrays)
    assert float(got) == float(cutbce_ops.cut_binary_cross_entropy(**GOOD))


def test_import_touches_no_device_and_only_needs_jax_and_numpy():
    program = (
        "import sys, jax; before = set(sys.modules); import cutbce_ops;"
        "import jax._src.xla_bridge as bridge;"
        "assert not bridge.backends_are_initialized(), 'a backend was initialised';"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "allowed = {'cutbce_ops', 'jax', 'jaxlib', 'numpy'} | set(sys.stdlib_module_names);"
        "print(sorted(new - allowed))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
