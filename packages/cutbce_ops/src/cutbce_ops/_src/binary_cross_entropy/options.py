"""The options of one call, checked once and turned into what the sweeps take."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import checks
from cutbce_ops._src.binary_cross_entropy.config import (
    IMPLEMENTATIONS,
    PRECISIONS,
    SweepConfig,
    TileConfig,
)
from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss
from cutbce_ops._src.sharded import num_global_rows
from cutbce_ops._src.sharding import LossSharding


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the public functions as the caller gave them; see `cut_binary_cross_entropy`.

    `thresholds` are None when nothing is to be counted, else the result of `as_thresholds`. The
    other fields are unchecked, hence `Any`.
    """

    vocab_size: Any
    label_smoothing: Any
    logit_scale: Any
    logit_cap: Any
    sharding: Any
    precision: Any
    implementation: Any
    tiles: Any
    pos_weight: Any = None
    focal_gamma: Any = 0.0
    thresholds: tuple[float, ...] | None = None

    def sweep_config(self, embeddings: Array) -> SweepConfig:
        """Checks every option but `logit_scale` for this table, or this device's shard of it."""
        checks.require_choice("precision", self.precision, PRECISIONS)
        checks.require_choice("implementation", self.implementation, (None, *IMPLEMENTATIONS))
        for name, kind in (("tiles", TileConfig), ("sharding", LossSharding)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"`{name}` must be a {kind.__name__} or None; got {type(value).__name__}."
                )
        pointwise = self._pointwise()
        logits = (math.log(t) - math.log1p(-t) for t in self.thresholds or ())
        return SweepConfig(
            vocab_size=checks.resolve_vocab_size(
                self.vocab_size, num_global_rows(embeddings, self.sharding)
            ),
            pointwise=pointwise,
            precision=self.precision,
            tiles=self.tiles,
            implementation=self.implementation,
            logit_thresholds=tuple(pointwise.raw_threshold(logit) for logit in logits),
        )

    def scaled(self, activations: Array) -> Array:
        """Activations times `logit_scale`, rounded once to their dtype."""
        scale = self.logit_scale
        if scale is None:
            return activations
        if not hasattr(scale, "dtype") or isinstance(scale, float):  # numpy.float64 is a float
            checks.require_number("logit_scale", scale, 0.0, float("inf"), low_is_allowed=False)
            scale = jnp.float32(scale)
        checks.require_float("logit_scale", scale)
        checks.require_shape("logit_scale", scale, (), "one factor for all logits")
        scaled = activations.astype(jnp.float32) * jnp.asarray(scale).astype(jnp.float32)
        return scaled.astype(activations.dtype)

    def _pointwise(self) -> PointwiseLoss:
        checks.require_number("label_smoothing", self.label_smoothing, 0.0, 1.0)
        checks.require_number("focal_gamma", self.focal_gamma, 0.0, float("inf"))
        for name in ("pos_weight", "logit_cap"):
            value = getattr(self, name)
            if value is not None:
                checks.require_number(name, value, 0.0, float("inf"), low_is_allowed=False)
        return PointwiseLoss(
            label_smoothing=float(self.label_smoothing),
            pos_weight=1.0 if self.pos_weight is None else float(self.pos_weight),
            focal_gamma=float(self.focal_gamma),
            logit_cap=None if self.logit_cap is None else float(self.logit_cap),
        )


def as_thresholds(thresholds: Any) -> tuple[float, ...]:
    """Probabilities as a tuple; raises unless they lie in (0, 1) and ascend."""
    values = thresholds if isinstance(thresholds, tuple) else (thresholds,)
    for value in values:
        checks.require_number("thresholds", value, 0.0, 1.0, low_is_allowed=False)
    ascends = all(low < high for low, high in itertools.pairwise(values))
    if not values or not ascends or values[-1] == 1:
        raise ValueError(
            "`thresholds` must be one probability or a tuple of strictly increasing ones in "
            f"(0, 1); got {thresholds!r}."
        )
    return tuple(float(value) for value in values)
