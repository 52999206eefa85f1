"""Opens an index folder and answers with items of the catalog, in the caller's ids."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve._src.approximate import ScannSearcher, scann_problem
from recserve._src.build import SCANN_FOLDER
from recserve._src.catalog import Catalog, load_catalog
from recserve._src.config import ScannSizes, SearcherPlan
from recserve._src.encoder import QueryEncoder
from recserve._src.errors import UserError
from recserve._src.exact import ExactSearcher, Neighbors
from recserve._src.header import INDEX, QUERY_ENCODER, Header, Manifest, read_manifest
from recserve._src.storage import check_record, record_file

_LOG = logging.getLogger("recserve")
_FIRST_ROW = 1
_NOTHING = np.empty(0, np.int32)

Searcher = ExactSearcher | ScannSearcher


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The best items for one query."""

    item_ids: tuple[int, ...] | tuple[str, ...]
    """Ids as the caller knows them, best first; equal scores go to the lower row."""
    scores: tuple[float, ...]
    """Inner products of query and item vector, one per id."""
    num_unknown: int
    """Items of the history that the catalog does not have and that were skipped."""


class Recommender:
    """A loaded index folder; immutable, so any number of threads may use one."""

    def __init__(
        self,
        catalog: Catalog,
        encoder: QueryEncoder,
        searcher: Searcher,
        exact_searcher: ExactSearcher,
    ) -> None:
        """Takes loaded parts; use `Recommender.open`."""
        self._catalog = catalog
        self._encoder = encoder
        self._searcher = searcher
        self._exact_searcher = exact_searcher

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Recommender":
        """Loads an index folder after verifying the checksum of every file.

        A folder built for ScaNN is searched exactly, with one warning in the log, where ScaNN
        cannot be used, unless it was built with the explicit searcher `scann`.

        Raises:
          UserError: the folder is missing, of another version, corrupted or inconsistent, or its
            builder insisted on ScaNN, which cannot be used here.
        """
        folder = Path(path)
        manifest = read_manifest(folder, INDEX)
        _verify(folder, manifest)
        catalog = load_catalog(folder, manifest.header)
        encoder = QueryEncoder(folder / QUERY_ENCODER, catalog.item_vectors, manifest.header)
        exact_searcher = ExactSearcher(catalog.item_vectors)
        searcher = _load_searcher(folder, _parse_plan(manifest), exact_searcher)
        if read_manifest(folder, INDEX).raw != manifest.raw:
            raise UserError(f"{folder} was replaced while it was being opened; open it again")
        return cls(catalog, encoder, searcher, exact_searcher)

    @property
    def header(self) -> Header:
        """The model: its identity, sizes and id types."""
        return self._catalog.header

    @property
    def catalog(self) -> Catalog:
        """Item vectors, id maps and the users' histories."""
        return self._catalog

    @property
    def searcher(self) -> Searcher:
        """What answers queries; it speaks in rows."""
        return self._searcher

    @property
    def exact_searcher(self) -> ExactSearcher:
        """Exact search over the same vectors."""
        return self._exact_searcher

    @property
    def searcher_kind(self) -> str:
        """`"scann"` or `"exact"`: what answers queries."""
        return "scann" if isinstance(self._searcher, ScannSearcher) else "exact"

    def recommend(
        self,
        history: Sequence[Any],
        k: int = 8,
        *,
        times: Sequence[int] | None = None,
        exclude_seen: bool | None = None,
    ) -> Recommendation:
        """Returns the `k` best items for a user with this history.

        Args:
          history: item ids, oldest first, of any length; ids that the catalog does not have are
            skipped and counted. With no known id left, the answer is what the model gives a user
            of whom it knows nothing.
          k: items wanted; fewer come back only when hiding leaves fewer.
          times: when each event of the history was, in whole seconds and never decreasing, for a
            model that was trained with time gaps (`header.reads_times`).
          exclude_seen: hide the items of the history; None means as the model was evaluated.

        Raises:
          UserError: `k` is below 1 or above the catalog, an id is of the wrong type, `times` do not
            go with the history, or the model needs them or knows none.
        """
        given = None if times is None else [times]
        return self.recommend_batch([history], k, times=given, exclude_seen=exclude_seen)[0]

    def recommend_batch(
        self,
        histories: Sequence[Sequence[Any]],
        k: int = 8,
        *,
        times: Sequence[Sequence[int]] | None = None,
        exclude_seen: bool | None = None,
    ) -> list[Recommendation]:
        """Returns the `k` best items for every history, faster than `recommend` one by one.

        The encoder computes a batch in another order than a single history, so query vectors and
        scores may differ from those of `recommend` by rounding, and items that score equal but for
        rounding may change places.

        Args:
          histories: one sequence of item ids per user.
          k: as in `recommend`.
          times: as in `recommend`, one sequence per user.
          exclude_seen: as in `recommend`.

        Raises:
          UserError: as in `recommend`.
        """
        self.check_k(k)
        found = [self._catalog.items.positions(history) for history in histories]
        rows = [positions[positions >= 0] + _FIRST_ROW for positions in found]
        num_unknown = [int(np.sum(positions < 0)) for positions in found]
        known_times = None
        if times is not None:
            checked = _checked_times(times, histories)
            known_times = [t[p >= 0] for t, p in zip(checked, found, strict=True)]
        return self._recommend_rows(rows, known_times, num_unknown, k, exclude_seen)

    def recommend_user(
        self, user_id: int | str, k: int = 8, *, exclude_seen: bool | None = None
    ) -> Recommendation:
        """Returns the `k` best items for a user of the training data, from the stored history.

        Args:
          user_id: id as in the training data.
          k: as in `recommend`.
          exclude_seen: as in `recommend`.

        Raises:
          UserError: the user is unknown, or as in `recommend`.
        """
        self.check_k(k)
        user = self.user_position(user_id)
        history, times = self._catalog.history(user), self._catalog.times([user])
        return self._recommend_rows([history], times, [0], k, exclude_seen)[0]

    def search(
        self,
        vectors: NDArray[np.float32],
        k: int = 8,
        *,
        exclude: Sequence[Sequence[Any]] | None = None,
    ) -> list[Recommendation]:
        """Returns the `k` best items for query vectors computed elsewhere.

        Args:
          vectors: `[Q, Dq]` float32, finite.
          k: as in `recommend`.
          exclude: per query, item ids to hide; None hides nothing.

        Raises:
          UserError: the vectors have another shape or dtype or are not finite, or as in
            `recommend`.
        """
        self.check_k(k)
        self._check_vectors(vectors)
        exclude = [()] * len(vectors) if exclude is None else exclude
        if len(exclude) != len(vectors):
            raise UserError(
                f"`exclude` must hold one sequence per query, {len(vectors)}; got {len(exclude)}"
            )
        found = [self._catalog.items.positions(item_ids) for item_ids in exclude]
        hidden = [_distinct(positions[positions >= 0] + _FIRST_ROW) for positions in found]
        neighbors = self._searcher.search(vectors, k, hidden)
        return [self._answer(each, 0) for each in neighbors]

    def user_position(self, user_id: int | str) -> int:
        """Returns the position of a user of the training data.

        Raises:
          UserError: the user is unknown.
        """
        position = int(self._catalog.users.positions([user_id])[0])
        if position < 0:
            raise UserError(
                f"user {user_id!r} is not among the {len(self._catalog.users):,} users of this "
                "model; pass the user's history instead"
            )
        return position

    def encode_rows(
        self,
        histories: Sequence[NDArray[np.integer[Any]]],
        times: Sequence[NDArray[np.int64]] | None,
        *,
        exclude_seen: bool | None,
    ) -> tuple[NDArray[np.float32], list[NDArray[np.int32]]]:
        """Returns `[Q, Dq]` query vectors and, per query, the rows that the searcher shall hide.

        Args:
          histories: rows of the item table, oldest first.
          times: as in `QueryEncoder.encode`.
          exclude_seen: as in `recommend`.

        Raises:
          UserError: as `QueryEncoder.encode`.
        """
        hide = self.header.hide_seen if exclude_seen is None else exclude_seen
        hidden = [_distinct(history) if hide else _NOTHING for history in histories]
        return self._encoder.encode(histories, times), hidden

    def _recommend_rows(
        self,
        histories: Sequence[NDArray[np.integer[Any]]],
        times: Sequence[NDArray[np.int64]] | None,
        num_unknown: Sequence[int],
        k: int,
        exclude_seen: bool | None,
    ) -> list[Recommendation]:
        queries, hidden = self.encode_rows(histories, times, exclude_seen=exclude_seen)
        neighbors = self._searcher.search(queries, k, hidden)
        return [
            self._answer(each, unknown)
            for each, unknown in zip(neighbors, num_unknown, strict=True)
        ]

    def _answer(self, neighbors: Neighbors, num_unknown: int) -> Recommendation:
        item_ids = self._catalog.items.ids(neighbors.rows - _FIRST_ROW)
        return Recommendation(item_ids, tuple(neighbors.scores.tolist()), num_unknown)

    def check_k(self, k: int) -> None:
        """Raises `UserError` unless `k` results can be asked of this catalog."""
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise UserError(f"`k` must be a whole number, at least 1; got {k!r}")
        if k > self.header.num_items:
            raise UserError(
                f"`k` is {k:,} but the catalog has {self.header.num_items:,} items; ask for fewer"
            )

    def _check_vectors(self, vectors: NDArray[np.float32]) -> None:
        wanted = self.header.vector_dim
        if not isinstance(vectors, np.ndarray) or vectors.dtype != np.float32:
            found = getattr(vectors, "dtype", type(vectors).__name__)
            raise UserError(f"query vectors must be a float32 array; got {found}; convert them")
        if vectors.ndim != 2 or vectors.shape[1] != wanted:
            raise UserError(
                f"query vectors must have shape [Q, {wanted}] for this model; got {vectors.shape}"
            )
        if not np.isfinite(vectors).all():
            raise UserError("query vectors must be finite; got NaN or infinity")


