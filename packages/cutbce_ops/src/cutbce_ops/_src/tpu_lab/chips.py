"""Figures of the TPU generations that the lab compiles for."""

import dataclasses
from collections.abc import Sequence

import jax

# What JAX does not know of a chip. Clock: the one that turns MXU slots into the published peak
# FLOP/s, since clocks are not published. ICI: the vendor's bidirectional GB/s per chip, divided by
# two directions and by the ports (four in a 2-D torus, six in a 3-D one):
# v4 600 / 6, v5e 400 / 4, v5p 1200 / 6, v6e 800 / 4, 7x 1200 / 6.
# name: (JAX's device kind, JAX's chip version, TensorCores per device, GHz, ports, GB/s one way)
_TABLE = {
    "v4": ("TPU v4", "v4", 1, 1.05, 6, 50),
    "v5e": ("TPU v5 lite", "v5e", 1, 1.5, 4, 50),
    "v5p": ("TPU v5", "v5p", 2, 1.75, 6, 100),
    "v6e": ("TPU v6 lite", "v6e", 1, 1.75, 4, 100),
    "tpu7x": ("TPU7x", "7x", 1, 2.2, 6, 100),
}
CHIPS = tuple(_TABLE)
"""Names of the chips that the lab knows, as they start the name of a topology."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU device as JAX counts them: a chip, or one of its two cores (v4 and 7x)."""

    name: str
    """Name that starts a topology, as in `v6e:2x4`."""
    device_kind: str
    """What JAX calls the device."""
    num_cores: int
    """TensorCores of the device."""
    clock_hz: float
    """Issue cycles per second, derived from the published peak."""
    bf16_flops_per_s: float
    """Peak of all its cores."""
    hbm_bytes: int
    """HBM of the device."""
    hbm_bytes_per_s: float
    """HBM bandwidth of the device."""
    vmem_bytes: int
    """VMEM of one core."""
    ici_ports: int
    """Inter-chip links of a chip."""
    ici_bytes_per_s: float
    """One link, one direction."""


def chip(name: str) -> Chip:
    """Figures of a chip, by its name or by the name of a topology.

    Args:
        name: one of `CHIPS`, or a topology such as `v6e:2x4`.

    Returns:
        The chip's figures, per JAX device.

    Raises:
        ValueError: the lab does not know the chip.

    Example:
        >>> from cutbce_ops import tpu_lab
        >>> tpu_lab.chip("v6e:2x4").vmem_bytes // 2**20
        128
    """
    from jax.experimental.pallas import tpu as pltpu

    first = name.split(":")[0]
    if first not in _TABLE:
        raise ValueError(f"`{name}` must start with one of {', '.join(CHIPS)}, as in 'v6e:2x4'.")
    kind, version, cores, ghz, ports, ici = _TABLE[first]
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), cores)  # all of it per core
    return Chip(
        name=first,
        device_kind=kind,
        num_cores=cores,
        clock_hz=ghz * 1e9,
        bf16_flops_per_s=float(info.bf16_ops_per_second * cores),
        hbm_bytes=info.hbm_capacity_bytes * cores,
        hbm_bytes_per_s=float(info.mem_bw_bytes_per_second * cores),
        vmem_bytes=info.vmem_capacity_bytes,
        ici_ports=ports,
        ici_bytes_per_s=ici * 1e9,
    )


def target(chip_name: str) -> jax.sharding.use_abstract_mesh:
    """Context manager in which Pallas lowers kernels for a chip that is not attached.

    Some Pallas operations ask for the device's kind while they are lowered and fail on a machine
    without a TPU. `compile_for` does this by itself.

    Args:
        chip_name: one of `CHIPS`, or a topology such as `v6e:2x4`.

    Returns:
        A context manager, with an abstract mesh of one such device in scope.

    Raises:
        ValueError: the lab does not know the chip.

    Example:
        >>> import jax
        >>> from cutbce_ops import tpu_lab
        >>> with tpu_lab.target("v6e"):
        ...     print(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
        TPU v6 lite
    """
    return jax.sharding.use_abstract_mesh(mesh_for(chip_name, (1,), ("device",)))


def mesh_for(
    topology: str, shape: Sequence[int], axis_names: Sequence[str]
) -> jax.sharding.AbstractMesh:
    """Mesh of chips that are not attached, for shardings, `shard_map` and `LossSharding`.

    It needs no libtpu: which device of the slice takes which place is decided when a program is
    compiled, so that neighbours on the mesh are neighbours on the slice.

    Args:
        topology: chip and slice, such as `v6e:2x4` or `tpu7x:2x2x1`.
        shape: devices along each axis of the mesh. v4 and 7x have two devices per chip. A mesh
            smaller than the slice takes its first devices.
        axis_names: one name per axis.

    Returns:
        The mesh, with all axes of the type Auto (`jax.make_mesh` makes explicit ones by default).

    Raises:
        ValueError: the lab does not know the chip.

    Example:
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from cutbce_ops import tpu_lab
        >>> mesh = tpu_lab.mesh_for("v6e:2x4", (8,), ("data",))
        >>> NamedSharding(mesh, PartitionSpec("data")).shard_shape((4096, 128))
        (512, 128)
    """
    known = chip(topology)
    return jax.sharding.AbstractMesh(
        tuple(shape),
        tuple(axis_names),
        (jax.sharding.AxisType.Auto,) * len(axis_names),
        abstract_device=jax.sharding.AbstractDevice(known.device_kind, known.num_cores, "tpu"),
    )
