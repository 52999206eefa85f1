"""The two sweeps of softmax cross-entropy: a streaming log-sum-exp, and both gradients.

Only the functions of one tile are here; the loop over tiles is that of binary cross-entropy, and
so is the correction for the targets: a target adds `-x` to either loss.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pointwise import UNREACHABLE_LOGIT
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep
from cutbce_ops._src.binary_cross_entropy.tile_loop import masked, sweep_tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The log-sum-exp of the logits of each position, in two parts.

    Their sum would round: at logits of 10^4 every probability would be wrong by 5e-4.

    Attributes:
      largest: `[T]` float32, largest logit.
      log_total: `[T]` float32, log of `sum_v exp(x_v - largest)`.
    """

    largest: Any
    log_total: Any


def largest_and_total(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
) -> tuple[Array, Array]:
    """Largest logit m per position and `sum_v exp(x_v - m)`, over the rows in the catalog.

    Arguments as in `sweep_tiles`. Two such pairs merge by rescaling to the larger m.

    Returns:
      Two arrays `[T]` float32.
    """
    zeros = jnp.zeros_like(activations[:, 0], dtype=jnp.float32)
    sums = (zeros - UNREACHABLE_LOGIT, zeros)  # finite: shards without a row in use keep it
    sums, _ = sweep_tiles(
        partial(_largest_and_total, config), sums, None, activations, embeddings, bias, None,
        vocab_offset, config,
    )  # fmt: skip
    return sums


def gradients(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    normalizer: Normalizer,
    d_per_position: Array,
    vocab_offset: Array | None,
    config: SweepConfig,
) -> Sweep:
    """Gradients of `sum_t d_per_position_t logsumexp_t`; recomputes the probabilities."""
    _, swept = sweep_tiles(
        partial(_probabilities, config), (), normalizer, activations, embeddings, bias,
        d_per_position, vocab_offset, config,
    )  # fmt: skip
    return swept


def _largest_and_total(
    config: SweepConfig, logits: Array, in_catalog: Array | None, _: Any, sums: tuple
) -> tuple[tuple, None]:
    largest, total = sums
    logits, _ = config.pointwise.cap(logits)
    logits = masked(logits, in_catalog, -UNREACHABLE_LOGIT)
    new_largest = jnp.maximum(largest, logits.max(axis=0))
    terms = masked(jnp.exp(logits - new_largest[None, :]), in_catalog)
    return (new_largest, total * jnp.exp(largest - new_largest) + terms.sum(axis=0)), None


def _probabilities(
    config: SweepConfig, logits: Array, in_catalog: Array | None, normalizer: Normalizer, sums: Any
) -> tuple[Any, Array]:
    logits, d_capped = config.pointwise.cap(logits)
    # No logit exceeds the largest but those of filled-up positions, which must stay finite.
    below_largest = jnp.minimum(logits - normalizer.largest[None, :], 0)
    d_logits = jnp.exp(below_largest - normalizer.log_total[None, :])
    return sums, masked(d_logits if d_capped is None else d_logits * d_capped, in_catalog)
