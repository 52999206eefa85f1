"""The smoke test passes on good packages and notices bad ones."""

import sys
from pathlib import Path

import pytest
import smoke_test
from smoke_test import SmokeTestFailedError


def test_cutbce_ops_passes(capsys):
    smoke_test.check_import_time()
    smoke_test.check_imported_modules()
    smoke_test.check_operators()
    assert "loss, gradient and top-k: right" in capsys.readouterr().out


def test_a_slow_import_fails():
    with pytest.raises(SmokeTestFailedError, match="more than 0"):
        smoke_test.check_import_time("decimal", limit_s=0.0)


def test_another_library_fails():
    with pytest.raises(SmokeTestFailedError, match=r"import polars loads .*polars"):
        smoke_test.check_imported_modules("polars")


def test_a_source_tree_fails(tmp_path, monkeypatch):
    (tmp_path / "not_installed.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SmokeTestFailedError, match="not_installed comes from"):
        smoke_test.check_installed("not_installed")
    smoke_test.check_installed("pytest")


def test_a_wrong_gradient_fails(monkeypatch):
    import cutbce_ops

    right = cutbce_ops.cut_binary_cross_entropy
    monkeypatch.setattr(cutbce_ops, "cut_binary_cross_entropy", lambda *args: 1.01 * right(*args))
    with pytest.raises(AssertionError):
        smoke_test.check_operators()


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!{sys.executable}\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_commands_that_are_missing_fail_or_answer_nonsense(tmp_path):
    with pytest.raises(SmokeTestFailedError, match="recmodels is missing"):
        smoke_test.run_commands(tmp_path, tmp_path)
    _script(tmp_path / "recmodels", "import sys; sys.exit('error: no')")
    with pytest.raises(SmokeTestFailedError, match="exits with 1:\nerror: no"):
        smoke_test.run_commands(tmp_path, tmp_path)
    _script(tmp_path / "recmodels", "")
    _script(tmp_path / "recserve", "print('{\"item_ids\": [1, 1]}')")
    with pytest.raises(SmokeTestFailedError, match="must give 8 items"):
        smoke_test.run_commands(tmp_path, tmp_path)
    _script(tmp_path / "recserve", "print('{\"item_ids\": [1, 2, 3, 4, 5, 6, 7, 8]}')")
    smoke_test.run_commands(tmp_path, tmp_path)


def test_usage(capsys):
    assert smoke_test.main(["everything"]) == 2
    assert capsys.readouterr().err == "error: the only argument is ops-alone or all\n"
