"""Trace-time checks; each error names the argument, what arrived and what is allowed."""

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def require_array(name: str, array: Any) -> None:
    """Raises TypeError unless `array` is a JAX or NumPy array."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(f"`{name}` must be a JAX or NumPy array; got {type(array).__name__}.")


def require_static_int(name: str, value: Any) -> int:
    """Returns `value` as int; raises TypeError unless it is a Python or NumPy integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"`{name}` must be a static Python int, since it fixes shapes at trace time; "
            f"got {type(value).__name__}."
        )
    return int(value)


def require_float(name: str, array: Array) -> None:
    """Raises TypeError unless `array` is an array of float32, bfloat16 or float16."""
    require_array(name, array)
    if array.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"`{name}` must be float32, bfloat16 or float16; got dtype {array.dtype}. "
            "Sums are kept in float32, so cast wider or integer input yourself."
        )


def require_integer(name: str, array: Array) -> None:
    """Raises TypeError unless `array` is an array of integers."""
    require_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"`{name}` must hold integer table rows (int32); got dtype {array.dtype}. "
            "Cast it with .astype('int32')."
        )


def require_shape(name: str, array: Array, shape: tuple[int, ...], reason: str) -> None:
    """Raises ValueError unless `array.shape == shape`; `reason` says where the shape comes from."""
    require_array(name, array)
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape} to match {reason}; got {array.shape}.")


def require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {allowed}; got {value!r}.")


def require_number(
    name: str, value: Any, low: float, high: float, *, low_is_allowed: bool = True
) -> None:
    """Raises unless `value` is a plain number with low <= value <= high (low < value if asked)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a Python number; got {type(value).__name__}.")
    number = float(value)
    too_low = number < low or (number == low and not low_is_allowed)
    if too_low or number > high or not math.isfinite(number):
        if math.isinf(high):
            allowed = f"{'at least' if low_is_allowed else 'above'} {low}"
        else:
            allowed = f"in {'[' if low_is_allowed else '('}{low}, {high}]"
        raise ValueError(f"`{name}` must be finite and {allowed}; got {value}.")


def list_shape(leading: tuple[Any, ...]) -> str:
    """Text of the shape of lists with any number of rows: `(4, 2)` becomes "[4, 2, L]"."""
    return f"[{', '.join([*map(str, leading), 'L'])}]"


def resolve_vocab_size(vocab_size: int | None, num_rows: int) -> int:
    """Returns the number of table rows in use: `vocab_size`, or every row when it is None."""
    if vocab_size is None:
        return num_rows
    vocab_size = require_static_int("vocab_size", vocab_size)
    if not 1 <= vocab_size <= num_rows:
        raise ValueError(
            f"`vocab_size` must lie in [1, {num_rows}], the rows of `embeddings`; got {vocab_size}."
        )
    return vocab_size


def rows_or_padding(rows: Array, vocab_size: int) -> Array:
    """Returns `rows` as int32 with everything outside `[0, vocab_size)` replaced by -1.

    Compared in the dtype that came in, or a wider one: 64-bit ids must not wrap round into the
    catalog, 8-bit ones cannot hold its size, and unsigned ones cannot hold -1.
    """
    namespace = np if isinstance(rows, np.ndarray) else jnp
    if rows.dtype.itemsize < np.dtype(np.int32).itemsize:
        rows = rows.astype(np.int32)
    is_row = (rows >= 0) & (rows < vocab_size)
    return jnp.asarray(namespace.where(is_row, rows.astype(np.int32), np.int32(-1)))
