"""Which implementation of the sweep runs: chosen by the platform a program is lowered for."""

from jax import Array

from cutbce_ops._src.binary_cross_entropy import chunked_xla
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted


def dense_sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    """Sweeps all rows as negatives with the implementation that `config` asks for.

    Arguments and result are those of `chunked_xla.dense_sweep`.
    """
    return chunked_xla.dense_sweep(
        activations, embeddings, bias, d_per_position, vocab_offset, config, wanted
    )
