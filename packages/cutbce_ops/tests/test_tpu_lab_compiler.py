"""The TPU lab with the real compiler; `nox -s tests-tpu` installs it."""

import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from cutbce_ops import tpu_lab

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason='libtpu, the TPU compiler, is missing: pip install "jax[tpu]"',
    ),
]

MIB = 2**20
ROWS, WIDTH = 4096, 256


@pytest.fixture(scope="module")
def compiler() -> Iterator[tpu_lab.Compiler]:
    with tpu_lab.Compiler() as running:
        yield running


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kernel(x_ref, w_ref, out_ref):
    """8 products per step of the grid; in its last step 128 exponentials after them."""

    def product(i, _):
        rows = pl.ds(i * 128, 128)
        out_ref[rows, :] = jnp.dot(x_ref[rows, :], w_ref[...], preferred_element_type=jnp.float32)

    jax.lax.fori_loop(0, 8, lambda i, _: (product(i, _), 0)[1], 0)

    @pl.when(pl.program_id(0) == 3)
    def _():
        def exponential(i, _):
            rows = pl.ds(i * 8, 8)
            out_ref[rows, :] = jnp.exp(out_ref[rows, :])
            return 0

        jax.lax.fori_loop(0, 128, exponential, 0)


def sweep(x, w):
    return pl.pallas_call(
        kernel,
        out_shape=float32(ROWS, WIDTH),
        grid=(4,),
        in_specs=[
            pl.BlockSpec((1024, WIDTH), lambda i: (i, 0)),
            pl.BlockSpec((WIDTH, WIDTH), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((1024, WIDTH), lambda i: (i, 0)),
        name="sweep",
    )(x, w)


def scanned(x, w):
    return jax.lax.scan(lambda x, _: (sweep(x, w), None), x, None, length=5)[0]


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_kernel(compiler: tpu_lab.Compiler, topology: str):
    report = tpu_lab.compile_for(
        scanned, topology, float32(ROWS, WIDTH), float32(WIDTH, WIDTH), compiler=compiler
    )
    (found,) = report.kernels
    assert (found.name, found.count) == ("sweep", 5)
    assert [loop.depth for loop in found.loops] == [0, 1, 2, 2]
    assert [loop.iterations for loop in found.loops] == [1, 4, 32, 512]
    assert [loop.conditional for loop in found.loops] == [False, False, False, True]
    products, exponentials = found.inner_loops
    # 128x256x256 products; the slowest of the three takes 214 bundles for them, the best 108.
    assert 50 <= products.bundles <= 300
    assert products.utilization["MXU"] > 0.1
    assert exponentials.utilization["EUP"] > 0.1
    assert exponentials.utilization["MXU"] == 0
    assert found.seconds == pytest.approx(found.cycles / report.chip.clock_hz, rel=1e-6)
    assert report.step_seconds >= 5 * found.seconds
    print(report)


def test_measure_kernel(compiler: tpu_lab.Compiler):
    loops = tpu_lab.measure_kernel(
        sweep, "v6e:1x1", float32(ROWS, WIDTH), float32(WIDTH, WIDTH), compiler=compiler
    )
    assert [loop.trips for loop in loops] == [8, 128]


def test_matmul_is_bound_by_the_mxu(compiler: tpu_lab.Compiler):
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    report = tpu_lab.compile_for(lambda x: x @ x, "v6e:1x1", x, compiler=compiler)
    ideal = 2 * 2048**3 / report.chip.bf16_flops_per_s
    assert report.bound == "MXU"
    # Busy time counts the MXU's slots, the step XLA's cycles: two ways to about the same figure.
    assert ideal <= report.busy_seconds["MXU"] <= report.step_seconds <= 1.5 * ideal


def test_sharded_scan(compiler: tpu_lab.Compiler):
    mesh = tpu_lab.mesh_for("v6e:2x4", (2, 4), ("data", "model"))
    data = NamedSharding(mesh, PartitionSpec("data"))
    split = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    replicated = NamedSharding(mesh, PartitionSpec())

    def local(weights, x):
        def layer(x, part):
            whole = jax.lax.all_gather(part, "model", axis=1, tiled=True)
            return jnp.maximum(x @ whole, 0), None

        return jax.lax.psum(jax.lax.scan(layer, x, weights)[0].sum(0), "data"), weights

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split.spec, data.spec),
        out_specs=(replicated.spec, split.spec),
        check_vma=False,  # the sum is the same along "model"
    )
    report = tpu_lab.compile_for(
        step,
        "v6e:2x4",
        float32(7, 1024, 1024),
        float32(2048, 1024),
        in_shardings=(split, data),
        out_shardings=(replicated, split),
        donate_argnums=0,
        compiler=compiler,
    )
    gathers = [c.collective for c in report.collectives if c.collective.kind == "all-gather"]
    assert [(c.axes, c.group_size, c.count) for c in gathers] == [(("model",), 4, 7)]
    sums = [c.collective for c in report.collectives if c.collective.kind == "all-reduce"]
    assert [(c.axes, c.num_bytes) for c in sums] == [(("data",), 1024 * 4)]
    # A quarter of the weights, donated and returned, and half of the rows.
    assert report.memory.arguments_bytes == (7 * MIB * 4) // 4 + 1024 * 1024 * 4
    assert report.memory.aliased_bytes == 7 * MIB
    assert report.num_devices == 8


