"""Which searcher is built and how large its parts are."""

import dataclasses
from typing import Literal

from recserve._src.errors import UserError

SearcherChoice = Literal["auto", "scann", "exact"]
SearcherKind = Literal["scann", "exact"]

_MIN_SCANN_ITEMS = 16  # asymmetric hashing learns 16 centers per block and refuses fewer points
_CHOICES = ("auto", "scann", "exact")


@dataclasses.dataclass(frozen=True)
class ScannSizes:
    """Every size of a ScaNN searcher; `derive_scann_sizes` says how they follow the catalog."""

    num_leaves: int
    """Partitions of the tree."""
    leaves_to_search: int
    """Partitions that a query looks into."""
    reorder: int
    """Candidates per query whose scores are computed again exactly."""
    training_sample_size: int
    """Item vectors that the tree and the hash are trained on."""
    dimensions_per_block: int
    """Vector dimensions that share one 4-bit code."""
    anisotropic_threshold: float
    """How much more an error along the vector counts than one across it: 0 to 1, ScaNN's T."""


@dataclasses.dataclass(frozen=True)
class SearcherConfig:
    """What a caller asks for; `None` means derived from the catalog.

    Every field is an option of `recserve build`.
    """

    searcher: SearcherChoice = "auto"
    """`auto`: ScaNN from `exact_below` items up if it is installed, else exact search."""
    exact_below: int | None = None
    """`auto` searches catalogs with fewer items exactly; 20,000 by default."""
    num_leaves: int | None = None
    """Partitions of the ScaNN tree."""
    leaves_to_search: int | None = None
    """Partitions that a query looks into; more is slower and finds more."""
    reorder: int | None = None
    """Candidates per query that are scored again exactly; more is slower and finds more."""
    training_sample_size: int | None = None
    """Item vectors that the ScaNN tree and hash are trained on."""
    dimensions_per_block: int | None = None
    """Vector dimensions that share one 4-bit code; more is smaller and less accurate."""
    anisotropic_threshold: float | None = None
    """Weight of quantization errors along the item vector, above 0 and below 1."""

    def __post_init__(self) -> None:
        """Checks every field on its own; `plan_searcher` checks them against the catalog."""
        if self.searcher not in _CHOICES:
            raise UserError(
                f"`searcher` must be one of {', '.join(_CHOICES)}; got {self.searcher!r}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in ("searcher", "anisotropic_threshold"):
                continue
            least = 0 if field.name == "exact_below" else 1
            if type(value) is not int or value < least:
                raise UserError(
                    f"`{field.name}` must be a whole number, at least {least}; got {value!r}"
                )
        threshold = self.anisotropic_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise UserError(f"`anisotropic_threshold` must be between 0 and 1; got {threshold!r}")
        if self.exact_below is not None and self.searcher != "auto":
            raise UserError("`exact_below` only applies to searcher 'auto'; leave one of them out")

    def scann_overrides(self) -> dict[str, int | float]:
        """Returns the ScaNN sizes that the caller has set."""
        names = [field.name for field in dataclasses.fields(ScannSizes)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class SearcherPlan:
    """What will be built."""

    requested: SearcherChoice
    """What the caller asked for."""
    kind: SearcherKind
    """What it came to."""
    reason: str
    """Why, in a few words."""
    scann: ScannSizes | None
    """Sizes of the ScaNN searcher; None for exact search."""


def derive_scann_sizes(num_items: int, vector_dim: int) -> ScannSizes:
    """Returns the default ScaNN sizes for a catalog.

    - `num_leaves`: the square root of the number of items, so that choosing leaves and scanning
      one leaf cost the same.
    - `leaves_to_search`: half of them at 20,000 items, falling with the cube root of the catalog
      (14 % at 880,000, 6 % at 10 million): a larger catalog can afford a smaller share.
    - `reorder`: 500, at most a quarter of the catalog; their exact scores take about as long as
      the search in the tree.
    - `training_sample_size`: all items up to 250,000.
    - `dimensions_per_block`, `anisotropic_threshold`: 2 and 0.2, ScaNN's own recommendation.

    Args:
      num_items: items in the catalog, at least 1.
      vector_dim: dimensions of their vectors.
    """
    num_leaves = max(1, round(num_items**0.5))
    share = min(1.0, 0.5 * (20_000 / num_items) ** (1 / 3))
    return ScannSizes(
        num_leaves=num_leaves,
        leaves_to_search=max(1, round(share * num_leaves)),
        reorder=max(1, min(500, num_items // 4)),
        training_sample_size=min(num_items, 250_000),
        dimensions_per_block=min(2, vector_dim),
        anisotropic_threshold=0.2,
    )


def plan_searcher(
    config: SearcherConfig, num_items: int, vector_dim: int, scann_problem: str | None
) -> SearcherPlan:
    """Decides what `config` means for a catalog, before anything is built.

    Args:
      config: what the caller asks for.
      num_items: items in the catalog.
      vector_dim: dimensions of their vectors.
      scann_problem: why ScaNN cannot be used on this machine; None when it can.

    Returns:
      The searcher to build, the reason, and its sizes.

    Raises:
      UserError: ScaNN is asked for and cannot be used, its sizes contradict each other or the
        catalog, or sizes are given although exact search is what would be built.
    """
    exact_below = 20_000 if config.exact_below is None else config.exact_below
    if config.searcher == "scann" and scann_problem is not None:
        raise UserError(scann_problem)
    if config.searcher == "exact":
        reason = "asked for"
    elif config.searcher == "auto" and num_items < exact_below:
        reason = f"{num_items:,} items are fewer than {exact_below:,}"
    elif config.searcher == "auto" and scann_problem is not None:
        reason = scann_problem
    else:
        sizes = _scann_sizes(config, num_items, vector_dim)
        return SearcherPlan(config.searcher, "scann", f"{num_items:,} items", sizes)
    for name in config.scann_overrides():
        raise UserError(
            f"`{name}` applies to ScaNN only, but exact search would be built ({reason}); "
            f"leave `{name}` out or ask for searcher 'scann'"
        )
    return SearcherPlan(config.searcher, "exact", reason, None)


def _scann_sizes(config: SearcherConfig, num_items: int, vector_dim: int) -> ScannSizes:
    if num_items < _MIN_SCANN_ITEMS:
        raise UserError(
            f"ScaNN needs at least {_MIN_SCANN_ITEMS} items; the catalog has {num_items}; "
            "use searcher 'exact'"
        )
    default = derive_scann_sizes(num_items, vector_dim)
    overrides = config.scann_overrides()
    if "num_leaves" in overrides:
        # The derived share of the catalog is kept when only the number of leaves changes.
        share = default.leaves_to_search / default.num_leaves
        overrides.setdefault("leaves_to_search", max(1, round(share * overrides["num_leaves"])))
    sizes = ScannSizes(**{**dataclasses.asdict(default), **overrides})
    for name, value, limit_name, limit in (
        ("leaves_to_search", sizes.leaves_to_search, "leaves", sizes.num_leaves),
        ("num_leaves", sizes.num_leaves, "training vectors", sizes.training_sample_size),
        ("training_sample_size", sizes.training_sample_size, "items", num_items),
        ("reorder", sizes.reorder, "items", num_items),
        ("dimensions_per_block", sizes.dimensions_per_block, "dimensions", vector_dim),
    ):
        if value > limit:
            raise UserError(f"`{name}` must be at most the {limit:,} {limit_name}; got {value:,}")
    if sizes.training_sample_size < _MIN_SCANN_ITEMS:
        raise UserError(
            f"`training_sample_size` must be at least {_MIN_SCANN_ITEMS}; "
            f"got {sizes.training_sample_size}"
        )
    return sizes
