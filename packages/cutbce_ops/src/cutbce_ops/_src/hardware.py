"""What is known about accelerators; the only module that asks JAX which one a program is for.

Figures are those of `jax.experimental.pallas.tpu.get_tpu_info_for_chip` (a test compares them); the
clock is the one at which the matrix units reach the stated peak.
"""

import dataclasses

import jax

MIB, GB = 2**20, 10**9
LANES = 128  # columns of a TPU register


@dataclasses.dataclass(frozen=True)
class HardwareSpec:
    """One TPU chip (a TensorCore of it, where JAX shows several as devices).

    Attributes:
      chip: name as in topologies, such as "v6e".
      device_kind: what JAX calls the device.
      vmem_bytes: on-chip memory that a kernel may use.
      hbm_bytes: main memory.
      hbm_bytes_per_s: bandwidth of the main memory.
      bfloat16_flops_per_s: peak of the matrix units.
      clock_hz: bundles issued per second.
      matmul_size: rows and columns of a matrix unit.
      has_bfloat16_elements: whether the vector unit computes in bfloat16.
      cores_per_device: TensorCores of what JAX shows as one device; all else is of one of them.
      ici_ports: links of a chip to its neighbours.
      ici_bytes_per_s: bandwidth of one of these links in one direction.
    """

    chip: str
    device_kind: str
    vmem_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    bfloat16_flops_per_s: float
    clock_hz: float
    matmul_size: int
    has_bfloat16_elements: bool
    cores_per_device: int
    ici_ports: int
    ici_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"`{field.name}` must be above 0; got {value}.")

    @classmethod
    def of(cls, chip: str) -> "HardwareSpec":
        """The spec of a chip by name: "v4", "v5e", "v5p", "v6e" or "7x".

        Args:
          chip: the name.

        Returns:
          The spec.

        Raises:
          ValueError: no such chip is known.
        """
        if chip not in CHIPS:
            raise ValueError(f"`chip` must be one of {', '.join(CHIPS)}; got {chip!r}.")
        return CHIPS[chip]


# The bandwidth of a link is the vendor's of a chip, in GB/s and both directions, by two and by its
# ports (four in a 2-D torus, six in a 3-D one): v4 600 / 6, v5e 400 / 4, v5p 1200 / 6, v6e 800 / 4,
# 7x 1200 / 6.
CHIPS = {
    spec.chip: spec
    for spec in (
        HardwareSpec(
            "v4", "TPU v4", 16 * MIB, int(17.2 * GB), 615e9, 137.5e12, 1.05e9, 128, False,
            1, 6, 50e9,
        ),
        HardwareSpec(
            "v5e", "TPU v5 lite", 128 * MIB, int(17.2 * GB), 820e9, 197e12, 1.5e9, 128, False,
            1, 4, 50e9,
        ),
        HardwareSpec(
            "v5p", "TPU v5", 64 * MIB, int(51.5 * GB), 1230e9, 229.5e12, 1.75e9, 128, False,
            2, 6, 100e9,
        ),
        HardwareSpec(
            "v6e", "TPU v6 lite", 128 * MIB, int(34.4 * GB), 1640e9, 920e12, 1.75e9, 256, True,
            1, 4, 100e9,
        ),
        HardwareSpec(
            "7x", "TPU7x", 64 * MIB, 103 * GB, 3700e9, 1155e12, 2.2e9, 256, True, 1, 6, 100e9
        ),
    )
}  # fmt: skip
# Runs on all of them: the least memory but v4's, no arithmetic that one of them lacks.
ANY_TPU = dataclasses.replace(
    CHIPS["v5p"], chip="any", device_kind="unknown TPU", hbm_bytes=CHIPS["v5e"].hbm_bytes
)


def target_platform() -> str | None:
    """Platform of the mesh in scope ("cpu", "tpu", "cuda", ...); None when no mesh tells."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform or _platform_of_kind(device.device_kind)


def platform() -> str:
    """Platform of the mesh in scope, else that of the default backend."""
    return target_platform() or jax.default_backend()


def may_target_tpu() -> bool:
    """Whether the program being traced may be lowered for a TPU.

    A mesh in scope decides (`tpu_lab.target` sets one for an absent chip). Without one the default
    backend does: tracing the kernel takes seconds, which a machine without a TPU should not spend.
    """
    return platform() == "tpu"


def target_tpu() -> HardwareSpec:
    """The TPU a program is for: of the mesh in scope, else the attached one, else `ANY_TPU`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return tpu_of_kind(device.device_kind)
    if jax.default_backend() == "tpu":
        return tpu_of_kind(jax.devices()[0].device_kind)
    return ANY_TPU


def tpu_of_kind(device_kind: str) -> HardwareSpec:
    """The spec for what JAX calls a device; `ANY_TPU` for one that is not known."""
    return next((spec for spec in CHIPS.values() if spec.device_kind == device_kind), ANY_TPU)


def _platform_of_kind(device_kind: str) -> str:
    return "tpu" if device_kind.startswith("TPU") else device_kind
