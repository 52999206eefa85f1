"""The sweep of binary cross-entropy in plain XLA, on any backend.

All items count as negatives here; `positives.py` corrects the few that are targets, and
`linear_term.py` adds what label smoothing and positive weights do to every item.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.binary_cross_entropy.tile_loop import masked, sweep_tiles

COUNT_STRIPS = 8


def dense_sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    """Sweeps all rows as negatives.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float; this device's rows.
      bias: `[V]` float, or None.
      d_per_position: `[T]` float32, factor of `sweep_function`'s derivatives; needed for
        gradients only.
      vocab_offset: `[]` int32, global number of row 0 of `embeddings`; None when this is the
        whole table, which needs no mask.
      config: static options.
      wanted: which results to compute.
    """
    zeros = jnp.zeros_like(activations[:, 0], dtype=jnp.float32)
    num_thresholds = len(config.logit_thresholds)
    counts = jnp.zeros_like(activations, shape=(len(zeros), num_thresholds), dtype=jnp.int32)
    sums = Sweep(
        loss=zeros if wanted.loss else None, num_predicted=counts if wanted.counts else None
    )
    sums, gradients = sweep_tiles(
        partial(_negatives, config), sums, None, activations, embeddings, bias,
        d_per_position if wanted.gradients else None, vocab_offset, config,
    )  # fmt: skip
    return dataclasses.replace(gradients, loss=sums.loss, num_predicted=sums.num_predicted)


def _negatives(
    config: SweepConfig, logits: Array, in_catalog: Array | None, _: Any, sums: Sweep
) -> tuple[Sweep, Array]:
    """Tile function: adds the losses of the items as negatives, and counts them."""
    losses, d_logits = config.pointwise.sweep_function(logits)
    loss, num_predicted = sums.loss, sums.num_predicted
    if loss is not None:
        loss = loss + masked(losses, in_catalog).sum(axis=1)
    if num_predicted is not None:
        num_predicted += _num_above(logits, in_catalog, config.logit_thresholds)
    return Sweep(loss=loss, num_predicted=num_predicted), d_logits


def _num_above(logits: Array, in_catalog: Array | None, thresholds: tuple[float, ...]) -> Array:
    """`[T, K]` int32, logits of a position above each threshold.

    Strips of the tile are added before the sum along a row. Summed at once the integers take 30 %
    of a sweep's CPU time (XLA stores a tile of them), in strips 3 %: T=512, V=100k, D=128, 2 cores.
    """
    num_rows = logits.shape[1]
    width = max(1, num_rows // COUNT_STRIPS)

    def count(threshold: float) -> Array:
        def is_above(start: int, stop: int) -> Array:
            strip = logits[:, start:stop] > threshold
            if in_catalog is not None:
                strip = strip & in_catalog[None, start:stop]
            return strip.astype(jnp.int32)

        whole = num_rows // width * width
        strips = [is_above(start, start + width) for start in range(0, whole, width)]
        total = functools.reduce(jnp.add, strips).sum(axis=1)
        return total + is_above(whole, num_rows).sum(axis=1) if whole < num_rows else total

    return jnp.stack([count(threshold) for threshold in thresholds], axis=1)
