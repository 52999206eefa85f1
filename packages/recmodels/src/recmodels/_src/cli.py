"""The `recmodels` command: a thin skin over the functions of the same names."""

import argparse
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from recmodels._src.compare import compare
from recmodels._src.data.cli import add_describe_parser, add_prepare_parser
from recmodels._src.errors import TrainingDivergedError, TrainingInterruptedError, UserError
from recmodels._src.evaluate import evaluate
from recmodels._src.evaluation.measure import Baselines
from recmodels._src.plan import CompilerFailedError, plan, plan_largest_batch, plan_sweep
from recmodels._src.recipe import Recipe
from recmodels._src.recipe_facts import list_recipes
from recmodels._src.recipes import RECIPES, get_recipe
from recmodels._src.recommend import check_k, recommend
from recmodels._src.report.write import write_report
from recmodels._src.storage import is_failure
from recmodels._src.train.loop import train
from recmodels._src.train.processes import is_first, join_processes
from recmodels._src.train.run_directory import installed_version

_EXIT_USER_ERROR, _EXIT_FAILURE, _EXIT_INTERRUPTED = 2, 1, 130
_EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h: stopped with everything saved, so try again


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as one line, like every other mistake of the caller."""

    def __init__(self, **options: Any) -> None:
        # Abbreviations would turn a typo into another option.
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0, 1 (it failed), 2 (the caller's mistake), 75 (training stopped by SIGTERM, saved; run it
        again) or 130 (interrupted).
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        parsed = _parser().parse_args(arguments)
        status = parsed.run(parsed) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        return _fail(error, _EXIT_USER_ERROR)
    except BrokenPipeError:
        # The reader has seen enough; Python's own flush at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_FAILURE
    except (TrainingDivergedError, CompilerFailedError) as error:
        return _fail(error, _EXIT_FAILURE)
    except TrainingInterruptedError as error:
        return _fail(error, _EXIT_SAVED)
    except KeyboardInterrupt:
        return _fail("interrupted", _EXIT_INTERRUPTED)
    except Exception as error:
        if not is_failure(error):
            raise
        return _fail(error, _EXIT_FAILURE)


def _fail(error: BaseException | str, status: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="recmodels",
        description="Prepare interactions, train and evaluate sequential recommenders.",
        epilog="example:\n  recmodels train --recipe sasrec-demo --data STORE --out RUN",
    )
    version = f"%(prog)s {installed_version('recmodels')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    add_prepare_parser(commands)
    add_describe_parser(commands)
    for add in (_add_recipes, _add_train, _add_evaluate, _add_compare, _add_report, _add_plan):
        add(commands)
    return parser


def _add_command(
    commands: Any, run: Callable[[argparse.Namespace], None], help_text: str, examples: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        run.__name__.removeprefix("_run_"),
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=f"examples:\n{examples}",
    )
    parser.set_defaults(run=run)
    return parser


def _add_recipes(commands: Any) -> None:
    parser = _add_command(
        commands,
        _run_recipes,
        "list the built-in recipes with published figures and our results, or print one",
        "  recmodels recipes\n  recmodels recipes --json\n  recmodels recipes sasrec-ml-1m",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe to print as JSON")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def _run_recipes(parsed: argparse.Namespace) -> None:
    if parsed.name is not None:
        print(json.dumps(get_recipe(parsed.name).to_dict(), indent=2))
        return
    found = list_recipes()
    print(json.dumps(found.to_dict(), indent=2) if parsed.json else found)


def _add_train(commands: Any) -> None:
    parser = _add_command(
        commands,
        _run_train,
        "train a recipe, evaluate it and write its bundle; again continues an interrupted run",
        "  recmodels train --recipe sasrec-demo --data STORE --out RUN\n"
        "  recmodels train --recipe sasrec-ml-1m --data STORE --out RUN --num-steps 1500",
    )
    parser.add_argument("--data", required=True, metavar="STORE", help="sequence store to read")
    parser.add_argument("--out", required=True, metavar="RUN", help="run directory")
    parser.add_argument(
        "--start-from",
        metavar="RUN",
        help="finished run to begin with; its items are found by id, new ones start at random",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="join the processes that run this command on the other machines of a slice",
    )
    parser.add_argument(
        "--recommend",
        type=int,
        metavar="K",
        help="then write the best K items for every user to RUN/recommendations.csv",
    )
    _add_recipe_options(parser)


def _run_train(parsed: argparse.Namespace) -> None:
    if parsed.recommend is not None:
        check_k(parsed.recommend)  # better now than after the training
    if parsed.distributed:
        join_processes()
    result = train(_chosen_recipe(parsed), parsed.data, parsed.out, start_from=parsed.start_from)
    if not is_first():
        return
    if result.already_finished:
        print(f"{result.run_dir} is finished already ({result.step} steps); its results were:")
    print(result.test)
    print(f"bundle: {result.bundle}")
    if parsed.recommend is not None:
        print(recommend(result.run_dir, store=parsed.data, k=parsed.recommend))


def _add_evaluate(commands: Any) -> None:
    parser = _add_command(
        commands,
        _run_evaluate,
        "evaluate the newest checkpoint of a run over the full catalog",
        "  recmodels evaluate RUN\n  recmodels evaluate RUN --part dev --hide-seen false -k 8,10",
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument(
        "--baselines",
        choices=get_args(Baselines),
        default="all",
        help="what stands beside the model; all: popularity, last-item Markov, item-kNN, random",
    )
    _add_measuring_options(parser)


def _add_measuring_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="STORE", help="sequence store, if it was moved")
    parser.add_argument("--part", choices=("dev", "test"), default="test", help="held-out part")
    parser.add_argument(
        "--hide-seen", type=_bool, metavar="true|false", help="default: as the recipe says"
    )
    parser.add_argument(
        "-k", type=_ks, metavar="K,K", help="list lengths (default: 8,10, or a smaller catalog)"
    )


def _measuring_options(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "store": parsed.data,
        "part": parsed.part,
        "hide_seen": parsed.hide_seen,
        "ks": parsed.k,
    }


def _run_evaluate(parsed: argparse.Namespace) -> None:
    print(evaluate(parsed.run_dir, baselines=parsed.baselines, **_measuring_options(parsed)))


def _add_compare(commands: Any) -> None:
    parser = _add_command(
        commands,
        _run_compare,
        "compare two runs user by user, with intervals of the differences",
        "  recmodels compare RUN_A RUN_B\n  recmodels compare RUN_A RUN_B --part dev -k 10",
    )
    parser.add_argument("run_a", metavar="RUN_A", help="run directory")
    parser.add_argument("run_b", metavar="RUN_B", help="another one on the same store")
    _add_measuring_options(parser)


def _run_compare(parsed: argparse.Namespace) -> None:
    print(compare(parsed.run_a, parsed.run_b, **_measuring_options(parsed)))


def _add_report(commands: Any) -> None:
    parser = _add_command(
        commands,
        _run_report,
        "write a run on one page: curves, metrics, examples, memory, time and recipe",
        "  recmodels report RUN\n  recmodels report RUN --out page.html --overwrite",
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("--data", metavar="STORE", help="sequence store, if it was moved")
    parser.add_argument("--out", metavar="FILE", help="default: RUN/report.html, which is replaced")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --out")


def _run_report(parsed: argparse.Namespace) -> None:
    if parsed.overwrite and parsed.out is None:
        raise UserError("--overwrite needs --out; leave it out")
    options = {"store": parsed.data, "overwrite": parsed.overwrite}
    print(f"page: {write_report(parsed.run_dir, parsed.out, **options)}")


def _add_plan(commands: Any) -> None:
    parser = _add_command(
        commands,
        _run_plan,
        "estimate memory and time of a training step on a TPU slice, without a TPU",
        "  recmodels plan sasrec-yambda-50m --topology v6e:2x4\n"
        "  recmodels plan sasrec-yambda-50m --topology v6e:2x4 --sweep batch\n"
        "  recmodels plan sasrec-yambda-50m --topology v6e:2x4 --sweep max-length=256,512",
    )
    _add_recipe_options(parser, positional=True)
    parser.add_argument("--topology", required=True, metavar="SLICE", help="such as v6e:2x4")
    parser.add_argument(
        "--num-items",
        type=int,
        metavar="N",
        help="catalog size (default: that of the recipe's data set, if it has one)",
    )
    parser.add_argument(
        "--data", metavar="STORE", help="sequence store to take the catalog and its categories from"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sweep",
        type=_sweep,
        metavar="FIELD[=N,N]",
        help="a table over batch or max-length; batch alone doubles it up to the largest that fits",
    )
    what.add_argument(
        "--largest-batch",
        action="store_true",
        help="plan the largest batch that fits, to within an eighth",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run_plan(parsed: argparse.Namespace) -> None:
    recipe = _chosen_recipe(parsed)
    options: dict[str, Any] = {
        "topology": parsed.topology,
        "num_items": parsed.num_items,
        "store": parsed.data,
    }
    if parsed.sweep is not None:
        field, values = parsed.sweep
        found = plan_sweep(recipe, **options, field=field, values=values)
    else:
        found = (plan_largest_batch if parsed.largest_batch else plan)(recipe, **options)
    print(json.dumps(found.to_dict(), indent=2) if parsed.json else found)


def _add_recipe_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    names = f"one of {', '.join(RECIPES)}"
    if positional:
        parser.add_argument("recipe", metavar="RECIPE", help=names)
    else:
        parser.add_argument("--recipe", required=True, metavar="NAME", help=names)
    group = parser.add_argument_group("fields of the recipe (default: as the recipe says)")
    for field in dataclasses.fields(Recipe):
        if field.name != "name":
            _add_field_option(group, field)


def _add_field_option(group: Any, field: "dataclasses.Field[Any]") -> None:
    options: dict[str, Any] = {"help": field.metadata["help"], "dest": f"field_{field.name}"}
    if get_origin(field.type) is Literal:
        options["choices"] = get_args(field.type)
    elif field.type is bool:
        options |= {"type": _bool, "metavar": "true|false"}
    else:
        options |= {"type": field.type, "metavar": field.type.__name__.upper()}  # type: ignore[union-attr]
    group.add_argument("--" + field.name.replace("_", "-"), **options)


def _chosen_recipe(parsed: argparse.Namespace) -> Recipe:
    given = {
        name.removeprefix("field_"): value
        for name, value in vars(parsed).items()
        if name.startswith("field_") and value is not None
    }
    return get_recipe(parsed.recipe).override(**given)


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false; got {text!r}")
    return text == "true"


def _sweep(text: str) -> tuple[str, list[int] | None]:
    name, has_values, values = text.partition("=")
    fields = {"batch": "batch_size", "batch-size": "batch_size", "max-length": "max_length"}
    try:
        return fields[name], [int(value) for value in values.split(",")] if has_values else None
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"must be batch, batch=64,128 or max-length=128,256; got {text!r}"
        ) from None


def _ks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers separated by commas; got {text!r}"
        ) from None
