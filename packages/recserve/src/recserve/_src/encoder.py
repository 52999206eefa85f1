"""Runs the exported query encoder: a history of items in, a query vector out."""

import importlib.util
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve._src.errors import UserError
from recserve._src.header import Header

INSTALL_JAX = "pip install jax flatbuffers"
_NO_GAP = -1  # on padding and on the oldest event of a history
_LONGEST_GAP = 2**31 - 1
_BATCH_SIZES = (1, 8, 64)
"""The encoder is compiled for these batch sizes only; other batches are cut and padded to them."""


def encoding_problem() -> str | None:
    """Returns why no history can be encoded here, or None when it can; imports nothing."""
    for package in ("jax", "flatbuffers"):
        if importlib.util.find_spec(package) is None:
            return f"encoding a history needs {package}, which is not installed; {INSTALL_JAX}"
    return None


class QueryEncoder:
    """The query encoder of a model; JAX is imported and the encoder compiled on first use.

    The file is read at once, so that replacing the folder later cannot pair this model's vectors
    with another model's encoder.
    """

    def __init__(self, path: Path, item_vectors: NDArray[np.float32], header: Header) -> None:
        """Keeps what is needed to encode.

        Args:
          path: file written by `jax.export`; read here.
          item_vectors: `[V, Dq]`, from which the history's vectors are taken.
          header: sizes that the encoder must agree with.
        """
        self._path = path
        self._content = bytearray(path.read_bytes())
        self._item_vectors = item_vectors
        self._header = header
        self._call: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def encode(
        self,
        histories: Sequence[NDArray[np.integer[Any]]],
        times: Sequence[NDArray[np.int64]] | None = None,
    ) -> NDArray[np.float32]:
        """Returns one query vector per history.

        Args:
          histories: item rows, oldest first; only the most recent `max_length` are read. An empty
            history gives the encoder's answer to a fully masked input.
          times: seconds of the same events, of the same lengths, for an encoder that reads them;
            None where all histories are empty.

        Returns:
          `[Q, Dq]` float32, finite.

        Raises:
          UserError: JAX is missing, the encoder is corrupted, does not fit the item vectors or has
            answers that are not finite, or it reads times and there are none, or the other way
            round.
        """
        self._check_times(histories, times)
        queries = np.empty((len(histories), self._header.vector_dim), np.float32)
        start = 0
        while start < len(histories):
            left = len(histories) - start
            size = next((size for size in _BATCH_SIZES if size >= left), _BATCH_SIZES[-1])
            stop = min(start + size, len(histories))
            part = slice(start, stop)
            queries[part] = self._encode_batch(
                histories[part], None if times is None else times[part], size
            )
            start = stop
        if not np.isfinite(queries).all():
            raise UserError(
                f"{self._path} gives query vectors that are not finite; export the model again"
            )
        return queries

    def _check_times(
        self,
        histories: Sequence[NDArray[np.integer[Any]]],
        times: Sequence[NDArray[np.int64]] | None,
    ) -> None:
        if times is not None and not self._header.reads_times:
            raise UserError("this model reads no times; leave `times` (--times) out")
        if times is None and self._header.reads_times and any(len(each) for each in histories):
            raise UserError(
                "this model also reads the times between the events of a history; pass `times` "
                "(--times): whole seconds, one for each item"
            )

    def _encode_batch(
        self,
        histories: Sequence[NDArray[np.integer[Any]]],
        times: Sequence[NDArray[np.int64]] | None,
        size: int,
    ) -> NDArray[np.float32]:
        rows = np.zeros((size, self._header.max_length), np.int64)
        _fill_from_the_right(rows, histories)  # row 0 pads the left
        inputs = [self._item_vectors[rows], rows > 0]
        if self._header.reads_times:
            gaps = np.full(rows.shape, _NO_GAP, np.int32)
            _fill_from_the_right(gaps, [_gaps(each) for each in times or ()])
            inputs.append(gaps)
        return np.asarray(self._compiled()(*inputs))[: len(histories)]

    def _compiled(self) -> Callable[..., Any]:
        with self._lock:
            if self._call is None:
                self._call = self._load()
            return self._call

    def _load(self) -> Callable[..., Any]:
        problem = encoding_problem()
        if problem is not None:
            raise UserError(problem)
        import jax
        from jax import export

        try:
            exported = export.deserialize(self._content)
        except Exception as error:  # the deserializer documents no exception types
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{self._path} cannot be read by this JAX ({reason}); it is corrupted or was "
                "written by a JAX too far from this one; export the model again"
            ) from error
        self._check_signature(exported)
        return jax.jit(exported.call)

    def _check_signature(self, exported: Any) -> None:
        history = (self._header.max_length, self._header.vector_dim)
        gaps = [("int32", history[:1])] if self._header.reads_times else []
        wanted = [("float32", history), ("bool", history[:1]), *gaps, ("float32", history[1:])]
        found = [
            (str(aval.dtype), tuple(aval.shape[1:]))
            for aval in (*exported.in_avals, *exported.out_avals)
        ]
        if found != wanted:
            raise UserError(
                f"{self._path} takes and gives {found} per query but the model needs {wanted}: "
                "the encoder is of another model; export the model again"
            )


def _fill_from_the_right(table: NDArray[Any], parts: Sequence[NDArray[Any]]) -> None:
    """Puts the end of each part at the end of a row of `table` `[b, N]`."""
    for row, part in zip(table, parts, strict=False):
        recent = part[-len(row) :]
        row[len(row) - len(recent) :] = recent


def _gaps(times: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns the seconds between each event and the one before it."""
    gaps = np.full(len(times), _NO_GAP, np.int32)
    gaps[1:] = np.clip(np.diff(times), 0, _LONGEST_GAP)
    return gaps
