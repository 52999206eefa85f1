"""`config.json` of a run: what is trained and on which store, checked field by field."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe
from recmodels._src.storage import absolute

FORMAT, VERSION = "recmodels-run", 1
_VERSIONED_PACKAGES = ("recmodels", "cutbce-ops", "jax", "jaxlib", "flax", "optax", "grain")
_FIELDS = ("format", "version", "recipe", "store", "table_rows", "start_from", "versions")
_STORE_FIELDS = {
    "path": str, "digest": str, "num_users": int, "num_items": int, "num_interactions": int
}  # fmt: skip
_CATEGORIES = "num_categories"  # where the store has any


class RunConfig(NamedTuple):
    """What a run is about, as its folder records it."""

    recipe: Recipe  # what is trained
    store: dict[str, Any]  # identity of the sequence store: path, digest and counts
    num_rows: int  # rows of the item table, unused ones at its end included
    start_from: str | None  # finished run whose parameters it began with

    def to_dict(self) -> dict[str, Any]:
        """Content of config.json, the versions of this moment included."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "recipe": self.recipe.to_dict(),
            "store": self.store,
            "table_rows": self.num_rows,
            "start_from": self.start_from,
            "versions": {name: installed_version(name) for name in _VERSIONED_PACKAGES},
        }


def parse_config(text: bytes, file: str) -> RunConfig:
    """Reads what `RunConfig.to_dict` gave.

    Args:
        text: content of config.json.
        file: its path, for messages.

    Raises:
        UserError: it is no such content, or that of another version; names the field.
    """
    try:
        config = _object(json.loads(text), "the whole")
        if (_field(config, "format"), _field(config, "version")) == (FORMAT, VERSION):
            return _parsed(config)
    except ValueError as error:  # no JSON, no text, or a field
        raise UserError(
            f"{file} is damaged ({error}); put back what was there, or train again with another "
            "--out."
        ) from None
    raise UserError(f"{file} was written by another version; train again.")


def store_identity(store: SequenceStore) -> dict[str, Any]:
    """What config.json records of a store."""
    identity = {
        "path": str(absolute(store.location)),
        "digest": store.digest,
        "num_users": store.num_users,
        "num_items": store.num_items,
        "num_interactions": store.num_interactions,
    }
    # A store without categories is recorded as before there were any.
    return identity | ({_CATEGORIES: store.num_categories} if store.num_categories else {})


def check_store(recorded: Mapping[str, Any], store: SequenceStore, run: str) -> None:
    """Refuses a store that is not the recorded one.

    Args:
        recorded: identity in config.json.
        store: the store at hand; it may have moved.
        run: path of the run, for messages.

    Raises:
        UserError: it is another store, or config.json says other counts than it has.
    """
    if store.digest != recorded["digest"]:
        was, now = (
            f"{each['num_users']:,} users, {each['num_items']:,} items, digest "
            f"{each['digest'][:12]}"
            for each in (recorded, store_identity(store))
        )
        raise UserError(
            f"{store.location} ({now}) is not the store that {run} was trained on ({was}); pass "
            "that one."
        )
    for name, now in store_identity(store).items():
        if name != "path" and recorded.get(name) != now:
            raise UserError(
                f"config.json of {run} does not fit {store.location}: `store.{name}` is "
                f"{recorded.get(name)!r} there, the store has {now!r}; put back what was there."
            )


def installed_version(package: str) -> str:
    """Version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"  # on the path without being installed


def _parsed(config: dict[str, Any]) -> RunConfig:
    _refuse_unknown(config, _FIELDS, "")
    recipe = _recipe(_field(config, "recipe"))
    store = _store(_field(config, "store"), has_categories=recipe.item_categories)
    vocab_size = store["num_items"] + 1
    num_rows = config.get("table_rows", vocab_size)
    if type(num_rows) is not int or num_rows < vocab_size:
        raise ValueError(
            f"`table_rows` is {num_rows!r}; `store.num_items` {store['num_items']} needs at least "
            f"{vocab_size}"
        )
    start_from = config.get("start_from")
    if not isinstance(start_from, str | None):
        raise ValueError(f"`start_from` is {start_from!r}, no path")
    _object(config.get("versions", {}), "`versions`")
    return RunConfig(recipe, store, num_rows, start_from)


def _recipe(values: Any) -> Recipe:
    fields = {each.name: each for each in dataclasses.fields(Recipe)}
    _refuse_unknown(_object(values, "`recipe`"), fields, "recipe.")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING:
            _field(values, name, "recipe.")
    return Recipe(**values)


def _store(values: Any, *, has_categories: bool) -> dict[str, Any]:
    _object(values, "`store`")
    for name, kind in (_STORE_FIELDS | ({_CATEGORIES: int} if has_categories else {})).items():
        value = _field(values, name, "store.")
        if type(value) is not kind or (kind is int and value < 1):
            wanted = "a text" if kind is str else "a positive integer"
            raise ValueError(f"`store.{name}` is {value!r}, not {wanted}")
    return values


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object")
    return value


def _field(values: dict[str, Any], name: str, prefix: str = "") -> Any:
    if name not in values:
        raise ValueError(f"`{prefix}{name}` is missing")
    return values[name]


def _refuse_unknown(values: dict[str, Any], known: Iterable[str], prefix: str) -> None:
    for name in values.keys() - set(known):
        raise ValueError(f"`{prefix}{name}` is no field of it")
