"""From raw interactions to a served top 8: prepare, train, evaluate, export, index, query.

    python examples/demo.py                                  # generated interactions
    python examples/demo.py --work demo-files                # keeps everything it makes
    python examples/demo.py --data ratings.dat --format movielens-dat
    python examples/demo.py --data events.csv --format csv --user user_id --item sku --time ts

Everything here is public; copy what you need.
"""

import argparse
import contextlib
import dataclasses
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import recmodels
import recserve

K = 8
_NUM_CANDIDATES = 256  # evaluated users among whom the summary looks for one with a hit
_NUM_TIMED = 200  # of them are queried one by one
_TAIL = 10  # latest items of the history that are shown
_SPARKS = "▁▂▃▄▅▆▇█"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0, 1 (it failed), 2 (the caller's mistake) or 130 (interrupted)."""
    # Such as: ScaNN is not available here, so the search is exact.
    logging.basicConfig(format="note: %(message)s", level=logging.WARNING)
    try:
        options = _parse(arguments)
        with _work_folder(options.work) as work:
            run(options, work)
    except (recmodels.UserError, recserve.UserError) as error:
        return _fail(error, 2)
    except (recmodels.TrainingDivergedError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def run(options: argparse.Namespace, work: Path) -> None:
    """Goes the whole way, step by step, and prints the summary."""
    started = time.perf_counter()
    recipe = recmodels.get_recipe(options.recipe).override(**_given(options, _CHANGES))

    data = _prepare(options, work / "store")

    # Training ends with the test of the last checkpoint, beside popularity, and the bundle.
    training = recmodels.train(recipe, work / "store", work / "run")

    searcher = recserve.build(training.bundle, work / "index", show_progress=True).plan
    recall = recserve.measure_recall(work / "index", k=K, show_progress=True)

    recommender = recserve.Recommender.open(work / "index")
    users = _evaluated_users(recmodels.SequenceStore.open(work / "store"), recipe)
    histories = [user.history for user in users]
    answers = recommender.recommend_batch(histories, K)  # all at once
    query_ms = _time_queries(recommender, histories[:_NUM_TIMED])  # and one by one

    print()
    _print_data(options, data, training.test)
    _print_training(recipe, training)
    _print_quality(training.test)
    _print_serving(searcher, recall, query_ms)
    print(f"Time      {time.perf_counter() - started:.0f} s in all")
    _print_user(users, answers)
    if options.work is not None:
        print(f"\nKept in {work}: store/ (data), run/ (checkpoints, metrics, bundle), index/")
        print(f"Ask on:  recserve query {work / 'index'} --user {users[0].user_id} -k {K}")


def _prepare(options: argparse.Namespace, store: Path) -> recmodels.PrepareReport:
    if options.data is None:
        return recmodels.prepare_synthetic(store, **_given(options, _GENERATED), progress=True)
    loading = _given(options, _LOADING)
    return recmodels.prepare(options.data, store, **loading, progress=True)


@dataclasses.dataclass(frozen=True)
class _User:
    """A user of the test, in raw ids: what the model may know, and what it shall guess."""

    user_id: Any
    history: list[Any]
    held_out: list[Any]

    def hits(self, answer: recserve.Recommendation) -> set[Any]:
        return set(self.held_out) & set(answer.item_ids)


def _evaluated_users(store: recmodels.SequenceStore, recipe: recmodels.Recipe) -> list[_User]:
    split = recmodels.Split(recipe.protocol, recipe.num_targets)
    item_ids, user_ids = store.item_ids(), store.user_ids()
    users = []
    for user in np.flatnonzero(split.is_evaluated(store.lengths))[:_NUM_CANDIDATES]:
        raw = item_ids[store.sequence(user) - 1].tolist()  # row 0 is padding, so ids start at row 1
        bounds = split.evaluation(len(raw), "test")
        held_out = raw[bounds.target_start : bounds.target_stop]
        users.append(_User(user_ids[user], raw[: bounds.input_stop], held_out))
    return users


def _time_queries(recommender: recserve.Recommender, histories: list[list[Any]]) -> list[float]:
    recommender.recommend(histories[0], K)  # compiles the encoder
    times_ms = []
    for history in histories:
        started = time.perf_counter()
        recommender.recommend(history, K)
        times_ms.append((time.perf_counter() - started) * 1000)
    return times_ms


def _print_data(
    options: argparse.Namespace, data: recmodels.PrepareReport, test: recmodels.Evaluation
) -> None:
    name = "generated" if options.data is None else options.data.name
    print(
        f"Data      {name}: {data.num_users:,} users, {data.num_items:,} items, "
        f"{data.num_interactions:,} interactions"
    )
    print(
        f"          {test.num_users:,} users evaluated, {test.num_excluded_users:,} have fewer "
        f"than {test.min_length} interactions"
    )
    for reason, count in data.skipped.items():
        print(f"          {count:,} skipped: {reason}")


def _print_training(recipe: recmodels.Recipe, training: recmodels.TrainResult) -> None:
    print(
        f"Training  {recipe.name}: {training.step:,} steps of {recipe.batch_size} histories, "
        f"{training.step_ms:,.0f} ms per step (median)"
    )
    losses = [loss for _, loss in training.loss_curve]
    print(f"Loss      {losses[0]:.6f} {sparkline(losses)} {losses[-1]:.6f}")


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draws values as a row of at most `width` bars, from the lowest to the highest of them."""
    groups = np.array_split(np.asarray(values, np.float64), min(width, len(values)))
    means = np.array([group.mean() for group in groups])
    spread = np.ptp(means) or 1.0
    heights = np.rint((means - means.min()) / spread * (len(_SPARKS) - 1)).astype(int)
    return "".join(_SPARKS[height] for height in heights)


def _print_quality(test: recmodels.Evaluation) -> None:
    name = f"hit@{K}"
    many = test.num_targets > 1
    held_out = f"any of the {test.num_targets} held-out items" if many else "the held-out item"
    seen = "seen items hidden" if test.hide_seen else "seen items not hidden"
    print(f"Hit@{K}     model {test.model[name]:.3f}, popularity {test.popularity[name]:.3f}")
    print(f"          ({test.part}: {held_out} in the top {K} of all {test.num_items:,}, {seen})")


def _print_serving(
    searcher: recserve.SearcherPlan, recall: recserve.RecallReport, query_ms: list[float]
) -> None:
    print(f"ANN       {recall.searcher} search ({searcher.reason})")
    print(
        f"          recall@{recall.k} against exact search {recall.ann_recall_at_k:.4f} "
        f"({recall.num_queries:,} queries)"
    )
    print(f"Latency   p50 {recall.p50_ms:.2f} ms, p99 {recall.p99_ms:.2f} ms: search")
    p50, p99 = np.quantile(query_ms, [0.5, 0.99])
    print(f"          p50 {p50:.2f} ms, p99 {p99:.2f} ms: query, from history to item ids")


def _print_user(users: list[_User], answers: list[recserve.Recommendation]) -> None:
    pairs = list(zip(users, answers, strict=True))
    with_hits = [pair for pair in pairs if pair[0].hits(pair[1])]
    # The first user with a hit, so that there is something to see; else the first user.
    user, answer = (with_hits or pairs)[0]
    hits = user.hits(answer)
    found = "the first one with a hit" if hits else "without a hit"
    print(f"\nUser {user.user_id}: {found} ({len(with_hits)} of {len(users)} users have one)")
    tail = user.history[-_TAIL:]
    more = "… " if len(tail) < len(user.history) else ""
    print(f"  history   {more}{_join(tail)}  ({len(user.history):,} items, latest last)")
    print(f"  held out  {_join(user.held_out, hits)}  (* recommended)")
    # Where the history holds the whole catalog, hiding what was seen leaves nothing.
    width = max((len(str(item_id)) for item_id in answer.item_ids), default=0)
    print(f"  answer    {'item':>{width}}  {'score':>8}")
    for item_id, score in zip(answer.item_ids, answer.scores, strict=True):
        mark = "  * held out" if item_id in hits else ""
        print(f"            {item_id!s:>{width}}  {score:8.3f}{mark}")


def _join(item_ids: list[Any], marked: Set[Any] = frozenset()) -> str:
    return " ".join(f"{item_id}{'*' if item_id in marked else ''}" for item_id in item_ids)


@contextlib.contextmanager
def _work_folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="demo-") as folder:
            yield Path(folder)
        return
    if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
        raise recmodels.UserError(f"--work {wanted} is not an empty folder; choose another name")
    yield wanted


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as one line, like every other mistake of the caller."""

    def error(self, message: str) -> NoReturn:
        raise recmodels.UserError(f"{message}; see --help")


# Options by the function that takes them; their names are those of its arguments.
_GENERATED = ("num_users", "num_items", "seed")
_LOADING = (
    "format", "user", "item", "time", "has_header", "min_interactions", "min_played_pct",
)  # fmt: skip
_CHANGES = ("num_steps", "seed")


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = _parser().parse_args(arguments)
    # An option that does nothing would be a silent mistake, so it is refused.
    if options.data is None:
        needless, why = _given(options, _LOADING), "needs --data"
    else:
        needless, why = _given(options, ("num_users", "num_items")), "does not go with --data"
    for name in needless:
        option = "no-header" if name == "has_header" else name.replace("_", "-")
        raise recmodels.UserError(f"--{option} {why}; see --help")
    if options.data is not None and options.format is None:
        formats = ", ".join(recmodels.FORMATS)
        raise recmodels.UserError(f"--data needs --format, one of {formats}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description="From raw interactions to a served top 8.",
        epilog="Without --data it generates interactions. The first steps compile and are slow.",
        allow_abbrev=False,
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep all files in this folder")
    parser.add_argument("--recipe", default="sasrec-demo", metavar="NAME", help="what to train")
    parser.add_argument("--num-steps", type=int, metavar="N", help="training steps")
    parser.add_argument("--seed", type=int, metavar="N", help="of generated data and training")
    parser.add_argument("--num-users", type=int, metavar="N", help="users to generate")
    parser.add_argument("--num-items", type=int, metavar="N", help="items to generate")
    given = parser.add_argument_group("given data (as in recmodels prepare)")
    given.add_argument("--data", type=Path, metavar="PATH", help="file of interactions")
    given.add_argument("--format", metavar="F", help=f"one of {', '.join(recmodels.FORMATS)}")
    for name in ("user", "item", "time"):
        given.add_argument(f"--{name}", metavar="COLUMN", help="its column: name or number from 1")
    given.add_argument(
        "--no-header", action="store_const", const=False, dest="has_header",
        help="the file has no line of names",
    )  # fmt: skip
    given.add_argument("--min-interactions", type=int, metavar="N", help="leave out shorter users")
    given.add_argument("--min-played-pct", type=int, metavar="P", help="leave out shorter listens")
    return parser


def _fail(error: BaseException | str, status: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
