"""Categories of items: read from a file of pairs, kept in the store, numbered for the model."""

import dataclasses
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from recmodels._src.data.ids import Place, normalise_ids
from recmodels._src.data.table_formats import read_columns, scan_text
from recmodels._src.data.text_files import (
    CSV,
    TSV,
    Separated,
    check_distinct,
    check_text,
    find_bad_line,
    read_header,
)
from recmodels._src.errors import UserError

MAX_CATEGORIES = 32
"""Most categories of one item: the model reads all of them for every position of a batch."""
COLUMN = "categories"
"""Column of the store's `items.parquet`: a list of names, in order; empty for none."""
COUNTS = ("num_categories", "num_items_without", "num_unknown_items", "num_incomplete_lines")
"""What `meta.json` says of them, beside the name of the file."""
_DEFAULT_COLUMNS = ("item_id", "category")
_PAIR: tuple[str, ...] = ("item", "category")  # columns of `CategoryPairs.pairs`


class CategoryPairs(NamedTuple):
    """What a file of categories holds."""

    file: str
    """Its name."""
    pairs: pl.DataFrame
    """Columns `item`, integer or string, and `category`, string; without nulls."""
    num_incomplete_lines: int
    """Lines that were left out, since item or category was missing."""


class ItemCategories(NamedTuple):
    """The categories of a store, numbered from 1 in the order of their names."""

    names: list[str]
    """Category c has the name `names[c - 1]`."""
    table: np.ndarray
    """`[num_items + 1, K]` int32 numbers of each row's categories; 0 where it has fewer than K."""


@dataclasses.dataclass(frozen=True)
class CategoryFile:
    """A file with one line for every pair of an item and a category.

    Raises:
      UserError: `columns` are not two names.
    """

    path: Path
    """csv, tsv or parquet, by the end of its name; text may be gzipped and names its columns."""
    columns: tuple[str, ...] = _DEFAULT_COLUMNS
    """Names of the item column and of the category column."""

    def __post_init__(self) -> None:
        """Checks the columns."""
        if len(self.columns) != 2 or not all(self.columns) or len(set(self.columns)) != 2:
            raise UserError(
                "`category_columns` must be the names of an item column and a category column; "
                f"got {', '.join(self.columns)!r}"
            )


def read_pairs(file: CategoryFile) -> CategoryPairs:
    """Reads a file of categories.

    Raises:
      UserError: the file cannot be read, has other columns, or an id or category of another type.
    """
    form = _form(file.path)
    with _as_user_errors(file.path, form):
        if form is None:
            table = pl.scan_parquet(file.path)
        else:
            check_text(file.path, "csv" if form is CSV else "tsv", "check the file and its name")
            # As text, like the events: "007" is not 7.
            table = scan_text(file.path, form)
        present = table.collect_schema().names()
        for column in file.columns:
            if column not in present:
                raise UserError(
                    f"{file.path} has no column {column!r}; name the item and the category column "
                    f"with --category-columns; columns of {file.path.name}: {', '.join(present)}"
                )
        names = dict(zip(_PAIR, file.columns, strict=True))
        if form is not None:
            options = [("--category-columns", name) for name in file.columns]
            check_distinct(file.path, read_header(file.path, form), options)
        frames = list(read_columns(table, names, checks_fields=form is not None))
    if not frames:
        raise _no_pair(file.path)
    pairs = pl.concat(frames)
    place = Place(file.path.name, "row")
    items = normalise_ids(pairs["item"], "item", place, numeric=False)
    categories = normalise_ids(pairs["category"], "category", place, numeric=False)
    complete = pl.DataFrame({"item": items, "category": categories.cast(pl.String)}).drop_nulls()
    if complete.is_empty():
        raise _no_pair(file.path)
    return CategoryPairs(file.path.name, complete, pairs.height - complete.height)


