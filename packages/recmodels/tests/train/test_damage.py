"""A damaged file of a run gives one line that names it."""

import json
import shutil

import pytest
from train_cases import finished_run, small_recipe

from recmodels import UserError, evaluate, train, write_report
from recmodels._src.cli import main


@pytest.fixture
def run_dir(tmp_path):
    _, result = finished_run()
    shutil.copytree(result.run_dir, tmp_path / "run")
    return tmp_path / "run"


def _train(run_dir):
    store, _ = finished_run()
    return train(small_recipe(num_steps=60), store, run_dir, progress=False)


def _set_store(run_dir, **values):
    config = json.loads((run_dir / "config.json").read_text())
    for name, value in values.items():
        config["store"][name] = value
        if value is None:
            del config["store"][name]
    (run_dir / "config.json").write_text(json.dumps(config))


CONFIGS = {
    "not utf-8": lambda run: (run / "config.json").write_bytes(b"\xff\xfe{"),
    "list": lambda run: (run / "config.json").write_text("[]"),
    "no digest": lambda run: _set_store(run, digest=None),
    "no path": lambda run: _set_store(run, path=None),
    "number as path": lambda run: _set_store(run, path=3),
    "word as size": lambda run: _set_store(run, num_items="many"),
    "negative size": lambda run: _set_store(run, num_items=-1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(run_dir, capsys, name):
    CONFIGS[name](run_dir)
    assert main(["evaluate", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert f"{run_dir / 'config.json'} is damaged" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"{}", b"[]", b"\xff", b'{"step": 1, "step_ms": 2, "test": {}}'),
        *(b'{"step": "x", "step_ms": 2, "test": {}}', b'{"step": 1, "step_ms": "x", "test": {}}'),
        b'{"step": 1, "step_ms": 2, "test": {}, "resources": {}}',
    ],
)
def test_summary(run_dir, content):
    (run_dir / "summary.json").write_bytes(content)
    with pytest.raises(UserError, match=r"summary\.json is damaged; remove it and run the same"):
        _train(run_dir)


@pytest.mark.parametrize("model", [None, {"hit@8": "x"}])
def test_summary_with_another_evaluation(run_dir, model):
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text())
    summary["test"]["model"] = model
    path.write_text(json.dumps(summary))
    for use in (_train, write_report):
        with pytest.raises(
            UserError, match=r"summary\.json is damaged; remove it and run the same"
        ):
            use(run_dir)


@pytest.mark.parametrize("line", [b"garbage", b"{}", b"\xff\xff", b'{"step": 4, "split": "train"}'])
def test_metrics(run_dir, line):
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[2] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"line 3 of .*metrics\.jsonl is damaged; remove that line"):
        _train(run_dir)


# What Orbax's threads do with the rest of a broken read is not ours to change.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("file", ["state/_METADATA", "state/manifest.ocdbt"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_checkpoint(run_dir, file, damage):
    path = run_dir / "checkpoints" / "60" / file
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match=r"checkpoints/60 is damaged .*step 56 is taken"):
        assert evaluate(run_dir, progress=False).step == 56
    assert (run_dir / "checkpoints" / "60").exists()  # a reader removes nothing


def test_training_goes_on_from_the_checkpoint_before(run_dir):
    (run_dir / "summary.json").unlink()
    (run_dir / "checkpoints" / "60" / "window" / "metadata").write_text("{")
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.warns(UserWarning, match=r"checkpoints/60 is damaged .*step 56 is taken"):
        result = _train(run_dir)
    assert result.step == 60
    assert not result.already_finished
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_readable_checkpoint(run_dir):
    (run_dir / "summary.json").unlink()
    for checkpoint in (run_dir / "checkpoints").iterdir():
        (checkpoint / "state" / "_METADATA").unlink()
    with pytest.raises(UserError, match=r"checkpoints/60 is damaged .*no other can be read"):
        _train(run_dir)


def test_a_removed_bundle_is_written_again(run_dir):
    manifest = json.loads((run_dir / "bundle" / "bundle.json").read_text())
    shutil.rmtree(run_dir / "bundle")
    assert _train(run_dir).already_finished
    again = json.loads((run_dir / "bundle" / "bundle.json").read_text())
    name = "item_embeddings.npy"
    assert again["files"][name] == manifest["files"][name]
    assert again["model"] == manifest["model"]
