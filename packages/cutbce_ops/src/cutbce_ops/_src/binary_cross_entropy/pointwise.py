"""The loss of one logit, elementwise: the hook through which one sweep serves a family of losses.

Everything here works on arrays of any shape, in XLA code and inside Pallas kernels alike, in
float32, and keeps the *relative* accuracy of tiny probabilities: 1 - p and log(p) are never formed.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

UNREACHABLE_LOGIT = 1e30  # finite, so that kernels may subtract it


def softplus(logits: Array, probabilities: Array) -> Array:
    """log(1 + e^x) from x and p = sigmoid(x), with one logarithm and no cancellation.

    For x < 0 it is -log1p(-p), relatively exact since p is; for x >= 0 it is x - log(p), where
    1 - p is exact and the result at least log 2.
    """
    return jnp.maximum(logits, 0) - jnp.log1p(-jnp.minimum(probabilities, 1 - probabilities))


def sigmoid(logits: Array) -> Array:
    """1 / (1 + e^-x), relatively exact down to 1e-38."""
    return jnp.reciprocal(1 + jnp.exp(-logits))


@dataclasses.dataclass(frozen=True)
class PointwiseLoss:
    """Cross-entropy of one logit z against a soft label y: 1 - s/2 at a target, s/2 elsewhere.

    With x = c tanh(z / c) (x = z without a cap), p = sigmoid(x), 1 - p_t = y (1 - p) + (1 - y) p,

        loss = (1 - p_t)^gamma (w y softplus(-x) + (1 - y) softplus(x))

    Without gamma and cap (`is_plain`) it is `slope * softplus(x) - label * x` with constants that
    depend on y only. Sweeps then compute just softplus and sigmoid; `linear_term.py` adds the rest.

    Attributes:
      label_smoothing: s, in [0, 1].
      pos_weight: w, factor on the part of the loss that the label selects.
      focal_gamma: gamma, at least 0; 0 for no focal factor.
      logit_cap: c, above 0, or None.
    """

    label_smoothing: float = 0.0
    pos_weight: float = 1.0
    focal_gamma: float = 0.0
    logit_cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the loss is linear in softplus(z) and z."""
        return self.focal_gamma == 0 and self.logit_cap is None

    @property
    def negative_slope(self) -> float:
        """Coefficient of softplus at an item that is no target, in the plain family."""
        return self._slope(self.label_smoothing / 2)

    @property
    def negative_label(self) -> float:
        """Coefficient of -x at an item that is no target, in the plain family."""
        return self.pos_weight * self.label_smoothing / 2

    @property
    def correction_is_linear(self) -> bool:
        """Whether `correction` is `-(1 - label_smoothing) * x`, with no other term."""
        return self.is_plain and self.pos_weight == 1

    def sweep_function(self, logits: Array) -> tuple[Array, Array]:
        """What a sweep computes per tile: (softplus, sigmoid) in the plain family, else `negative`.

        Args:
          logits: float32 of any shape.

        Returns:
          Summands of the loss and their derivatives by `logits`, same shape, float32.
        """
        if not self.is_plain:
            return self.negative(logits)
        probabilities = sigmoid(logits)
        return softplus(logits, probabilities), probabilities

    def negative(self, logits: Array) -> tuple[Array, Array]:
        """Loss of items that are no targets, and its derivative by `logits`."""
        return self._loss(logits, self.label_smoothing / 2)

    def positive(self, logits: Array) -> tuple[Array, Array]:
        """Loss of targets, and its derivative by `logits`."""
        return self._loss(logits, 1 - self.label_smoothing / 2)

    def correction(self, logits: Array) -> tuple[Array, Array]:
        """`positive` less `negative`: what a target adds to a sweep that took it for a negative."""
        if not self.is_plain:
            positive, negative = self.positive(logits), self.negative(logits)
            return positive[0] - negative[0], positive[1] - negative[1]
        difference = 1 - self.label_smoothing
        slope, label = (self.pos_weight - 1) * difference, self.pos_weight * difference
        probabilities = sigmoid(logits)
        return (
            slope * softplus(logits, probabilities) - label * logits,
            slope * probabilities - label,
        )

    def cap(self, logits: Array) -> tuple[Array, Array | None]:
        """Capped logits and their derivative; the logits and None without a cap."""
        return (logits, None) if self.logit_cap is None else _soft_cap(logits, self.logit_cap)

    def raw_threshold(self, threshold: float) -> float:
        """The uncapped logit that is cut to `threshold`; beyond the cap one that is never met."""
        cap = self.logit_cap
        if cap is None:
            return threshold
        if abs(threshold) >= cap:
            return math.copysign(UNREACHABLE_LOGIT, threshold)
        return cap * math.atanh(threshold / cap)

    def _slope(self, y: float) -> float:
        return 1 + (self.pos_weight - 1) * y

    def _loss(self, logits: Array, y: float) -> tuple[Array, Array]:
        capped, d_capped = self.cap(logits)
        loss, d_loss = self._focal(capped, y)
        return loss, d_loss if d_capped is None else d_loss * d_capped

    def _focal(self, x: Array, y: float) -> tuple[Array, Array]:
        """(1 - p_t)^gamma times the cross-entropy, for a logit that is already capped."""
        small = jnp.exp(-jnp.abs(x))  # each tail in its own exponential keeps its digits
        larger = jnp.reciprocal(1 + small)
        smaller = small * larger
        p, not_p = jnp.where(x >= 0, larger, smaller), jnp.where(x >= 0, smaller, larger)
        at_zero = jnp.log1p(small)
        loss = (1 - y) * (jnp.maximum(x, 0) + at_zero)
        loss = loss + self.pos_weight * y * (jnp.maximum(-x, 0) + at_zero)
        d_loss = (1 - y) * p - self.pos_weight * y * not_p
        if self.focal_gamma == 0:
            return loss, d_loss
        miss = y * not_p + (1 - y) * p  # 1 - p_t
        # p (1 - p) / miss, in a form that is not 0 / 0 when the logit is far on the right side.
        ratio = not_p if y == 0 else p if y == 1 else p * not_p / miss
        factor = _power(miss, self.focal_gamma)
        return factor * loss, factor * (d_loss + self.focal_gamma * (1 - 2 * y) * ratio * loss)


def _soft_cap(logits: Array, cap: float) -> tuple[Array, Array]:
    """Returns c tanh(z / c) and its derivative 1 - tanh^2, the latter without cancellation."""
    scaled = logits / cap
    decay = jnp.exp(-2 * jnp.abs(scaled))
    return cap * jnp.tanh(scaled), 4 * decay / jnp.square(1 + decay)


def _power(base: Array, exponent: float) -> Array:
    """base^exponent for base >= 0: whole powers by products, since e^(n log b) loses digits."""
    whole = math.floor(exponent)
    fraction = exponent - whole
    result = lax.integer_pow(base, whole)
    return result if fraction == 0 else result * jnp.exp(fraction * jnp.log(base))