def match_categories(found: CategoryPairs, item_ids: pl.Series) -> tuple[pl.Series, dict[str, Any]]:
    """The categories of every item of a catalog.

    Args:
      found: the pairs; items that are not in the catalog are counted.
      item_ids: `[num_items]` raw ids, int64 or string, by row.

    Returns:
      `[num_items]` lists of distinct names in order, empty for items without; and what was found,
      for `meta.json`: `file`, `num_categories`, `num_items_without`, `num_unknown_items` and
      `num_incomplete_lines`.

    Raises:
      UserError: an item has too many categories, or none is in the catalog.
    """
    ids, catalog = found.pairs["item"], pl.DataFrame({"item": item_ids})
    pairs = found.pairs.with_columns(_in_type(ids, item_ids.dtype)).drop_nulls()
    by_item = pairs.join(catalog, on="item", how="semi").group_by("item")
    by_item = by_item.agg(pl.col("category").unique().sort())
    if by_item.is_empty():
        raise UserError(
            f"no item of {found.file} is in the catalog: it has ids such as {ids[0]!r}, the "
            f"interactions such as {item_ids[0]!r}"
        )
    _check_numbers(by_item, found.file)
    lists = catalog.join(by_item, on="item", how="left", maintain_order="left")["category"]
    return lists.fill_null(pl.Series([[]], dtype=lists.dtype)).alias(COLUMN), {
        "file": found.file,
        "num_categories": by_item["category"].explode().n_unique(),
        "num_items_without": len(item_ids) - by_item.height,
        "num_unknown_items": ids.n_unique() - by_item.height,
        "num_incomplete_lines": found.num_incomplete_lines,
    }


def numbered(categories: pl.Series) -> ItemCategories:
    """The column of a store as numbers.

    Args:
      categories: `[num_items]` lists of names, by row.
    """
    pairs = pl.DataFrame({"row": np.arange(1, len(categories) + 1), "name": categories})
    pairs = pairs.explode("name").drop_nulls()
    names = pairs["name"].unique().sort()
    number = pairs["name"].cast(pl.Enum(names)).to_physical().to_numpy()
    row = pairs["row"].to_numpy()
    place = np.arange(len(row)) - np.searchsorted(row, row)  # among those of the same row
    table = np.zeros((len(categories) + 1, int(place.max(initial=-1)) + 1), np.int32)
    table[row, place] = number + 1
    return ItemCategories(names.to_list(), table)


def _no_pair(path: Path) -> UserError:
    return UserError(f"{path} has no pair of an item and a category")


def _form(path: Path) -> Separated | None:
    """How the lines of a file are taken apart; None for parquet."""
    if not path.exists():
        raise UserError(f"{path} does not exist; check the path of the item categories")
    forms = {".parquet": None, ".csv": CSV, ".tsv": TSV}
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in forms:
        raise UserError(f"item categories must be a .csv, .tsv or .parquet file; got {path.name}")
    return forms[kind]


@contextmanager
def _as_user_errors(path: Path, form: Separated | None) -> Iterator[None]:
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        if form is not None and isinstance(error, pl.exceptions.PolarsError):
            with suppress(OSError, EOFError, zlib.error):  # a cut gzip file
                reason = find_bad_line(path, form) or reason
        raise UserError(f"{path} cannot be read: {reason}; check the file") from error


def _in_type(ids: pl.Series, wanted: pl.DataType) -> pl.Series:
    """The ids in the type of the catalog's; null where that cannot be."""
    if wanted == pl.String or ids.dtype != pl.String:
        return ids.cast(wanted, strict=False)
    # Only integers in their usual spelling are ids of a catalog of integers.
    numbers = ids.cast(pl.Int64, strict=False)
    return numbers.set(numbers.cast(pl.String) != ids, None)


def _check_numbers(by_item: pl.DataFrame, file: str) -> None:
    item, most = by_item.select("item", pl.col("category").list.len()).row(
        by_item["category"].list.len().arg_max() or 0
    )
    if most > MAX_CATEGORIES:
        raise UserError(
            f"item {item!r} has {most} categories in {file}; an item may have {MAX_CATEGORIES}"
        )
