"""Approximate search with ScaNN: a tree of partitions and anisotropic hashing, scored exactly.

ScaNN proposes candidates; their scores are computed from the item vectors by the same function as
in exact search. So ScaNN needs no copy of the vectors for its own reordering, which halves the
index folder, and both searchers give the same item the same score.
"""

import contextlib
import functools
import importlib.util
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve._src.config import ScannSizes
from recserve._src.errors import UserError
from recserve._src.exact import ExactSearcher, Neighbors

INSTALL_SCANN = "pip install scann"
_FIRST_ROW = 1  # row 0 is padding and not in the tree: position p is row p + 1
# Deep answers, for a large k or many hidden items, need more candidates out of more leaves, or
# recall falls (behind 700 hidden items of 30,000 from 0.99 to 0.79); and soon exact search takes no
# longer than gathering the candidates' vectors. What the index folder's own `reorder` covers is
# asked of ScaNN in any case: an index of 2,000 items that was built for ScaNN shall use it.
_CANDIDATES_PER_RESULT = 8
_SCANNED_PER_CANDIDATE = 16
_EXACT_SHARE = 16
_LOG_LINE = re.compile(rb"[IW]\d{4} \d\d:|WARNING: All log messages before absl::")
_STDERR_LOCK = threading.Lock()
_IDS_PICKLE = "scann_docids.pkl"


def scann_problem() -> str | None:
    """Returns why ScaNN cannot be used here, or None when it can."""
    try:
        _import_scann()
    except Exception as error:  # a broken binary package raises anything; the reason is kept
        missing = isinstance(error, ModuleNotFoundError) and error.name == "scann"
        why = "is not installed" if missing else f"cannot be imported ({error})"
        return f"ScaNN {why}; {INSTALL_SCANN} to use it"
    return None


@functools.cache
def _import_scann() -> Any:
    """Imports ScaNN's interface for NumPy without the package's own `__init__`.

    That `__init__` imports TensorFlow whenever it is installed: slow, and fatal with a TensorFlow
    other than the one ScaNN was built for, although nothing here needs it.
    """
    if "scann" in sys.modules:
        from scann.scann_ops.py import scann_ops_pybind

        return scann_ops_pybind
    spec = importlib.util.find_spec("scann")
    if spec is None:
        raise ModuleNotFoundError("No module named 'scann'", name="scann")
    sys.modules["scann"] = importlib.util.module_from_spec(spec)
    try:
        from scann.scann_ops.py import scann_ops_pybind

        return scann_ops_pybind
    finally:
        sys.modules.pop("scann", None)  # a later `import scann` shall run its `__init__`


@contextlib.contextmanager
def _without_scann_log() -> Iterator[None]:
    """Drops ScaNN's information and warnings, for which it has no switch, unless the block fails.

    They come from C++ past Python, so descriptor 2 itself is held back. Whatever else is written to
    it meanwhile, by other threads too, appears when the block ends.
    """
    if not os.path.lexists("/dev/fd/2"):  # closed, so nobody reads it
        yield
        return
    with _STDERR_LOCK, tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        failed = True
        try:
            os.dup2(held.fileno(), 2)
            yield
            failed = False
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            kept = [line for line in held if failed or not _LOG_LINE.match(line)]
            with contextlib.suppress(OSError):  # whoever read it has gone
                os.write(2, b"".join(kept))


