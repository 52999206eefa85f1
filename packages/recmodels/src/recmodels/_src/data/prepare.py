"""`prepare`: from a file of interactions to a sequence store, with a report."""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
from tqdm import tqdm

from recmodels._src import storage
from recmodels._src.atomic import atomic_folder
from recmodels._src.data.categories import CategoryFile, match_categories, read_pairs
from recmodels._src.data.filters import Deduplicate, Filters
from recmodels._src.data.loaders import read_events
from recmodels._src.data.sequences import build_sequences
from recmodels._src.data.splits import Protocol, Split
from recmodels._src.data.store import LAST_FILE, SequenceStore, check_store_output
from recmodels._src.data.store_writer import write_store
from recmodels._src.data.synthetic import write_synthetic_interactions
from recmodels._src.data.table_formats import TableColumns
from recmodels._src.errors import UserError

# No bar for what is over before one can read it: 16 MiB take about a second.
_BAR_FROM_BYTES = 2**24
_BAR_FROM_USERS = 20_000


@dataclasses.dataclass(frozen=True)
class PrepareReport:
    """What was prepared; `str()` of it is the report that the command line prints."""

    path: Path
    """The sequence store."""
    num_users: int
    """Users in the store."""
    num_items: int
    """Distinct items in the store."""
    num_interactions: int
    """Events in the store."""
    lengths: dict[str, int]
    """`min`, `median`, `p90` and `max` number of events of a user."""
    skipped: dict[str, int]
    """Events left out, by reason."""
    num_single_event_users: int
    """Users with one event: in the store, in no training window."""
    num_evaluated: dict[Protocol, int]
    """Users long enough to be evaluated, by protocol (8 targets)."""
    item_categories: dict[str, Any] | None = None
    """What `--item-categories` found, as in `meta.json`; None without."""

    def __str__(self) -> str:
        """The report as text of a few lines."""
        lengths = " / ".join(f"{value:,}" for value in self.lengths.values())
        lines = [
            f"sequence store  {self.path}",
            f"users           {self.num_users:,}",
            f"items           {self.num_items:,}",
            f"interactions    {self.num_interactions:,}",
            f"length          {lengths}  ({' / '.join(self.lengths)})",
        ]
        if self.num_single_event_users:
            lines.append(f"one event only  {self.num_single_event_users:,} users, kept")
        for protocol, count in self.num_evaluated.items():
            short = self.num_users - count
            lines.append(
                f"{protocol:<15} {count:,} users to evaluate, {short:,} shorter than "
                f"{Split(protocol).min_length}"
            )
        for reason, count in self.skipped.items():
            lines.append(f"skipped         {count:,} x {reason}")
        return "\n".join([*lines, *self._category_lines()])

    def _category_lines(self) -> list[str]:
        found = self.item_categories
        if found is None:
            return []
        lines = [
            f"categories      {found['num_categories']:,}; {found['num_items_without']:,} items "
            "have none"
        ]
        for name, reason in (
            ("num_unknown_items", "item that is not in the interactions"),
            ("num_incomplete_lines", "line without item or category"),
        ):
            if found[name]:
                lines.append(f"left out        {found[name]:,} x {reason} in {found['file']}")
        return lines


