"""Figures of the TPU generations that the lab compiles for."""

import dataclasses
from collections.abc import Sequence

import jax

from cutbce_ops._src import hardware

# Topologies begin with the chip's name, but for the 7x.
_CHIPS = {{"7x": "tpu7x"}.get(name, name): spec for name, spec in hardware.CHIPS.items()}
CHIPS = tuple(_CHIPS)
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
    first = name.split(":")[0] if isinstance(name, str) else None
    if first not in _CHIPS:
        raise ValueError(
            f"The name of a chip or topology must start with one of {', '.join(CHIPS)}, as in "
            f"'v6e:2x4'; got {name!r}."
        )
    core = _CHIPS[first]
    cores = core.cores_per_device
    return Chip(
        name=first,
        device_kind=core.device_kind,
        num_cores=cores,
        clock_hz=core.clock_hz,
        bf16_flops_per_s=core.bfloat16_flops_per_s * cores,
        hbm_bytes=core.hbm_bytes * cores,
        hbm_bytes_per_s=core.hbm_bytes_per_s * cores,
        vmem_bytes=core.vmem_bytes,
        ici_ports=core.ici_ports,
        ici_bytes_per_s=core.ici_bytes_per_s,
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