def train_scann(vectors: NDArray[np.float32], sizes: ScannSizes, folder: Path) -> None:
    """Trains a ScaNN searcher on all rows but the padding row and saves it in a new `folder`.

    ScaNN seeds its k-means itself and takes no seed, so two trainings differ a little; what one
    trained searcher answers is always the same.

    Args:
      vectors: `[V, Dq]`.
      sizes: from `plan_searcher`.
      folder: created; its files hold no absolute path and no pickle.

    Raises:
      OSError: ScaNN cannot write its files; the message names the folder.
    """
    items = vectors[_FIRST_ROW:]
    # Moving all vectors by the same amount moves all scores of a query by the same amount, so the
    # order stays. Around the mean they are shorter, above all where a bias column is far from
    # zero, and the hash loses less (recall@8 0.910 -> 0.920 on 30,000 random vectors with bias,
    # 0.991 -> 0.994 on 54,542 vectors of Amazon Beauty; 20 % of the leaves, 300 candidates).
    centered = items - items.mean(axis=0, dtype=np.float64).astype(np.float32)
    builder = _import_scann().builder(centered, sizes.reorder, "dot_product")
    builder = builder.tree(
        num_leaves=sizes.num_leaves,
        num_leaves_to_search=sizes.leaves_to_search,
        training_sample_size=sizes.training_sample_size,
    ).score_ah(
        dimensions_per_block=sizes.dimensions_per_block,
        anisotropic_quantization_threshold=sizes.anisotropic_threshold,
        training_sample_size=sizes.training_sample_size,
    )
    with _without_scann_log():
        searcher = builder.build()
        folder.mkdir()
        try:
            searcher.serialize(str(folder), relative_path=True)
        except RuntimeError as error:  # all that ScaNN says of a full disk
            raise OSError(f"ScaNN cannot write to {folder}: {error}") from error


class ScannSearcher:
    """Scores the candidates that ScaNN proposes; falls back on exact search where they run out."""

    def __init__(self, folder: Path, sizes: ScannSizes, exact_searcher: ExactSearcher) -> None:
        """Loads what `train_scann` has saved; its checksums must have been verified before.

        Args:
          folder: ScaNN's files.
          sizes: the sizes that it was trained with.
          exact_searcher: of the vectors that it was trained on.

        Raises:
          UserError: the folder holds a pickle file, which ScaNN would execute.
        """
        if (folder / _IDS_PICKLE).exists():
            raise UserError(
                f"{folder / _IDS_PICKLE} is a pickle file, which recserve never writes and which "
                "may run anything when read; do not use this index folder"
            )
        self._scann = _import_scann().load_searcher(str(folder), assets_backcompat_shim=False)
        self._sizes = sizes
        self._num_items = exact_searcher.num_items
        self._exact = exact_searcher

    def search(
        self, queries: NDArray[np.float32], k: int, hidden: Sequence[NDArray[np.int32]]
    ) -> list[Neighbors]:
        """Returns about the `k` best rows of every query; arguments as `ExactSearcher.search`.

        Queries are answered one by one, so that an answer does not depend on its batch.
        """
        return [
            self._search_one(query, k, hidden_rows)
            for query, hidden_rows in zip(queries, hidden, strict=True)
        ]

    def _search_one(
        self, query: NDArray[np.float32], k: int, hidden: NDArray[np.int32]
    ) -> Neighbors:
        # Hidden items are likely to be the nearest ones, so the answer begins behind them.
        needed = _CANDIDATES_PER_RESULT * (k + len(hidden))
        if needed <= self._sizes.reorder or _EXACT_SHARE * needed < self._num_items:
            rows = self._candidates(query, max(self._sizes.reorder, needed))
            if len(hidden):
                rows = rows[~np.isin(rows, hidden)]
            if len(rows) >= k:
                return self._exact.search_rows(query, rows, k)
        return self._exact.search(query[None], k, [hidden])[0]

    def _candidates(self, query: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Returns up to `num_candidates` rows that ScaNN scores highest."""
        items_per_leaf = self._num_items / self._sizes.num_leaves
        leaves = max(
            self._sizes.leaves_to_search,
            math.ceil(_SCANNED_PER_CANDIDATE * num_candidates / items_per_leaf),
        )
        positions, _ = self._scann.search(
            query,
            final_num_neighbors=num_candidates,
            pre_reorder_num_neighbors=num_candidates,
            leaves_to_search=min(leaves, self._sizes.num_leaves),
        )
        return positions.astype(np.int64) + _FIRST_ROW
