"""The `recserve` command: a thin skin over `build`, `Recommender` and `measure_recall`."""

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from recserve._src.build import build
from recserve._src.config import SearcherConfig
from recserve._src.errors import UserError
from recserve._src.recall import measure_recall
from recserve._src.recommender import Recommendation, Recommender
from recserve._src.version import __version__

_BUILD_EXAMPLES = """examples:
  recserve build run/bundle --out my-index
  recserve build run/bundle --out my-index --overwrite --leaves-to-search 200 --reorder 1000
  recserve build run/bundle --out my-index --searcher exact

Every size that is left out follows from the catalog; see the README.
"""
_QUERY_EXAMPLES = """examples:
  recserve query my-index --history 3182,77,1204
  recserve query my-index --history=-7,12        # = where the first id starts with a minus sign
  recserve query my-index --history ""           # nothing known about the user
  recserve query my-index --history 3182,77 --times 1714032000,1714035600   # trained with time gaps
  recserve query my-index --user 42 -k 20 --include-seen --json
  recserve query my-index --vector query.npy

Item ids are those of the training data, oldest first. Spaces around them do not count; unknown
ones are skipped and counted. Ids that contain a comma can be asked through Python, with
Recommender.recommend.
"""
_RECALL_EXAMPLES = """examples:
  recserve recall my-index
  recserve recall my-index --num-queries 200 -k 20 --json
"""
_SCANN_HELP = {
    "num_leaves": "partitions of the ScaNN tree",
    "leaves_to_search": "partitions a query looks into",
    "reorder": "candidates per query that are scored again exactly",
    "training_sample_size": "item vectors the ScaNN tree and hash are trained on",
    "dimensions_per_block": "vector dimensions that share one 4-bit code",
    "anisotropic_threshold": "weight of errors along the item vector, between 0 and 1",
}


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage like every other mistake: one line, status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
      argv: arguments without the program name; None takes the process's own.

    Returns:
      0 for success, 2 for a mistake of the caller, 1 for a failure of the system, 130 for Ctrl-C.
    """
    logging.basicConfig(format="note: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        options = _parser().parse_args(argv)
        options.command(options)
        sys.stdout.flush()  # a closed pipe shows here and not when Python ends
    except UserError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:  # the reader, say `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return 1
    except OSError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted; no partial output was left", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="recserve",
        description="Top-k recommendation from a trained bundle.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"recserve {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_build(_command(commands, "build", _run_build, "build an index folder", _BUILD_EXAMPLES))
    _add_query(_command(commands, "query", _run_query, "recommend items", _QUERY_EXAMPLES))
    _add_recall(
        _command(commands, "recall", _run_recall, "compare with exact search", _RECALL_EXAMPLES)
    )
    return parser


def _command(
    commands: Any, name: str, run: Callable[[Any], None], text: str, examples: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)
    return parser


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="folder exported by the trainer")
    parser.add_argument("--out", metavar="INDEX", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing index folder")
    parser.add_argument(
        "--searcher",
        default="auto",
        metavar="auto|scann|exact",
        help="auto (default): ScaNN if installed and the catalog is large enough, else exact",
    )
    parser.add_argument(
        "--exact-below", type=int, metavar="N", help="auto: exact below N items (default 20000)"
    )
    for name, text in _SCANN_HELP.items():
        kind = float if name == "anisotropic_threshold" else int
        parser.add_argument(
            "--" + name.replace("_", "-"), type=kind, metavar="X", help=f"{text} (default: derived)"
        )


def _add_query(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", metavar="INDEX", help="folder written by recserve build")
    query = parser.add_mutually_exclusive_group(required=True)
    query.add_argument("--history", metavar="ID,ID,...", help="item ids, oldest first")
    query.add_argument("--user", metavar="ID", help="user of the training data")
    query.add_argument("--vector", metavar="FILE.npy", help="float32 query vector [Dq] or [1, Dq]")
    parser.add_argument(
        "--times",
        metavar="S,S,...",
        help="seconds of the events of --history, for a model trained with time gaps",
    )
    parser.add_argument("-k", type=int, default=8, metavar="K", help="items wanted (default 8)")
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument(
        "--exclude-seen",
        action="store_true",
        default=None,
        dest="exclude_seen",
        help="hide items of the history (default: as the model was evaluated)",
    )
    seen.add_argument(
        "--include-seen",
        action="store_false",
        default=None,
        dest="exclude_seen",
        help="recommend items of the history too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_recall(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", metavar="INDEX", help="folder written by recserve build")
    parser.add_argument("-k", type=int, default=8, metavar="K", help="items per query (default 8)")
    parser.add_argument(
        "--num-queries", type=int, default=1000, metavar="N", help="queries drawn (default 1000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_build(options: Any) -> None:
    names = [field.name for field in dataclasses.fields(SearcherConfig)]
    report = build(
        options.bundle,
        options.out,
        config=SearcherConfig(**{name: getattr(options, name) for name in names}),
        overwrite=options.overwrite,
        show_progress=True,
    )
    sizes = report.plan.scann
    details = (
        report.plan.reason
        if sizes is None
        else f"{sizes.num_leaves:,} leaves, {sizes.leaves_to_search:,} searched, "
        f"{sizes.reorder:,} candidates scored exactly"
    )
    print(
        f"wrote {report.path}: {report.num_items:,} items, {report.vector_dim} dimensions, "
        f"{report.num_bytes / 1e6:,.1f} MB in {report.build_s:.1f} s"
    )
    print(f"searcher: {report.plan.kind} ({details})")


def _run_query(options: Any) -> None:
    if options.vector is not None and options.exclude_seen is not None:
        raise UserError(
            "--exclude-seen and --include-seen need a history; with --vector leave them out"
        )
    if options.times is not None and options.history is None:
        raise UserError("--times goes with --history; leave it out")
    recommender = Recommender.open(options.index)
    result = _query(recommender, options)
    if result.num_unknown:
        num_given = len(options.history.split(","))
        print(
            f"note: {result.num_unknown} of {num_given} history items are not in the catalog and "
            "were skipped",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
        return
    width = max([7, *(len(str(item_id)) for item_id in result.item_ids)])
    print(f"{'rank':>4}  {'item_id':>{width}}  {'score':>10}")
    for rank, (item_id, score) in enumerate(zip(result.item_ids, result.scores, strict=True), 1):
        print(f"{rank:>4}  {item_id!s:>{width}}  {score:>10.4f}")


def _query(recommender: Recommender, options: Any) -> Recommendation:
    if options.vector is not None:
        return recommender.search(_read_vector(options.vector), options.k)[0]
    if options.user is not None:
        user_id = recommender.catalog.users.parse(options.user)
        return recommender.recommend_user(user_id, options.k, exclude_seen=options.exclude_seen)
    texts = options.history.split(",") if options.history.strip() else []
    history = [recommender.catalog.items.parse(text.strip()) for text in texts]
    times = None if options.times is None else _read_times(options.times)
    return recommender.recommend(history, options.k, times=times, exclude_seen=options.exclude_seen)


def _read_times(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise UserError(
            f"--times must be whole seconds separated by commas; got {text!r}"
        ) from None


def _read_vector(name: str) -> Any:
    try:
        with Path(name).open("rb") as file:
            vector = np.lib.format.read_array(file, allow_pickle=False)  # no archive, unlike `load`
    except (ValueError, EOFError) as error:
        raise UserError(f"{name} is not a NumPy array file (.npy): {error}") from error
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist") from error
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    if vector.ndim == 1:
        vector = vector[None]
    if vector.ndim != 2 or len(vector) != 1:
        raise UserError(f"{name} must hold one query vector; got shape {vector.shape}")
    return vector


def _run_recall(options: Any) -> None:
    report = measure_recall(
        options.index,
        k=options.k,
        num_queries=options.num_queries,
        seed=options.seed,
        show_progress=True,
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    hidden = ", seen items hidden" if report.seen_hidden else ""
    print(
        f"ANN recall@{report.k} of {report.searcher} search: {report.ann_recall_at_k:.4f} "
        f"({report.num_queries:,} queries from {report.query_source}{hidden})"
    )
    print(f"{'latency':>8}  {'p50':>9}  {'p99':>9}")
    rows = {report.searcher: (report.p50_ms, report.p99_ms)}
    rows.setdefault("exact", (report.exact_p50_ms, report.exact_p99_ms))
    for name, (p50, p99) in rows.items():
        print(f"{name:>8}  {p50:>6.3f} ms  {p99:>6.3f} ms")
