"""How often the loops of the TPU kernel run, for whoever reads its schedule without running it."""

import math

from cutbce_ops._src.binary_cross_entropy.pallas_tpu_kernel import LANES, KernelConfig


def loop_iterations(config: KernelConfig, num_table_rows: int) -> tuple[int, ...]:
    """Trips of every loop in one call, in the order of the program; the first is the grid's.

    All rows of the table are taken to be in use, and no loss to be large enough for a second look.
    Loops of one trip are left out, since the compiler makes straight code of them.

    Args:
      config: the kernel's.
      num_table_rows: rows of the table.

    Returns:
      The trips.
    """
    num_blocks = math.ceil(num_table_rows / config.block_v)
    num_whole = num_table_rows // config.block_v
    num_trips = config.num_tiles // config.unroll
    drain = 1  # the last step of the grid has no rows: one trip moves the last tiles through
    clearing = (config.num_tiles, config.block_v // LANES)
    if num_trips == 1:
        sweeps = ()
    elif config.has_bias:  # every block takes the way that adds an offset to its logits
        sweeps = (num_blocks * num_trips + drain,)
    else:
        sweeps = (num_whole * num_trips, (num_blocks - num_whole) * num_trips + drain)
    second_look = (0,) if config.with_loss and config.is_fast else ()
    return (num_blocks + drain, *(n for n in clearing if n > 1), *sweeps, *second_look)
