"""Slices that are not attached, as libtpu describes them."""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from cutbce_ops._src.tpu_lab.chips import CHIPS
from cutbce_ops._src.tpu_lab.errors import TpuCompilerMissingError


def require(*packages: str) -> None:
    """Raises `TpuCompilerMissingError` for the first package that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise TpuCompilerMissingError(package)


def check_name(topology: str) -> tuple[int, ...]:
    """Chips of a slice along its axes; ValueError unless the name reads `chip:AxB` or `chip:AxBxC`.

    >>> check_name("v6e:2x4")
    (2, 4)
    """
    if not isinstance(topology, str):
        raise TypeError(f"`topology` must be text such as 'v6e:2x4'; got {topology!r}.")
    name, _, sizes = topology.partition(":")
    dims = sizes.split("x")
    if name not in CHIPS or not all(size.isdigit() and int(size) for size in dims):
        raise ValueError(
            "`topology` must be a chip and its slice, such as 'v6e:2x4' or 'v5p:2x2x1', with a "
            f"chip of {', '.join(CHIPS)}; got {topology!r}."
        )
    return tuple(int(size) for size in dims)


def describe(topology: str) -> Any:
    """What libtpu knows of the slice, with its `devices`.

    Raises:
        TpuCompilerMissingError: libtpu is not installed.
        ValueError: libtpu does not know the slice.
    """
    from jax.experimental import topologies

    require("libtpu")
    # libtpu takes hosts of 2x2 chips for granted, which a single chip does not fill.
    single = math.prod(check_name(topology)) == 1
    options = {"chips_per_host_bounds": (1, 1, 1)} if single else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except Exception as error:  # libtpu raises several types for one mistake
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"`topology` {topology!r} is not known to libtpu ({reason}).") from error


def concrete_mesh(
    topology: str,
    shape: Sequence[int],
    axis_names: Sequence[str],
    axis_types: Sequence[str],
    device_ids: Sequence[int] = (),
) -> Mesh:
    """Mesh of the slice's own devices; the compiling process makes it.

    Args:
        topology: chip and slice.
        shape: devices along each axis.
        axis_names: one name per axis.
        axis_types: names of `AxisType`, one per axis.
        device_ids: the devices in the order of the mesh; if none, neighbours become neighbours.

    Raises:
        ValueError: the slice is unknown, or has fewer devices than the mesh.
    """
    from jax.experimental import mesh_utils

    devices = describe(topology).devices
    size = math.prod(shape)
    if size > len(devices):
        raise ValueError(
            f"the program runs on {size} devices; `topology` {topology!r} has {len(devices)}."
        )
    if device_ids:
        known = {device.id: device for device in devices}
        array = np.array([known[number] for number in device_ids]).reshape(shape)
    elif size == len(devices):
        array = mesh_utils.create_device_mesh(tuple(shape), devices)
    else:
        array = np.array(devices[:size]).reshape(shape)
    types = tuple(AxisType[name] for name in axis_types)
    return Mesh(array, tuple(axis_names), axis_types=types)
