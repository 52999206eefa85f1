"""What a training took: memory of the state by what it is, peaks, and time by what it went into."""

import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from recmodels._src.train.placement import Placement
from recmodels._src.train.step import TrainState

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Timing:
    """Adds up wall-clock seconds by name; a call within another counts only once, for itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Time of all calls of a name so far."""
        self.calls: dict[str, int] = {}
        """Their number."""
        self._within = 0.0  # time of timed calls inside of the one that is running

    def of(
        self, name: str, function: Callable[_Args, _Result], *args: _Args.args, **kw: _Args.kwargs
    ) -> _Result:
        """`function(*args, **kw)`, its time added to that of `name`, also when it raises."""
        outer, self._within = self._within, 0.0
        started = time.perf_counter()
        try:
            return function(*args, **kw)
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._within
            self.calls[name] = self.calls.get(name, 0) + 1
            self._within = outer + elapsed

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Seconds and calls by name, ready for JSON."""
        return {
            name: {"seconds": seconds, "calls": self.calls[name]}
            for name, seconds in self.seconds.items()
        }


def used_resources(state: TrainState, placement: Placement, timing: Timing) -> dict[str, Any]:
    """Memory and time of a training, ready for JSON; of this process and its first device.

    Args:
        state: arrays of the training.
        placement: where they are.
        timing: what the time went into.

    Returns:
        `mesh`, `device` (kind), `state_bytes` by class and device, `device_peak_bytes` (None where
        the device does not count), `process_peak_bytes` and `parts` (of the time).
    """
    device = min(state.step.sharding.addressable_devices, key=lambda device: device.id)
    memory = device.memory_stats() or {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "mesh": placement.describe_mesh(),
        "device": device.device_kind,
        "state_bytes": state_bytes(state),
        "device_peak_bytes": memory.get("peak_bytes_in_use"),
        "process_peak_bytes": peak if sys.platform == "darwin" else peak * 1024,
        "parts": timing.to_dict(),
    }


def state_bytes(state: TrainState) -> dict[str, int]:
    """Bytes of a state on each device, by what it is.

    Args:
        state: arrays, or their shapes and shardings.
    """
    table = {name: leaf for name, leaf in state.params.items() if name != "encoder"}
    classes = {
        "item table": table,
        "encoder": state.params["encoder"],
        "optimizer": state.optimizer,
        "average": state.average,
    }
    return {name: bytes_per_device(part) for name, part in classes.items()}


def bytes_per_device(tree: Any) -> int:
    """Bytes of all arrays of a tree on each device, without the padding of layouts."""
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def _leaf_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize
