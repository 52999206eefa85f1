"""Softmax cross-entropy over a mesh: vocabulary shards merge their sums of exponentials.

As in binary cross-entropy positions are gathered over the axes that split both, every device
sweeps its own rows, and the table never travels. All arguments are laid out already.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src import sharded
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.positives import correct_for_targets
from cutbce_ops._src.binary_cross_entropy.sharded import reduce_gradients
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.sharding import LossSharding
from cutbce_ops._src.softmax_cross_entropy import sweeps
from cutbce_ops._src.softmax_cross_entropy.sweeps import Normalizer


def forward(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    config: SweepConfig,
    sharding: LossSharding | None,
) -> tuple[Array, Normalizer]:
    """Loss per position and the normalizer of its probabilities.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float.
      bias: `[V]` float or None.
      targets: `[T, 1]` int32, -1 for none.
      config: static options; `config.vocab_size` counts global rows.
      sharding: mesh layout, or None for one device.

    Returns:
      `[T]` float32, meaningless where there is no target, and the normalizer.
    """
    arrays = (activations, embeddings, bias, targets)
    if sharding is None:
        return _forward_here(*arrays, None, config, ())
    positions, rows = sharding.position_spec(), sharding.vocabulary_spec()
    run = sharded.run_on_shards(
        partial(_forward_on_shard, sharding=sharding, config=config), sharding,
        in_specs=(positions, rows, rows, positions), out_specs=(positions, positions),
    )  # fmt: skip
    return run(*arrays)


def gradients(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    normalizer: Normalizer,
    d_per_position: Array,
    config: SweepConfig,
    sharding: LossSharding | None,
) -> Sweep:
    """Gradients of `sum_t d_per_position_t loss_t`.

    The arguments are those of `forward`, the `normalizer` it returned, and `d_per_position`, `[T]`
    float32, zero where there is no target.
    """
    arrays = (activations, embeddings, bias, targets, normalizer, d_per_position)
    if sharding is None:
        return _gradients_here(*arrays, None, config)
    positions, rows = sharding.position_spec(), sharding.vocabulary_spec()
    run = sharded.run_on_shards(
        partial(
            _gradients_on_shard, sharding=sharding, config=config,
            with_part_of_gradients=sharded.is_manual(sharding),
        ),
        sharding,
        in_specs=(positions, rows, rows, positions, positions, positions),
        out_specs=Sweep(None, None, positions, rows, rows),
    )  # fmt: skip
    return run(*arrays)


def _forward_on_shard(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
                      *, sharding: LossSharding, config: SweepConfig) -> tuple:  # fmt: skip
    activations, targets = _gathered((activations, targets), sharding)
    offset, targets = _own_targets(targets, embeddings.shape[0], sharding)
    found = _forward_here(
        activations, embeddings, bias, targets, offset, config, sharding.vocabulary_names
    )
    return jax.tree.map(partial(_own_positions, sharding=sharding), found)


def _forward_here(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
                  vocab_offset: Array | None, config: SweepConfig,
                  vocabulary_names: tuple[str, ...]) -> tuple[Array, Normalizer]:  # fmt: skip
    """The sweep over the rows at hand, merged over the devices that hold the others."""
    largest, total = sweeps.largest_and_total(activations, embeddings, bias, vocab_offset, config)
    overall = sharded.max_over(largest, vocabulary_names)
    total = sharded.sum_over(total * jnp.exp(largest - overall), vocabulary_names)
    # The device that holds the target's row subtracts its logit, before anything is rounded.
    below_largest = correct_for_targets(
        Sweep(loss=jnp.where(targets[:, 0] >= 0, overall, 0)), activations, embeddings, bias,
        targets, None, config, Wanted(loss=True),
    ).sweep.loss  # fmt: skip
    normalizer = Normalizer(overall, jnp.log(total))
    return sharded.sum_over(below_largest, vocabulary_names) + normalizer.log_total, normalizer


def _gradients_on_shard(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
                        normalizer: Normalizer, d_per_position: Array, *, sharding: LossSharding,
                        config: SweepConfig, with_part_of_gradients: bool) -> Sweep:  # fmt: skip
    activations, targets, normalizer, d_per_position = _gathered(
        (activations, targets, normalizer, d_per_position), sharding
    )
    offset, targets = _own_targets(targets, embeddings.shape[0], sharding)
    swept = _gradients_here(
        activations, embeddings, bias, targets, normalizer, d_per_position, offset, config
    )
    return reduce_gradients(swept, sharding, with_part_of_gradients)


def _gradients_here(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
                    normalizer: Normalizer, d_per_position: Array, vocab_offset: Array | None,
                    config: SweepConfig) -> Sweep:  # fmt: skip
    swept = sweeps.gradients(
        activations, embeddings, bias, normalizer, d_per_position, vocab_offset, config
    )
    return correct_for_targets(
        swept, activations, embeddings, bias, targets, d_per_position, config,
        Wanted(gradients=True),
    ).sweep  # fmt: skip


def _gathered(arrays: tuple, sharding: LossSharding) -> tuple:
    gathered = jax.tree.map(partial(sharded.gather_positions, sharding=sharding), arrays)
    return sharded.vary_alike(gathered, sharding.names)


def _own_targets(
    targets: Array, num_rows: int, sharding: LossSharding
) -> tuple[Array | None, Array]:
    """This shard's first row, and targets counted from it; -1 for those of other shards."""
    offset = sharded.first_row(num_rows, sharding)
    if offset is None:
        return None, targets
    is_here = (targets >= offset) & (targets < offset + num_rows)
    return offset, jnp.where(is_here, targets - offset, -1)


def _own_positions(array: Array, sharding: LossSharding) -> Array:
    """This device's part of an array that all devices of the gathered axes hold in full."""
    names = sharding.gathered_names
    if not names:
        return array
    size = array.shape[0] // lax.axis_size(names)
    return lax.dynamic_slice_in_dim(array, lax.axis_index(names) * size, size)
