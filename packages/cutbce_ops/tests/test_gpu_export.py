"""The whole operator lowered for GPUs, which needs none: by export, with every tensor looked at.

Lowering checks shapes, dtypes and that each operation has a GPU rule. It runs nothing.
"""

import contextlib
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, SingleDeviceSharding

import cutbce_ops
from cutbce_ops._src.binary_cross_entropy import pallas_gpu
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss
from cutbce_ops._src.binary_cross_entropy.sweep import Wanted

T, V, D, L = 512, 40_000, 64, 8
LARGEST_ALLOWED = max(V * D, T * 4096)  # the table or its gradient, and one tile of logits
LARGEST_IN_RANKING = T * 16_384  # one block of scores
TRITON_CALL = "__gpu$xla.gpu.triton"
ARGUMENTS = (
    jax.ShapeDtypeStruct((T, D), jnp.float32),
    jax.ShapeDtypeStruct((V, D), jnp.float32),
    jax.ShapeDtypeStruct((T, L), jnp.int32),
)


def fused(activations, embeddings, targets):
    return cutbce_ops.cut_binary_cross_entropy(
        activations, embeddings, targets, gradient_mode="fused"
    )


def recompute(activations, embeddings, targets):
    return cutbce_ops.cut_binary_cross_entropy(
        activations, embeddings, targets, gradient_mode="recompute"
    )


def focal(activations, embeddings, targets):
    return cutbce_ops.cut_binary_cross_entropy(
        activations, embeddings, targets, focal_gamma=2.0, precision="bfloat16"
    )


def with_counts(activations, embeddings, targets):
    return cutbce_ops.cut_binary_cross_entropy_with_aux(
        activations, embeddings, targets, thresholds=(0.1, 0.5)
    )[0]


def softmax(activations, embeddings, targets):
    return cutbce_ops.cut_softmax_cross_entropy(activations, embeddings, targets[:, 0])


def dense(activations, embeddings, targets):
    logits = activations @ embeddings.T
    return jax.nn.softplus(logits).mean() - jnp.take_along_axis(logits, targets, 1).sum() / V


def gradient_of(loss):
    return jax.value_and_grad(loss, (0, 1))


def top_k(activations, embeddings, targets):
    return cutbce_ops.cut_top_k(activations, embeddings, 10, exclude=targets)


def target_ranks(activations, embeddings, targets):
    return cutbce_ops.cut_target_ranks(activations, embeddings, targets)


CASES = [
    *(
        (gradient_of(loss), LARGEST_ALLOWED)
        for loss in (fused, recompute, focal, with_counts, softmax)
    ),
    (top_k, LARGEST_IN_RANKING),
    (target_ranks, LARGEST_IN_RANKING),
]


def largest_tensor(module: str) -> int:
    """Elements of the largest tensor type that a StableHLO module names."""
    shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", module)
    assert shapes
    return max(math.prod(map(int, shape.rstrip("x").split("x"))) for shape in shapes)


@pytest.mark.parametrize(
    ("function", "bound"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_xla_path_lowers_for_cuda_without_logits(function, bound: int):
    exported = jax.export.export(jax.jit(function), platforms=("cuda",))(*ARGUMENTS)
    assert exported.platforms == ("cuda",)
    assert largest_tensor(exported.mlir_module()) <= bound < T * V


def test_xla_path_lowers_for_rocm():
    exported = jax.export.export(jax.jit(gradient_of(fused)), platforms=("rocm",))(*ARGUMENTS)
    assert largest_tensor(exported.mlir_module()) <= LARGEST_ALLOWED


def test_the_check_notices_logits():
    exported = jax.export.export(jax.jit(gradient_of(dense)), platforms=("cuda",))(*ARGUMENTS)
    assert largest_tensor(exported.mlir_module()) == T * V


@pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None,
    reason="jax.export writes with flatbuffers, which is not installed",
)
def test_an_exported_gradient_survives_writing():
    exported = jax.export.export(jax.jit(gradient_of(fused)), platforms=("cuda",))(*ARGUMENTS)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.platforms == ("cuda",)
    assert restored.out_avals == exported.out_avals


def h100():
    """Newer JAX releases lower Triton kernels for the GPU of the abstract mesh, if none is here."""
    if jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


# Shape of the problem, dtype of the inputs, precision, loss: what changes the kernels.
KERNEL_CASES = [
    ((4096, 100_000, 128), "float32", "highest", PointwiseLoss()),
    ((4096, 100_000, 128), "float32", "default", PointwiseLoss()),
    ((16_384, 100_000, 256), "float32", "bfloat16", PointwiseLoss()),
    ((29, 1003, 13), "bfloat16", "default", PointwiseLoss(0.1, 2.0, 1.5, 30.0)),
    ((1, 1, 1), "bfloat16", "default", PointwiseLoss()),
]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("sizes", "dtype", "precision", "pointwise"), KERNEL_CASES)
def test_kernels_lower_for_cuda(sizes: tuple[int, int, int], dtype: str, precision,
                                pointwise: PointwiseLoss, is_sharded: bool):  # fmt: skip
    num_positions, num_rows, dim = sizes
    config = SweepConfig(num_rows, pointwise, precision, None, logit_thresholds=(-1.0, 0.0))
    arguments = (
        jax.ShapeDtypeStruct((num_positions, dim), dtype),
        jax.ShapeDtypeStruct((num_rows, dim), dtype),
        jax.ShapeDtypeStruct((num_rows,), jnp.float32) if is_sharded else None,
        jax.ShapeDtypeStruct((num_positions,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32) if is_sharded else None,
    )

    def module_of(wanted: Wanted) -> str:
        function = jax.jit(lambda *arrays: pallas_gpu.sweep(*arrays, config, wanted))
        # Triton calls may change between JAX releases, so that by default they are not exported.
        allowed = [jax.export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        with h100():
            exported = jax.export.export(function, platforms=("cuda",), disabled_checks=allowed)
            return exported(*arguments).mlir_module()

    module = module_of(Wanted(loss=True, counts=True, gradients=True))
    assert module.count(f"@{TRITON_CALL}") == 2
    if num_positions > 1:
        # Partial sums of 512 blocks of positions; less than an eighth of the logits here.
        splits = 512 * 128 * max(dim, 1)
        assert largest_tensor(module) <= max(num_rows * dim, splits, num_positions * dim)
    assert module_of(Wanted(loss=True)).count(f"@{TRITON_CALL}") == 1


# An H100 as XLA's CUDA compiler wants it described; it then needs no GPU.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  threads_per_core_limit: 2048
  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason='XLA\'s CUDA compiler is missing: pip install "jax[cuda12]"; it needs no GPU',
)
@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_gradients_compile_for_an_h100_in_little_memory(implementation: str):
    topology = topologies.get_topology_desc("cuda", "cuda", topology="1x1x1", target_config=H100)
    one_gpu = SingleDeviceSharding(topology.devices[0])
    arguments = [
        jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=one_gpu)
        for argument in ARGUMENTS
    ]

    def loss(activations, embeddings, targets):
        return cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, targets, implementation=implementation, precision="bfloat16"
        )

    with h100():
        lowered = jax.jit(gradient_of(loss)).lower(*arguments)
    memory = lowered.compile().memory_analysis()
    table_bytes, tile_bytes = V * D * 4, T * 4096 * 4
    partial_sums_bytes = 512 * 128 * (D + 1) * 4
    scratch_bytes = partial_sums_bytes if implementation == "gpu" else 3 * tile_bytes
    assert memory.temp_size_in_bytes <= table_bytes + scratch_bytes < T * V * 4