def _checked_times(
    times: Sequence[Sequence[int]], histories: Sequence[Sequence[Any]]
) -> list[NDArray[np.int64]]:
    """Returns the times of every history as an array."""
    if len(times) != len(histories):
        raise UserError(
            f"`times` must hold one sequence per history, {len(histories)}; got {len(times)}"
        )
    arrays = []
    for each, history in zip(times, histories, strict=True):
        array = np.asarray(each)
        if array.size == 0:  # of no type of its own
            array = array.astype(np.int64)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.signedinteger):
            raise UserError(f"`times` must be whole seconds; got {each!r}")
        if len(array) != len(history):
            raise UserError(
                f"`times` must be one for each item of a history, {len(history)}; got {len(array)}"
            )
        if np.any(array[1:] < array[:-1]):
            raise UserError("`times` must never decrease: a history is given oldest first")
        arrays.append(array.astype(np.int64))
    return arrays


def _distinct(rows: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    return np.unique(rows).astype(np.int32)


def _verify(folder: Path, manifest: Manifest) -> None:
    """Raises `UserError` unless every listed file has its listed content."""
    for name, listed in manifest.files.items():
        try:
            found = record_file(folder / name)
        except FileNotFoundError as error:
            raise UserError(
                f"{folder / name} is missing but {manifest.path} lists it; {INDEX.remedy}"
            ) from error
        check_record(folder / name, found, listed, str(manifest.path))


def _parse_plan(manifest: Manifest) -> SearcherPlan:
    """Reads the searcher that an index folder was built with."""
    try:
        plan = SearcherPlan(**manifest.raw["searcher"])
        sizes = None if plan.scann is None else ScannSizes(**manifest.raw["searcher"]["scann"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{manifest.path}: field 'searcher' is damaged ({error}); {INDEX.remedy}"
        ) from error
    if (plan.kind == "scann") != (sizes is not None):
        raise UserError(f"{manifest.path}: field 'searcher' contradicts itself; {INDEX.remedy}")
    return dataclasses.replace(plan, scann=sizes)


def _load_searcher(folder: Path, plan: SearcherPlan, exact_searcher: ExactSearcher) -> Searcher:
    if plan.scann is None:
        return exact_searcher
    problem = scann_problem()
    if problem is None:
        return ScannSearcher(folder / SCANN_FOLDER, plan.scann, exact_searcher)
    if plan.requested == "scann":
        raise UserError(f"{folder} was built for ScaNN explicitly, but {problem}")
    _LOG.warning("exact search instead of ScaNN: %s", problem)
    return exact_searcher
