"""The `prepare` and `describe` commands."""

import argparse
from typing import get_args

from recmodels._src.atomic import check_output
from recmodels._src.data.card import describe
from recmodels._src.data.card_html import check_can_plot
from recmodels._src.data.filters import Deduplicate
from recmodels._src.data.loaders import FORMATS
from recmodels._src.data.prepare import prepare, prepare_synthetic
from recmodels._src.errors import UserError
from recmodels._src.storage import as_path

_EPILOG = """\
formats:
  yambda-flat        parquet, one row per listen: uid, timestamp, item_id
  yambda-sequential  parquet, one row per user with lists
  csv, tsv, parquet  any columns; name them with --user, --item and --time
  movielens-dat      user::item::rating::time
  movielens-udata    user<TAB>item<TAB>rating<TAB>time
  user-lines         one user per line: user item item ...
  pairs              one interaction per line: user item
Text files may be gzipped. Ids are integers or any strings; they are renumbered, and every
answer is in your ids. Events are sorted by user and time; events at the same time keep the
order of the file. Without timestamps the order of the file is the order in time.

examples:
  recmodels prepare listens.parquet --format yambda-flat --min-interactions 31 --out store
  recmodels prepare events.csv --format csv --user user_id --item sku --time ts --out store
  recmodels prepare events.csv --format csv --user user_id --item sku --time ts --k-core 5 \\
      --deduplicate exact --out store
  recmodels prepare ratings.csv --format csv --no-header --user 1 --item 2 --time 4 --out store
  recmodels prepare ml-100k.inter --format tsv --user user_id:token --item item_id:token \\
      --time timestamp:float --out store
  recmodels prepare events.csv --format csv --user user_id --item sku --time ts --out store \\
      --item-categories products.csv --category-columns sku,department
  recmodels prepare --synthetic --out store
"""

_SYNTHETIC_OPTIONS = ("num_users", "num_items", "seed")


def add_prepare_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds `prepare` to the commands.

    The parsed arguments carry `run`: a function of the arguments that does the work, prints
    the report and returns the exit status.

    Args:
      subparsers: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "prepare",
        help="turn a file of interactions into a sequence store",
        description="Turns a file of interactions into a sequence store.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="the file to read")
    parser.add_argument("--out", required=True, metavar="STORE", help="folder to make")
    parser.add_argument("--format", metavar="F", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("--user", metavar="COLUMN", help="user column: name, or number from 1")
    parser.add_argument("--item", metavar="COLUMN", help="item column: name, or number from 1")
    parser.add_argument(
        "--time", metavar="COLUMN", help="time column; without it the order of the file counts"
    )
    parser.add_argument(
        "--no-header", action="store_true", help="the csv or tsv file has no line of names"
    )
    parser.add_argument(
        "--min-interactions",
        type=int,
        default=1,
        metavar="N",
        help="leave out users with fewer events (default: %(default)s)",
    )
    parser.add_argument(
        "--k-core",
        type=int,
        default=0,
        metavar="K",
        help="leave out users and items with fewer events, until all have K (default: keep all)",
    )
    parser.add_argument(
        "--deduplicate",
        default="none",
        choices=get_args(Deduplicate),
        help="leave out events equal to an earlier one in user, item and time (exact), or with "
        "the item of the user's event right before them (consecutive)",
    )
    parser.add_argument(
        "--min-played-pct",
        type=int,
        default=0,
        metavar="P",
        help="leave out listens played less than P percent, Yambda formats (default: keep all)",
    )
    parser.add_argument(
        "--ids-from",
        metavar="OLD",
        help="a store whose items keep their rows; new items come after them",
    )
    parser.add_argument(
        "--item-categories",
        metavar="FILE",
        help="csv, tsv or parquet file with a row for every pair of an item and a category of it",
    )
    parser.add_argument(
        "--category-columns",
        type=_column_pair,
        metavar="ITEM,CATEGORY",
        help="names of its two columns (default: item_id,category)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing STORE")
    group = parser.add_argument_group("generated data")
    group.add_argument("--synthetic", action="store_true", help="generate the interactions")
    group.add_argument("--num-users", type=int, metavar="N", help="users (default: 4000)")
    group.add_argument("--num-items", type=int, metavar="N", help="items (default: 24000)")
    group.add_argument("--seed", type=int, metavar="N", help="random seed (default: 0)")
    parser.set_defaults(run=_run)


def add_describe_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds `describe` to the commands, like `add_prepare_parser`.

    Args:
      subparsers: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "describe",
        help="print what is in a sequence store",
        description="Prints what is in a sequence store, or writes it as a page with plots.",
        epilog="examples:\n  recmodels describe store\n  recmodels describe store --out card.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="STORE", help="sequence store to read")
    parser.add_argument("--out", metavar="PAGE", help="HTML page to write as well")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing PAGE")
    parser.set_defaults(run=_run_describe)


def _column_pair(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _run_describe(args: argparse.Namespace) -> int:
    if args.overwrite and args.out is None:
        raise UserError("--overwrite needs --out; leave it out")
    if args.out is not None:
        check_output(as_path(args.out), overwrite=args.overwrite)
        check_can_plot()
    card = describe(args.store, progress=True)
    print(card)
    if args.out is not None:
        card.write_html(args.out, overwrite=args.overwrite)
        print(f"page               {args.out}")
    return 0


def _run(args: argparse.Namespace) -> int:
    common = {
        "min_interactions": args.min_interactions,
        "k_core": args.k_core,
        "deduplicate": args.deduplicate,
        "min_played_pct": args.min_played_pct,
        "ids_from": args.ids_from,
        "overwrite": args.overwrite,
        "progress": True,
    }
    given = {name: getattr(args, name) for name in _SYNTHETIC_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    columns = {"user": args.user, "item": args.item, "time": args.time}
    if args.synthetic:
        fixed = {"PATH": args.path, "--format": args.format, "--no-header": args.no_header or None}
        fixed |= {f"--{name}": value for name, value in columns.items()}
        fixed["--item-categories"] = args.item_categories
        fixed["--category-columns"] = args.category_columns
        _refuse("does not go with --synthetic", fixed)
        report = prepare_synthetic(args.out, **given, **common)
    else:
        flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
        _refuse("needs --synthetic", flags)
        if args.path is None or args.format is None:
            missing = "PATH" if args.path is None else "--format"
            raise UserError(
                f"{missing} is missing; give PATH and --format (one of {', '.join(FORMATS)}), "
                "or --synthetic"
            )
        report = prepare(
            args.path, args.out, format=args.format, has_header=not args.no_header, **columns,
            item_categories=args.item_categories, category_columns=args.category_columns, **common,
        )  # fmt: skip
    print(report)
    return 0


def _refuse(why: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise UserError(f"{option} {why}; leave one of them out")
