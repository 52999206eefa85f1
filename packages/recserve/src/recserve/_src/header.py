"""The JSON manifests: `bundle.json` of a bundle and `manifest.json` of an index folder.

Both carry the same description of the model, so an index folder needs its bundle no more.
"""

import dataclasses
import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from recserve._src.errors import UserError
from recserve._src.storage import FileRecord

IdType = Literal["int64", "string"]

ITEM_EMBEDDINGS = "item_embeddings.npy"
ITEMS = "items.parquet"
USERS = "users.parquet"
HISTORY_ITEMS = "history_items.npy"
HISTORY_OFFSETS = "history_offsets.npy"
HISTORY_TIMES = "history_times.npy"
QUERY_ENCODER = "query_encoder.stablehlo"
_MODEL_FILES = (ITEM_EMBEDDINGS, ITEMS, USERS, HISTORY_ITEMS, HISTORY_OFFSETS, QUERY_ENCODER)
_GAPS_INPUT = "history_gaps"


@dataclasses.dataclass(frozen=True)
class Format:
    """Name and version of a folder format, and what to say to a user who lacks such a folder."""

    noun: str
    """What messages call the folder."""
    manifest: str
    """File name of its manifest."""
    name: str
    """Value of the manifest's `format` field."""
    version: int
    """The only value of the manifest's `version` field that this release reads."""
    remedy: str
    """How to obtain such a folder."""


BUNDLE = Format(
    noun="bundle",
    manifest="bundle.json",
    name="cutbce-bundle",
    version=1,
    remedy="`recmodels train` writes one as RUN/bundle",
)
INDEX = Format(
    noun="index folder",
    manifest="manifest.json",
    name="recserve-index",
    version=1,
    remedy="write one with `recserve build BUNDLE --out INDEX`",
)


@dataclasses.dataclass(frozen=True)
class Header:
    """What a manifest says about the model, identical in a bundle and its index folder."""

    model: dict[str, Any]
    """Identity of the model: `name`, `kind` and training `step`."""
    num_items: int
    """Real items in the catalog."""
    vocab_size: int
    """Rows of the item table: `num_items + 1`, because row 0 is padding."""
    vector_dim: int
    """Dimensions Dq of item and query vectors."""
    max_length: int
    """Most recent history items N that the query encoder reads."""
    similarity: str
    """Always `"dot"`: a score is the inner product of query and item vector."""
    item_id_type: IdType
    """Type of the caller's item ids."""
    user_id_type: IdType
    """Type of the caller's user ids."""
    hide_seen: bool
    """Whether items of the history are hidden unless the caller says otherwise."""
    encoder: dict[str, Any]
    """File, inputs, output and platforms of the query encoder."""

    @property
    def reads_times(self) -> bool:
        """Whether the encoder reads the seconds between the events of a history, too."""
        inputs = self.encoder.get("inputs")
        return isinstance(inputs, list) and any(
            isinstance(each, str) and each.split()[:1] == [_GAPS_INPUT] for each in inputs
        )

    @property
    def model_files(self) -> tuple[str, ...]:
        """The files that the bundle and the index folder of this model both have."""
        return (*_MODEL_FILES, HISTORY_TIMES) if self.reads_times else _MODEL_FILES


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest that was read and found well formed."""

    path: Path
    """Where it was read."""
    header: Header
    """The model."""
    files: dict[str, FileRecord]
    """Every file of the folder but the manifest itself, by relative POSIX name."""
    raw: dict[str, Any]
    """The whole JSON object."""


def read_manifest(folder: Path, kind: Format) -> Manifest:
    """Reads and checks the manifest of a bundle or an index folder.

    Raises:
      UserError: the folder or manifest is missing, unreadable, of another format or version, or
        a field is missing, of the wrong type or contradicts another.
    """
    path = folder / kind.manifest
    raw = _read_json(path, kind)
    for field, wanted in (("format", kind.name), ("version", kind.version)):
        if raw.get(field) != wanted:
            raise UserError(
                f"{path} has {field} {raw.get(field)!r} but this recserve reads {wanted!r}; "
                f"{kind.remedy}"
            )
    header = _parse_header(raw, path)
    return Manifest(path, header, _parse_files(raw, path, header), raw)


def _read_json(path: Path, kind: Format) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{path.parent} is no {kind.noun}: it has no {kind.manifest}; {kind.remedy}"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} is corrupted: it is not JSON ({error}); write the {kind.noun} again"
        ) from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} is corrupted: not a JSON object; write the {kind.noun} again")
    return raw


def _parse_header(raw: dict[str, Any], path: Path) -> Header:
    kinds = {
        "model": dict,
        "num_items": int,
        "vocab_size": int,
        "vector_dim": int,
        "max_length": int,
        "similarity": str,
        "item_id_type": str,
        "user_id_type": str,
        "hide_seen": bool,
        "encoder": dict,
    }
    for field, kind in kinds.items():
        if type(raw.get(field)) is not kind:  # not isinstance: true is no number here
            raise UserError(
                f"{path}: field {field!r} must be a JSON {kind.__name__}; got {raw.get(field)!r}"
            )
    header = Header(**{field: raw[field] for field in kinds})
    for field, allowed in (
        ("similarity", ["dot"]),
        ("item_id_type", ["int64", "string"]),
        ("user_id_type", ["int64", "string"]),
        ("vocab_size", [header.num_items + 1]),
    ):
        if raw[field] not in allowed:
            raise UserError(f"{path}: field {field!r} must be one of {allowed}; got {raw[field]!r}")
    for field in ("num_items", "vector_dim", "max_length"):
        if raw[field] < 1:
            raise UserError(f"{path}: field {field!r} must be at least 1; got {raw[field]}")
    if header.encoder.get("file") != QUERY_ENCODER:
        raise UserError(
            f"{path}: encoder file must be {QUERY_ENCODER!r}; got {header.encoder.get('file')!r}"
        )
    return header


def _parse_files(raw: dict[str, Any], path: Path, header: Header) -> dict[str, FileRecord]:
    listed = raw.get("files")
    if not isinstance(listed, dict):
        raise UserError(f"{path}: field 'files' must list the files; got {listed!r}")
    records: dict[str, FileRecord] = {}
    for name, entry in listed.items():
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise UserError(f"{path}: file name {name!r} leads out of the folder")
        match entry:
            case {"bytes": int(num_bytes), "sha256": str(sha256)}:
                records[name] = FileRecord(num_bytes, sha256)
            case _:
                raise UserError(f"{path}: entry of {name!r} needs 'bytes' and 'sha256'")
    missing = [name for name in header.model_files if name not in records]
    if missing:
        raise UserError(f"{path} lists no {missing[0]}; write the folder again")
    return records