def prepare(
    path: str | Path,
    out: str | Path,
    *,
    format: str,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    has_header: bool = True,
    min_interactions: int = 1,
    k_core: int = 0,
    deduplicate: Deduplicate = "none",
    min_played_pct: int = 0,
    ids_from: str | Path | None = None,
    item_categories: str | Path | None = None,
    category_columns: tuple[str, str] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> PrepareReport:
    """Reads a file of interactions and writes a sequence store.

    Memory is bounded by the numbers of users and items, not by that of events; beside `out`,
    16 bytes an event are on disk meanwhile. What is in an object store is copied, and what goes
    there is made, in the folder for temporary files.

    Args:
      path: the file; text formats may be gzipped.
      out: folder to make; it appears complete or not at all.
      format: one of `recmodels.FORMATS`.
      user: user column of a csv, tsv or parquet file: its name, or its number counted from 1
        when there is no header.
      item: the item column, likewise.
      time: the time column, likewise; None keeps the order of the file.
      has_header: whether a csv or tsv file starts with the names of its columns.
      min_interactions: leave out users with fewer events.
      k_core: leave out users and items with fewer events, again and again until all that are
        left have as many; 0 keeps all.
      deduplicate: leave out repetitions, before events are counted for the two filters above.
        "exact": events with the user, item and time of an earlier event of the file;
        "consecutive": events with the item of the user's event right before them.
      min_played_pct: leave out listens played less than this (Yambda formats).
      ids_from: a sequence store whose items keep their rows here, whether they occur or not;
        new items come after them, so that a model can go on with a grown catalog.
      item_categories: a csv, tsv or parquet file with one row for every pair of an item and one of
        its categories; see `CategoryFile`. Items that it lacks have no category.
      category_columns: names of its item and of its category column; None takes "item_id" and
        "category".
      overwrite: replace `out` if it exists.
      progress: show on stderr which step is running, when the file is large.

    Returns:
      The report.

    Raises:
      UserError: an option or the file is wrong, or `out` exists.
    """
    filters = Filters(
        min_interactions=min_interactions,
        min_played_pct=min_played_pct,
        k_core=k_core,
        deduplicate=deduplicate,
    )
    path, out = storage.as_path(path), storage.as_path(out)
    check_store_output(out, overwrite=overwrite)
    columns = TableColumns(user=user, item=item, time=time, has_header=has_header)
    source = {"name": path.name, "format": format}
    with (
        _category_file(item_categories, category_columns) as category_file,
        storage.local_copy(path) as path,
        _bar(progress and path.exists() and path.stat().st_size >= _BAR_FROM_BYTES) as bar,
    ):
        return _prepare(
            path, out, format, columns, source, filters, ids_from, overwrite, bar, category_file
        )


@contextlib.contextmanager
def _category_file(
    path: str | Path | None, columns: tuple[str, str] | None
) -> Iterator[CategoryFile | None]:
    if path is None:
        if columns is not None:
            raise UserError("--category-columns needs --item-categories; leave it out")
        yield None
        return
    with storage.local_copy(storage.as_path(path)) as file:
        yield CategoryFile(file) if columns is None else CategoryFile(file, tuple(columns))


def prepare_synthetic(
    out: str | Path,
    *,
    num_users: int = 4_000,
    num_items: int = 24_000,
    seed: int = 0,
    min_interactions: int = 1,
    k_core: int = 0,
    deduplicate: Deduplicate = "none",
    min_played_pct: int = 0,
    ids_from: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> PrepareReport:
    """Generates interactions and prepares them through the reader of real Yambda files.

    Args:
      out: folder to make.
      num_users: number of generated users.
      num_items: size of the generated catalog; the rarest items may not occur.
      seed: of the generated data.
      min_interactions: as in `prepare`.
      k_core: as in `prepare`.
      deduplicate: as in `prepare`.
      min_played_pct: as in `prepare`.
      ids_from: as in `prepare`.
      overwrite: as in `prepare`.
      progress: as in `prepare`.

    Returns:
      The report.

    Raises:
      UserError: an option is wrong, or `out` exists.
    """
    filters = Filters(
        min_interactions=min_interactions,
        min_played_pct=min_played_pct,
        k_core=k_core,
        deduplicate=deduplicate,
    )
    out = storage.as_path(out)
    check_store_output(out, overwrite=overwrite)
    size = {"num_users": num_users, "num_items": num_items, "seed": seed}
    source = {"name": "synthetic", "format": "yambda-flat", **size}
    with (
        tempfile.TemporaryDirectory() as folder,
        _bar(progress and num_users >= _BAR_FROM_USERS) as bar,
    ):
        path = Path(folder) / "synthetic.parquet"
        bar.set_description("generating")
        write_synthetic_interactions(path, **size)
        return _prepare(
            path, out, "yambda-flat", TableColumns(), source, filters, ids_from, overwrite, bar
        )


def _bar(show: bool) -> tqdm:
    return tqdm(disable=not show, bar_format="{desc} ({elapsed})", leave=False)


def _prepare(
    path: Path,
    out: Path,
    format: str,
    columns: TableColumns,
    source: dict[str, Any],
    filters: Filters,
    ids_from: str | Path | None,
    overwrite: bool,
    bar: tqdm,
    category_file: CategoryFile | None = None,
) -> PrepareReport:
    # Before the events, which may take long.
    pairs = None if category_file is None else read_pairs(category_file)
    known_items = None
    if ids_from is not None:
        known = SequenceStore.open(ids_from)
        known_items = pl.read_parquet(known.path / "items.parquet")["item_id"]
        source = source | {"ids_from": known.digest}
    bar.set_description("1/3 reading")
    events = read_events(path, format, columns, min_played_pct=filters.min_played_pct)
    source = source | {"columns": events.columns}
    if filters.deduplicate == "exact" and "time" not in events.columns:
        raise UserError(
            f"--deduplicate exact compares times, and {path.name} is read without; name its column "
            "with --time, or take consecutive"
        )
    with atomic_folder(out, overwrite=overwrite, last=LAST_FILE) as folder:
        # In the folder of the store, which is on a disk that has room and is cleaned up.
        scratch = folder / "events"
        scratch.mkdir()
        sequences, skipped = build_sequences(
            events,
            path.name,
            scratch,
            filters=filters,
            known_items=known_items,
            report=bar.set_description,
        )
        bar.set_description("3/3 writing")
        categories = None
        if pairs is not None:
            categories = match_categories(pairs, sequences.item_ids)
        write_store(
            folder, sequences, source=source, filters=dataclasses.asdict(filters), skipped=skipped,
            categories=categories,
        )  # fmt: skip
        shutil.rmtree(scratch)
        # Here, so that what went to an object store need not be fetched from there.
        found = report(SequenceStore.open(folder))
    return dataclasses.replace(found, path=out)


def report(store: SequenceStore) -> PrepareReport:
    """Describes a store that was prepared earlier.

    Args:
      store: the store.

    Returns:
      The report that `prepare` gave.
    """
    lengths = np.sort(store.lengths)
    n = len(lengths)
    return PrepareReport(
        path=store.location,
        num_users=store.num_users,
        num_items=store.num_items,
        num_interactions=store.num_interactions,
        lengths={
            "min": int(lengths[0]),
            "median": int(lengths[n // 2]),
            "p90": int(lengths[int(n * 0.9)]),
            "max": int(lengths[-1]),
        },
        skipped=dict(store.meta["skipped"]),
        num_single_event_users=int((lengths == 1).sum()),
        num_evaluated={
            protocol: int(Split(protocol).is_evaluated(lengths).sum())
            for protocol in get_args(Protocol)
        },
        item_categories=store.meta.get("item_categories"),
    )
