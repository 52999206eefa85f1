"""Block sizes of the GPU kernels: pure arithmetic on sizes and dtypes, no device is asked.

Chosen by what XLA compiles for an H100: instructions for each logit of the loop, and no register
spilled but for float32 at D=256. None was timed on a GPU.
"""

import dataclasses
import math

from cutbce_ops._src.binary_cross_entropy.config import TileConfig

MIN_BLOCK = 16  # what a tensor core takes
MAX_DIM = 256  # above, the gradient block no longer fits the registers
MAX_HELD, MAX_STREAMED = 128, 64
HELD_BYTES, STREAMED_BYTES = 2**16, 2**15  # of one operand block
NUM_STAGES = 2  # streamed blocks in flight
SHARED_BYTES = 160 * 2**10  # of one SM: A100 has 163 KiB, H100 227 KiB
# Two to four programs for each SM of a large chip. More splits mean more partial sums in memory:
# at most this many blocks of positions (or of rows), whatever the size of the problem.
TARGET_PROGRAMS = 512


@dataclasses.dataclass(frozen=True)
class KernelTiles:
    """Sizes of one kernel.

    Attributes:
      held: positions (or rows) that a program keeps, with their gradient, in registers.
      streamed: rows (or positions) that pass by at a time.
      num_splits: programs that share the streamed side of one held block.
      num_warps: of 32 threads.
    """

    held: int
    streamed: int
    num_splits: int
    num_warps: int

    def shared_bytes(self, dim: int, itemsize: int) -> int:
        """Estimate: the held operand and the streamed blocks in flight."""
        return (self.held + NUM_STAGES * self.streamed) * padded_dim(dim) * itemsize


def padded_dim(dim: int) -> int:
    """Triton blocks are powers of two; the surplus is masked, not stored."""
    return max(MIN_BLOCK, _power_of_two_from(dim))


def kernel_tiles(
    num_held: int, num_streamed: int, dim: int, itemsize: int, *, is_full_float32: bool
) -> KernelTiles:
    """Sizes for a kernel that holds blocks of `num_held` vectors and streams `num_streamed`.

    Args:
      num_held: positions, or rows.
      num_streamed: rows, or positions.
      dim: size of the vectors (D).
      itemsize: bytes of an element of the larger operand.
      is_full_float32: products without tensor cores, which keep their operands in registers.
    """
    vector_bytes = padded_dim(dim) * itemsize * (2 if is_full_float32 else 1)
    largest = MAX_STREAMED // 2 if is_full_float32 else MAX_STREAMED
    held = _block(num_held, min(MAX_HELD, HELD_BYTES // vector_bytes))
    streamed = _block(num_streamed, min(largest, STREAMED_BYTES // vector_bytes))
    return _with_splits(held, streamed, num_held, num_streamed)


def explicit_tiles(
    tiles: TileConfig, num_positions: int, num_rows: int
) -> tuple[KernelTiles, KernelTiles]:
    """The caller's sizes, for the kernel that holds positions and for the one that holds rows."""
    block_t, block_v = tiles.block_t, tiles.block_v
    return (
        _with_splits(block_t, block_v, num_positions, num_rows),
        _with_splits(block_v, block_t, num_rows, num_positions),
    )


def _with_splits(held: int, streamed: int, num_held: int, num_streamed: int) -> KernelTiles:
    num_splits = max(1, TARGET_PROGRAMS // math.ceil(num_held / held))
    num_splits = min(num_splits, math.ceil(num_streamed / streamed))
    # A group of 4 warps multiplies 64 rows; 8 warps on 64 would do the elementwise work twice.
    return KernelTiles(held, streamed, num_splits, 8 if held >= 128 else 4)


def _block(num_vectors: int, largest: int) -> int:
    return max(MIN_BLOCK, min(largest, _power_of_two_from(num_vectors)))


def _power_of_two_from(size: int) -> int:
    return 1 << (size - 1).bit_length()
