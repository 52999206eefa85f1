"""Builds an index folder from a bundle."""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recserve._src.approximate import scann_problem, train_scann
from recserve._src.catalog import Catalog, check_contents, load_catalog
from recserve._src.config import SearcherConfig, SearcherPlan, plan_searcher
from recserve._src.encoder import QueryEncoder, encoding_problem
from recserve._src.errors import UserError
from recserve._src.header import BUNDLE, INDEX, QUERY_ENCODER, Manifest, read_manifest
from recserve._src.storage import (
    FileRecord,
    check_record,
    check_target,
    copy_file,
    naming,
    new_folder,
    record_file,
)
from recserve._src.version import __version__

SCANN_FOLDER = "scann"
_LOG = logging.getLogger("recserve")
_DERIVED = SearcherConfig()


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What `build` has written."""

    path: Path
    """The index folder."""
    plan: SearcherPlan
    """The searcher, its sizes and why it was chosen."""
    num_items: int
    """Items in the catalog."""
    vector_dim: int
    """Dimensions of their vectors."""
    num_bytes: int
    """Size of the index folder."""
    build_s: float
    """Time from start to finish."""


def build(
    bundle: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    config: SearcherConfig = _DERIVED,
    overwrite: bool = False,
    show_progress: bool = False,
) -> BuildReport:
    """Checks a bundle and builds a self-contained index folder from it.

    The folder appears under its name complete or not at all. It holds copies of everything that
    queries need, so the bundle may be deleted afterwards.

    Args:
      bundle: folder that the trainer has exported.
      out: index folder to write.
      config: searcher and sizes; by default all derived from the catalog.
      overwrite: replace an existing index folder; it stays readable until the new one is complete.
      show_progress: show a progress bar on stderr if it is a terminal.

    Returns:
      What was built, how large it is and how long it took.

    Raises:
      UserError: the bundle is missing, corrupted or inconsistent, the configuration does not fit
        it, ScaNN is asked for and missing, or `out` exists.
    """
    started = time.perf_counter()
    bundle, out = Path(bundle), Path(out)
    check_target(out, overwrite=overwrite, is_replaceable=_is_index)  # before the slow part too
    manifest = read_manifest(bundle, BUNDLE)
    plan = _plan(config, manifest)
    with (
        _stages(show_progress) as progress,
        new_folder(out, overwrite=overwrite, is_replaceable=_is_index) as folder,
    ):
        progress.set_description("copy and verify the bundle")
        files = {
            name: _copy(bundle, folder, name, manifest) for name in manifest.header.model_files
        }
        progress.update()
        progress.set_description("check its contents")
        with _errors_naming(bundle, instead_of=folder):
            catalog = load_catalog(folder, manifest.header)
            check_contents(catalog, folder)
            _check_encoder(folder, catalog)
        progress.update()
        progress.set_description(f"train the {plan.kind} searcher")
        files |= _train(catalog, plan, folder)
        progress.update()
        progress.set_description("write to disk")
        _write_manifest(folder, manifest, plan, files)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return BuildReport(
        path=out,
        plan=plan,
        num_items=manifest.header.num_items,
        vector_dim=manifest.header.vector_dim,
        num_bytes=num_bytes,
        build_s=time.perf_counter() - started,
    )


def _is_index(folder: Path) -> bool:
    """Says whether `folder` is an index folder of any version, or empty."""
    try:
        raw = json.loads((folder / INDEX.manifest).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return not any(folder.iterdir())
    except ValueError:
        return False
    return isinstance(raw, dict) and raw.get("format") == INDEX.name


def _plan(config: SearcherConfig, manifest: Manifest) -> SearcherPlan:
    header = manifest.header
    problem = None if config.searcher == "exact" else scann_problem()
    plan = plan_searcher(config, header.num_items, header.vector_dim, problem)
    if problem is not None and plan.reason == problem:
        _LOG.warning("exact search instead of ScaNN: %s", problem)
    return plan


def _stages(show_progress: bool) -> Any:
    from tqdm import tqdm  # here, because only building shows it

    layout = "{desc:<28} {bar:20} {n_fmt}/{total_fmt} [{elapsed}]"
    return tqdm(total=4, bar_format=layout, disable=None if show_progress else True)


def _copy(bundle: Path, folder: Path, name: str, manifest: Manifest) -> FileRecord:
    """Copies one file and verifies the very bytes that were copied."""
    try:
        record = copy_file(bundle / name, folder / name)
    except FileNotFoundError as error:
        raise UserError(
            f"{bundle / name} is missing but {manifest.path} lists it; export the bundle again"
        ) from error
    check_record(bundle / name, record, manifest.files[name], str(manifest.path))
    return record


@contextlib.contextmanager
def _errors_naming(bundle: Path, *, instead_of: Path) -> Iterator[None]:
    """Lets messages about the copy, which is deleted on failure, name the bundle's own file."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(instead_of), str(bundle))) from error


def _check_encoder(folder: Path, catalog: Catalog) -> None:
    """Encodes an empty history, if JAX is there, so that a bad encoder is found before serving."""
    encoder = QueryEncoder(folder / QUERY_ENCODER, catalog.item_vectors, catalog.header)
    problem = encoding_problem()
    if problem is not None:
        _LOG.warning("the query encoder was not checked: %s", problem)
        return
    encoder.encode([np.empty(0, np.int32)])


def _train(catalog: Catalog, plan: SearcherPlan, folder: Path) -> dict[str, FileRecord]:
    if plan.scann is None:
        return {}
    train_scann(catalog.item_vectors, plan.scann, folder / SCANN_FOLDER)
    return {
        path.relative_to(folder).as_posix(): record_file(path)
        for path in sorted((folder / SCANN_FOLDER).iterdir())
    }


def _write_manifest(
    folder: Path, bundle: Manifest, plan: SearcherPlan, files: dict[str, FileRecord]
) -> None:
    content = {
        "format": INDEX.name,
        "version": INDEX.version,
        "built_with": {
            "recserve": __version__,
            "scann": importlib.metadata.version("scann") if plan.scann else None,
        },
        "bundle_sha256": record_file(bundle.path).sha256,
        **dataclasses.asdict(bundle.header),
        "searcher": dataclasses.asdict(plan),
        "files": {
            name: {"bytes": record.num_bytes, "sha256": record.sha256}
            for name, record in files.items()
        },
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path = folder / INDEX.manifest
    with naming(path):
        path.write_text(text, encoding="utf-8")
