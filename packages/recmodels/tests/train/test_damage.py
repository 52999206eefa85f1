"""A damaged file of a run gives one line that names it."""

import json
import shutil
import warnings

import pytest
from train_cases import chain_store, finished_run, small_recipe

from recmodels import UserError, compare, evaluate, recommend, train, write_report
from recmodels._src.cli import main


@pytest.fixture
def run_dir(tmp_path):
    _, result = finished_run()
    shutil.copytree(result.run_dir, tmp_path / "run")
    return tmp_path / "run"


def _train(run_dir):
    store, _ = finished_run()
    return train(small_recipe(num_steps=60), store, run_dir, progress=False)


def _set(run_dir, field, value):
    """Edits one field of config.json, such as "store.path"; None removes it."""
    config = section = json.loads((run_dir / "config.json").read_text())
    *sections, name = field.split(".")
    for each in sections:
        section = section[each]
    section[name] = value
    if value is None:
        del section[name]
    (run_dir / "config.json").write_text(json.dumps(config))


CONFIGS = {
    "not utf-8": (b"\xff\xfe{", "can't decode byte"),
    "no JSON": (b"{", "Expecting property name"),
    "list": (b"[]", "the whole is no JSON object"),
    "no digest": ("store.digest", None, "`store.digest` is missing"),
    "no path": ("store.path", None, "`store.path` is missing"),
    "number as path": ("store.path", 3, "`store.path` is 3, not a text"),
    "word as size": ("store.num_items", "many", "`store.num_items` is 'many', not a positive in"),
    "negative size": ("store.num_items", -1, "`store.num_items` is -1, not a positive integer"),
    "small table": ("table_rows", 7, "`table_rows` is 7; `store.num_items` 40 needs at least 41"),
    "no recipe": ("recipe", None, "`recipe` is missing"),
    "list as recipe": ("recipe", [], "`recipe` is no JSON object"),
    "field without default": ("recipe.protocol", None, "`recipe.protocol` is missing"),
    "unknown recipe field": ("recipe.hiden_dim", 8, "`recipe.hiden_dim` is no field of it"),
    "unknown field": ("tabel_rows", 8, "`tabel_rows` is no field of it"),
    "bad value": ("recipe.dropout", 2.0, "`dropout` must be at least 0 and below 1; got 2.0"),
    "number as source": ("start_from", 3, "`start_from` is 3, no path"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(run_dir, capsys, name):
    *damage, message = CONFIGS[name]
    if len(damage) == 1:
        (run_dir / "config.json").write_bytes(damage[0])
    else:
        _set(run_dir, *damage)
    assert main(["evaluate", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert f"{run_dir / 'config.json'} is damaged (" in error
    assert message in error
    assert error.count("\n") == 1


# field of config.json, its new value, and what the message says of it
EDITS = (
    ("recipe.hidden_dim", 16, r"`recipe\.hidden_dim` is 16, in checkpoint .*60 8;"),
    ("recipe.hidden_dim", None, r"`recipe\.hidden_dim` is 64, in checkpoint .*60 8;"),
    ("recipe.num_layers", 2, r"`recipe\.num_layers` is 2, in checkpoint .*60 1;"),
    ("recipe.max_length", 9, r"`recipe\.max_length` is 9, in checkpoint .*60 8;"),
    # Arrays of the same shapes, with another meaning.
    ("recipe.num_heads", 4, r"`recipe\.num_heads` is 4, in checkpoint .*60 2;"),
    ("recipe.ema_decay", 0.5, r"shape of `average\.\S+` is \[.*\], in checkpoint .*60 absent;"),
    ("table_rows", 64, r"`params\.item_embeddings` is \[64, 8\], in checkpoint .*60 \[41, 8\];"),
)


@pytest.mark.parametrize(("field", "value", "message"), EDITS)
def test_an_edited_config_does_not_pass_for_damage(run_dir, field, value, message):
    _set(run_dir, field, value)
    with pytest.raises(
        UserError, match=r"config\.json does not fit what was trained: .*" + message
    ):
        evaluate(run_dir, progress=False)


def test_checkpoints_of_other_versions_record_no_fields(run_dir):
    window = run_dir / "checkpoints" / "60" / "window" / "metadata"
    content = json.loads(window.read_text())
    assert content.pop("trained")["recipe.hidden_dim"] == 8
    window.write_text(json.dumps(content))
    assert evaluate(run_dir, baselines="none", progress=False).step == 60
    _set(run_dir, "recipe.hidden_dim", 16)
    with pytest.raises(
        UserError, match=r"the shape of `params\.\S+` is \[.*16.*\], in checkpoint "
    ):
        evaluate(run_dir, progress=False)


@pytest.mark.parametrize("name", ["num_users", "num_items", "num_interactions"])
def test_recorded_counts_that_the_store_does_not_have(run_dir, name):
    store, _ = finished_run()
    was = json.loads((run_dir / "config.json").read_text())["store"][name]
    _set(run_dir, "table_rows", 64)
    _set(run_dir, f"store.{name}", was + 1)
    message = rf"config\.json of .* `store\.{name}` is {was + 1} there, the store has {was};"
    uses = (
        lambda: evaluate(run_dir, progress=False),
        lambda: recommend(run_dir, progress=False),
        lambda: compare(finished_run()[1].run_dir, run_dir, progress=False),
        lambda: write_report(run_dir, progress=False),
        lambda: _train(run_dir),
    )
    for use in uses:
        with pytest.raises(UserError, match=message):
            use()
    assert store.num_items == 40


def test_another_store(run_dir, tmp_path):
    other = chain_store(tmp_path / "other", seed=1)
    message = r"other \(61 users, 40 items, digest \w{12}\) is not the store that .*run was trained"
    for use in (evaluate, recommend, write_report):
        with pytest.raises(UserError, match=message):
            use(run_dir, store=other, progress=False)
    with pytest.raises(UserError, match=message):
        train(small_recipe(num_steps=60), other, run_dir, progress=False)


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


@pytest.mark.parametrize(
    "line",
    [
        *(b"garbage", b"{}", b"\xff\xff", b'{"step": 4, "split": "train"}'),
        *(b'{"step": 4, "split": "train", "loss": "x"}', b'{"step": 4, "split": []}'),
    ],
)
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "flipped"])
def test_any_file_of_a_checkpoint(run_dir, damage, capfd):
    """Each file of the newest checkpoint in turn: the one before it, or it is as good as before."""
    whole = evaluate(run_dir, baselines="none", progress=False)
    folder = run_dir / "checkpoints" / "60"
    num_taken = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.unlink()
        if damage != "removed":
            path.write_bytes(_damaged(content, damage))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = evaluate(run_dir, baselines="none", progress=False)
        if found.step == 60:  # Orbax does not need every file
            assert found.model == whole.model, path
        else:
            assert found.step == 56
            assert any("checkpoints/60 is damaged (" in str(each.message) for each in caught), path
            num_taken += 1
        path.write_bytes(content)
    assert num_taken >= 3, "the files of the arrays at least"
    assert "Traceback" not in capfd.readouterr().err


def _damaged(content, damage):
    if damage == "flipped":
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return content[: len(content) // 2] if damage == "cut" else b""


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


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda bundle: (bundle / "item_embeddings.npy").unlink(),
        lambda bundle: (bundle / "users.parquet").write_bytes(b"PAR1"),
        lambda bundle: (bundle / "bundle.json").write_text("{}"),
        lambda bundle: (bundle / "bundle.json").write_text("["),
    ],
)
def test_a_damaged_bundle_is_written_again(run_dir, damage):
    manifest = json.loads((run_dir / "bundle" / "bundle.json").read_text())
    damage(run_dir / "bundle")
    assert _train(run_dir).already_finished
    again = json.loads((run_dir / "bundle" / "bundle.json").read_text())
    name = "item_embeddings.npy"
    assert again["files"][name] == manifest["files"][name]
    assert again["model"] == manifest["model"]
