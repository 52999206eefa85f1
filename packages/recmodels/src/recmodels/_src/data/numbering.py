"""Numbers for raw ids while they stream by."""

import numpy as np
import polars as pl


class IdNumbering:
    """Numbers ids 0, 1, 2, ... as they appear.

    Invariants:
      - equal ids get equal numbers, whichever chunk they come in;
      - ids are int64 until a chunk of strings arrives and strings from then on. Integers only
        count as such in their usual spelling (see `ids.py`), so nothing is lost on the way.
    """

    def __init__(self, known: pl.Series | None = None) -> None:
        """Starts empty, or with ids that have the numbers of their positions.

        Args:
          known: distinct ids, int64 or string.
        """
        known = pl.Series([], dtype=pl.Int64) if known is None else known
        self._table = pl.DataFrame({"id": known}).with_row_index("number")

    def __len__(self) -> int:
        """Number of distinct ids so far."""
        return self._table.height

    @property
    def ids(self) -> pl.Series:
        """`[len]` int64 or string: the id of every number."""
        return self._table["id"]

    def number(self, ids: pl.Series) -> np.ndarray:
        """Numbers a chunk.

        Args:
          ids: integer or string column without nulls.

        Returns:
          `[len(ids)]` uint32.
        """
        wanted = pl.DataFrame({"id": self._in_one_type(ids)})
        distinct = wanted.unique()
        # The smaller side of these joins is what the chunk holds, however large the catalog.
        known = self._table.join(distinct, on="id", how="inner")
        new = distinct.join(known, on="id", how="anti")
        new = new.with_row_index("number", offset=len(self))
        self._table = pl.concat([self._table, new], rechunk=False)
        numbers = pl.concat([known, new])
        joined = wanted.join(numbers, on="id", how="left", maintain_order="left")
        return joined["number"].to_numpy()

    def _in_one_type(self, ids: pl.Series) -> pl.Series:
        if ids.dtype == pl.String and self.ids.dtype != pl.String:
            self._table = self._table.with_columns(pl.col("id").cast(pl.String))
        return ids.cast(self.ids.dtype)
