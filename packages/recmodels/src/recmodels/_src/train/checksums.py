"""A checksum for every array of a training state, by which damage to a checkpoint shows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def checksums(tree: Any) -> dict[str, int]:
    """Checksums of the arrays of a tree by path, the same however they lie on a mesh.

    A sum modulo 2^32 of a hash of each element and its place. Any change of one element changes it;
    of changes to several, one in 2^32 goes unseen.

    Args:
        tree: arrays of numbers, of up to 32 bits each.
    """
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(_checksums(tree)))
    return {array_name(path): int(value) for path, value in leaves}


def array_name(path: tuple[Any, ...]) -> str:
    """Name of an array of a tree, as Orbax has it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


@jax.jit
def _checksums(tree: Any) -> Any:
    return jax.tree.map(_checksum, tree)


def _checksum(array: Array) -> Array:
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    bits = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis in range(array.ndim):
        place = _mixed(place + lax.broadcasted_iota(jnp.uint32, array.shape, axis))
    return jnp.sum(_mixed(bits ^ place), dtype=jnp.uint32)


def _mixed(bits: Array) -> Array:
    # The finalizer of MurmurHash3 (Appleby): one to one, and every bit goes into every other.
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