@pytest.mark.skipif(
    os.environ.get("TPU_SKIP_MDS_QUERY") != "1",
    reason="set TPU_SKIP_MDS_QUERY=1 and ALLOW_MULTIPLE_LIBTPU_LOAD=1 (nox -s tests-tpu does)",
)
def test_same_memory_as_in_one_process(compiler: tpu_lab.Compiler):
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4")
    mesh = topologies.make_mesh(slice_, (8,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32, sharding=rows)

    def step(x, y):
        return x + y, jnp.tanh(x @ y.T).sum()

    here = jax.jit(step, donate_argnums=0).lower(x, x).compile().memory_analysis()
    there = tpu_lab.compile_for(step, "v6e:2x4", x, x, donate_argnums=0, compiler=compiler).memory
    assert there.peak_bytes == here.peak_memory_in_bytes
    assert there.temporaries_bytes == here.temp_size_in_bytes
    assert there.aliased_bytes == here.alias_size_in_bytes == 1024 * 512 * 4


def test_does_not_fit(compiler: tpu_lab.Compiler):
    x = float32(102_400, 102_400)  # 39 GiB, and the chip has 32
    with pytest.raises(tpu_lab.DoesNotFitError, match=r"RESOURCE_EXHAUSTED.*HBM"):
        tpu_lab.compile_for(lambda x: x + 1, "v6e:1x1", x, compiler=compiler)


def test_every_chip_and_too_few_devices():
    x = float32(256, 256)
    with tpu_lab.Compiler(schedule=False) as running:
        for topology in ("v4:2x2x1", "v5e:2x4", "v5p:2x2x1", "v6e:16x16", "tpu7x:2x2x1"):
            report = tpu_lab.compile_for(jnp.tanh, topology, x, schedule=False, compiler=running)
            assert report.memory.arguments_bytes == 256 * 256 * 4
            assert report.step_seconds > 0
        mesh = tpu_lab.mesh_for("v6e:2x4", (16,), ("data",))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        with pytest.raises(ValueError, match="runs on 16 devices; `topology` 'v6e:2x4' has 8"):
            tpu_lab.compile_for(
                jnp.tanh, "v6e:2x4", x, in_shardings=rows, schedule=False, compiler=running
            )
        with pytest.raises(ValueError, match="not known to libtpu"):
            tpu_lab.compile_for(jnp.tanh, "v6e:3x3", x, schedule=False, compiler=running)


def test_example_of_the_guide(capsys: pytest.CaptureFixture[str]):
    guide = pathlib.Path(__file__).parents[3] / "docs" / "tpu-lab.md"
    (example,) = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(guide), "exec"), {})
    assert tpu_lab.TpuReport.label in capsys.readouterr().out
