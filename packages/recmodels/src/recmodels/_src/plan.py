"""What training a recipe needs on a TPU slice, asked of the TPU compiler without a TPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tqdm import tqdm

from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.plan_client import CompilerFailedError as CompilerFailedError
from recmodels._src.plan_client import DoesNotFitError, plan_client
from recmodels._src.plan_report import PlanReport, PlanSweep
from recmodels._src.recipe import DATA_AXIS, Recipe, parse_mesh
from recmodels._src.recipe_facts import RECIPE_FACTS
from recmodels._src.recipes import get_recipe

SweptField = Literal["batch_size", "max_length"]

# Sizes of the data that the built-in recipes are for, without the padding row.
CATALOGS = {name: facts.num_items for name, facts in RECIPE_FACTS.items() if facts.num_items}
# Share of a chip's HBM that a program can have; the compiler keeps the rest.
_USABLE = 0.97
# Batches that differ by a smaller share are not told apart.
_RESOLUTION = 1 / 16
# Where the search stops: more positions than anybody trains on in one step.
_MOST_POSITIONS = 2**22


def plan(
    recipe: str | Recipe,
    *,
    topology: str,
    num_items: int | None = None,
    store: str | Path | SequenceStore | None = None,
) -> PlanReport:
    """Compiles the whole training step of a recipe for a TPU slice and reports what it needs.

    The step is the trainer's own: forward, loss, gradients, optimizer, state donated, laid out as
    the recipe's `mesh` and `table` say. It takes a minute or so and needs the `tpu-plan` extra, no
    TPU. MFU is the arithmetic of model and loss, by the formula in `model_flops`, over what all
    chips could do in bfloat16 in the time of the step; what is recomputed does not count.

    Args:
        recipe: a recipe or the name of a built-in one.
        topology: TPU slice as libtpu names it, e.g. "v6e:2x4".
        num_items: size of the catalog; None is that of the store, or without one that of the data
            the built-in recipe is for.
        store: sequence store whose catalog is planned for, with its categories if the recipe reads
            them.

    Returns:
        Memory per chip, collectives, estimated time and what limits it.

    Raises:
        UserError: libtpu is missing, the slice is unknown, mesh or batch do not suit its chips, the
            catalog is unknown or given twice, or the step does not fit.
        CompilerFailedError: the compiler failed.
    """
    recipe, catalog = _checked(recipe, num_items, store)
    with plan_client() as client:
        return _Steps(client, recipe, topology, catalog, "batch_size").report(recipe.batch_size)


def plan_sweep(
    recipe: str | Recipe,
    *,
    topology: str,
    num_items: int | None = None,
    store: str | Path | SequenceStore | None = None,
    field: SweptField = "batch_size",
    values: Sequence[int] | None = None,
) -> PlanSweep:
    """Plans a recipe for several batch sizes, or lengths, one after another.

    Args:
        recipe: a recipe or the name of a built-in one.
        topology: TPU slice, as for `plan`.
        num_items: size of the catalog, as for `plan`.
        store: as for `plan`.
        field: the field of the recipe that takes the values.
        values: the values; None doubles the recipe's batch size until the largest that fits.

    Returns:
        The plans of the values that fit, and those that do not.

    Raises:
        UserError: as for `plan`; or `values` are missing for another field than `batch_size`.
        CompilerFailedError: the compiler failed.
    """
    recipe, catalog = _checked(recipe, num_items, store)
    if values is None and field != "batch_size":
        raise UserError(f"give the values of `{field}`, such as {field}=64,128.")
    with plan_client() as client:
        steps = _Steps(client, recipe, topology, catalog, field)
        if values is None:
            return _search(steps, growth=2)
        for value in tqdm(sorted(set(values)), desc=f"compiling each {field}", leave=False):
            steps.try_one(value)
        return steps.found


def plan_largest_batch(
    recipe: str | Recipe,
    *,
    topology: str,
    num_items: int | None = None,
    store: str | Path | SequenceStore | None = None,
) -> PlanReport:
    """Plans the recipe with the largest batch that fits, to within an eighth.

    A few batches are compiled, each chosen by the memory of those before. The search stops at
    2^22 positions.

    Args:
        recipe: a recipe or the name of a built-in one.
        topology: TPU slice, as for `plan`.
        num_items: size of the catalog, as for `plan`.
        store: as for `plan`.

    Returns:
        The plan for that batch; its `batch_size` is the answer.

    Raises:
        UserError: as for `plan`; or not even the smallest batch of the mesh fits.
        CompilerFailedError: the compiler failed.
    """
    recipe, catalog = _checked(recipe, num_items, store)
    with plan_client() as client:
        steps = _Steps(client, recipe, topology, catalog, "batch_size")
        return _search(steps, growth=4).reports[-1]


class _Catalog(NamedTuple):
    num_items: int
    categories: tuple[int, int] | None  # number, and most of one item, if the recipe reads them


def _checked(
    recipe: str | Recipe, num_items: int | None, store: str | Path | SequenceStore | None
) -> tuple[Recipe, _Catalog]:
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    if store is not None:
        if num_items is not None:
            raise UserError("`num_items` is that of the store; leave one of them out.")
        store = store if isinstance(store, SequenceStore) else SequenceStore.open(store)
        return recipe, _Catalog(store.num_items, _categories(recipe, store))
    if recipe.item_categories:
        raise UserError(
            "`item_categories` needs the categories of a store; give it with `store` (--data)."
        )
    if num_items is None:
        num_items = CATALOGS.get(recipe.name)
    if num_items is None:
        raise UserError(
            f"the catalog of `{recipe.name}` has no known size; give `num_items` or `store`."
        )
    if num_items < 1:
        raise UserError(f"`num_items` must be at least 1; got {num_items}.")
    return recipe, _Catalog(num_items, None)


def _categories(recipe: Recipe, store: SequenceStore) -> tuple[int, int] | None:
    if not recipe.item_categories:
        return None
    return len(store.item_categories.names), store.item_categories.table.shape[1]


class _Compiles(Protocol):
    def ask(
        self, recipe: Recipe, topology: str, num_items: int, categories: tuple[int, int] | None
    ) -> dict[str, Any]: ...


class _Steps:
    """Plans of one recipe that differ in the value of one field."""

    def __init__(
        self, client: _Compiles, recipe: Recipe, topology: str, catalog: _Catalog, field: SweptField
    ) -> None:
        self.client = client
        self.recipe = recipe
        self.topology = topology
        self.catalog = catalog
        self.found = PlanSweep(field, [], [])
        self.mesh = recipe.mesh  # with the number of chips, once it is known

    def report(self, value: int) -> PlanReport:
        """The plan for one value; `DoesNotFitError` if it needs too much memory."""
        recipe = self.recipe.override(**{self.found.field: value})
        answer = self.client.ask(recipe, self.topology, *self.catalog)
        self.mesh = answer["mesh"]
        return PlanReport(
            recipe=recipe.name,
            topology=self.topology,
            num_items=self.catalog.num_items,
            batch_size=recipe.batch_size,
            max_length=recipe.max_length,
            **answer,
        )

    def try_one(self, value: int) -> None:
        """Adds the plan for a value, or notes that it does not fit."""
        try:
            self.found.reports.append(self.report(value))
        except DoesNotFitError as error:
            self.mesh = error.mesh
            self.found.does_not_fit.append(value)


def _search(steps: _Steps, *, growth: int) -> PlanSweep:
    """Plans batches from the recipe's to the largest that fits; the last report is that one's."""
    found = steps.found
    batch: int | None = steps.recipe.batch_size
    most = _MOST_POSITIONS // steps.recipe.max_length
    with tqdm(unit="batch", leave=False) as bar:
        while batch is not None:
            bar.set_description(f"compiling a batch of {batch}")
            steps.try_one(batch)
            bar.update()
            granule = parse_mesh(steps.mesh)[DATA_AXIS] * steps.recipe.accumulate_steps
            batch = next_batch(found, granule=granule, growth=growth, most=most)
    if not found.reports:
        raise UserError(
            f"{steps.recipe.name} does not fit {steps.topology}, not even "
            f"{min(found.does_not_fit)} sequences."
        )
    return found


def next_batch(found: PlanSweep, *, granule: int, growth: int, most: int) -> int | None:
    """The batch to compile next in search of the largest that fits; None when it is found.

    Args:
        found: what was compiled before, at least one batch; reports by increasing batch.
        granule: batches are multiples of it.
        growth: largest ratio of a batch to the one before.
        most: sequences beyond which nothing is tried.
    """
    too_large = min(found.does_not_fit, default=None)
    if not found.reports:
        assert too_large is not None
        return too_large // 2 // granule * granule or None
    last = found.reports[-1]
    limits: list[float] = [last.batch_size * growth, most]
    if len(found.reports) > 1:
        before = found.reports[-2]
        # Past the fixed part memory grows with the batch, nearly along a line.
        per_sequence = (last.peak_bytes - before.peak_bytes) / (last.batch_size - before.batch_size)
        room = _USABLE * last.chip_bytes - last.peak_bytes
        if per_sequence > 0:
            limits.append(last.batch_size + max(0.0, room) / per_sequence)
    if too_large is not None:
        limits.append((last.batch_size + too_large) / 2)
    batch = int(min(limits)) // granule * granule
    step = max(granule, int(_RESOLUTION * last.batch_size))
    return batch if batch - last.batch_size >= step else None
