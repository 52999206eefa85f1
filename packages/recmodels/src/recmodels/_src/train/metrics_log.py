"""`metrics.jsonl` and TensorBoard: losses and evaluations by step, exact across interruptions."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from recmodels._src import storage
from recmodels._src.atomic import writing
from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe
from recmodels._src.train import processes

_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends records to `metrics.jsonl` and mirrors them to TensorBoard.

    Opening drops every record that is younger than the checkpoint training continues from: those
    steps run again and are written again, so no step is lost or appears twice. Wall-clock figures
    have no place here, so that an interrupted run and an unbroken one give the same file.

    Of several processes only the first one writes. For a run in an object store, where nothing can
    be appended to, it writes to a folder of this machine, and `sync` uploads the whole.
    """

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        self._is_writer = processes.is_first()
        if not self._is_writer:
            return
        self._path = run_dir / _FILE
        self._copies = contextlib.ExitStack()
        self._folder = run_dir
        if storage.is_remote(run_dir):
            copy = tempfile.TemporaryDirectory(prefix="recmodels-metrics-")
            self._folder = Path(self._copies.enter_context(copy))
        _write(self._folder / _FILE, _kept(run_dir, resumed_step))
        self._file = (self._folder / _FILE).open("a", encoding="utf-8")
        # purge_step makes TensorBoard hide what an interrupted run wrote past its checkpoint.
        board = self._folder / "tensorboard"
        self._board = SummaryWriter(str(board), purge_step=resumed_step + 1)
        self._upload()

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Records `values` of a split ("train", "dev", "test") after `step` steps."""
        if not self._is_writer:
            return
        record = {"step": step, "split": split, **values}
        with writing(self._path):
            self._file.write(json.dumps(record) + "\n")
        self.write_board(step, split, values)

    def write_board(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Sends `values` to TensorBoard only (speeds, which differ from run to run)."""
        if not self._is_writer:
            return
        for name, value in values.items():
            self._board.add_scalar(f"{split}/{name}", value, step)

    def sync(self) -> None:
        """Puts all records on disk; call it before the checkpoint that covers them is written."""
        if not self._is_writer:
            return
        self._flush()
        self._upload()

    def close(self) -> None:
        """Writes what is pending and closes both files."""
        if not self._is_writer:
            return
        with self._copies:
            self._flush()
            self._file.close()
            self._board.close()
            self._upload()

    def _flush(self) -> None:
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._board.flush()

    def _upload(self) -> None:
        if storage.is_remote(self._path):
            for file in (self._folder / _FILE, *(self._folder / "tensorboard").iterdir()):
                storage.upload(file, self._path.parent / file.relative_to(self._folder))


def read_metrics(run_dir: Path) -> list[dict]:
    """All records of a run in order; an unfinished last line, left by a kill, is dropped.

    Raises:
        UserError: another line is no record.
    """
    path = run_dir / _FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is unfinished
    return [_parse(line, number, path) for number, line in enumerate(lines, 1)]


def missing_evaluations(
    records: Iterable[Mapping[str, Any]], recipe: Recipe, last_step: int
) -> list[int]:
    """Steps whose evaluation on dev should have been recorded, with the selecting metric.

    Args:
        records: result of `read_metrics`.
        recipe: what is trained.
        last_step: step of the newest checkpoint, before which all records are on disk.
    """
    evaluated = {
        record["step"]
        for record in records
        if record["split"] == "dev" and (recipe.selection == "last" or recipe.selection in record)
    }
    due = range(recipe.evaluate_every, last_step + 1, recipe.evaluate_every)
    return [step for step in due if step not in evaluated]


def _parse(line: bytes, number: int, path: Path) -> dict:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if record is not None and _is_record(record):
        return record
    raise UserError(f"line {number} of {path} is damaged; remove that line to go on without it.")


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    values = [value for name, value in record.items() if name not in ("step", "split")]
    return (
        record.get("split") in ("train", "dev", "test")
        and (record["split"] == "train") == ("loss" in record)
        and all(isinstance(value, int | float) for value in values)
    )


def _kept(run_dir: Path, last_step: int) -> list[dict]:
    """The records up to `last_step`, without the final evaluation, which is always redone."""
    return [
        record
        for record in read_metrics(run_dir)
        if record["step"] <= last_step and record["split"] != "test"
    ]


def _write(path: Path, records: list[dict]) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
