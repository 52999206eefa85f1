"""The operator compiled by the TPU compiler for slices that are not attached.

Needs libtpu; `nox -s tests-tpu` installs it. Bounds are per chip, from the compiler, and nothing
here runs on a TPU.
"""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import cutbce_ops

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason='libtpu, the TPU compiler, is missing: pip install "jax[tpu]"',
    ),
    # libtpu looks for chips when it loads, unless told otherwise before that.
    pytest.mark.skipif(
        os.environ.get("TPU_SKIP_MDS_QUERY") != "1",
        reason="set TPU_SKIP_MDS_QUERY=1 and ALLOW_MULTIPLE_LIBTPU_LOAD=1 (nox -s tests-tpu does)",
    ),
]

SLICES = ("v5e:2x4", "v6e:2x4")
MIB = 2**20
T, V, D, L = 16_384, 100_000, 128, 8


def compiled(topology: str, layout, function, positions=T, rows=V, dim=D):
    """Compiles `function(activations, embeddings, targets, sharding)` for all chips of a slice."""
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = topologies.make_mesh(slice_, (len(slice_.devices),), ("data",))
    mesh = Mesh(mesh.devices, ("data",), axis_types=(AxisType.Auto,))
    sharding = cutbce_ops.LossSharding(mesh, *layout)

    def shape(spec: PartitionSpec, dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    arguments = (
        shape(sharding.position_spec(), (positions, dim), jnp.float32),
        shape(sharding.vocabulary_spec(), (rows, dim), jnp.float32),
        shape(sharding.position_spec(), (positions, L), jnp.int32),
    )
    step = jax.jit(lambda *arrays: function(*arrays, sharding))
    return step.lower(*arguments).compile()


def loss_and_gradients(mode: str):
    def function(activations, embeddings, targets, sharding):
        def loss(a, e):
            return cutbce_ops.cut_binary_cross_entropy(
                a, e, targets, sharding=sharding, gradient_mode=mode
            )

        return jax.value_and_grad(loss, (0, 1))(activations, embeddings)

    return function


def with_counts(activations, embeddings, targets, sharding):
    return cutbce_ops.cut_binary_cross_entropy_with_aux(
        activations, embeddings, targets, sharding=sharding
    )


@pytest.mark.parametrize("mode", ["fused", "recompute"])
@pytest.mark.parametrize("topology", SLICES)
def test_replicated_table(topology: str, mode: str):
    """8 chips, T/8 positions each; dense logits alone would take 781 MiB per chip."""
    memory = compiled(topology, ("data", None), loss_and_gradients(mode)).memory_analysis()
    # Table, its gradient and the summed gradient, 48.8 MiB each, and a few tiles of 32 MiB.
    assert memory.peak_memory_in_bytes <= 350 * MIB, memory.peak_memory_in_bytes / MIB


@pytest.mark.parametrize("topology", SLICES)
def test_sharded_table(topology: str):
    """V/8 rows a chip; the positions are gathered, the table never is."""
    program = compiled(topology, ("data", "data"), loss_and_gradients("fused"), rows=100_352)
    memory = program.memory_analysis()
    assert memory.peak_memory_in_bytes <= 250 * MIB, memory.peak_memory_in_bytes / MIB
    assert f"f32[100352,{D}]" not in program.as_text()


@pytest.mark.parametrize("topology", SLICES)
def test_counts(topology: str):
    memory = compiled(topology, ("data", None), with_counts).memory_analysis()
    assert memory.peak_memory_in_bytes <= 250 * MIB, memory.peak_memory_in_bytes / MIB


@pytest.mark.parametrize("topology", SLICES)
def test_ranking(topology: str):
    def rank(queries, embeddings, targets, sharding):
        ranks = cutbce_ops.cut_target_ranks(queries, embeddings, targets)
        return ranks, cutbce_ops.cut_top_k(queries, embeddings, 8, exclude=targets)

    memory = compiled(topology, ("data", None), rank, positions=512).memory_analysis()
    assert memory.peak_memory_in_bytes <= 200 * MIB, memory.peak_memory_in_bytes / MIB


@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_the_summed_table_gradient_needs_no_second_table(mode: str):
    """Its all-reduce is cut into blocks of 32 MiB; in one piece it took a second table."""
    rows, dim = 876_939, 256
    program = compiled("v6e:2x4", ("data", None), loss_and_gradients(mode), rows=rows, dim=dim)
    memory, table_bytes = program.memory_analysis(), rows * dim * 4
    assert memory.temp_size_in_bytes <= 50 * MIB < table_bytes
