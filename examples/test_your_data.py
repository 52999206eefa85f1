"""The commands of docs/your-data.md do what the page says, word for word."""

# ruff: noqa: D103 - the name of a test says what it shows

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import recmodels

PAGE = Path(__file__).parent.parent / "docs" / "your-data.md"
NUM_CUSTOMERS, NUM_PRODUCTS, LENGTH = 80, 60, 36


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def _product(number: int) -> str:
    return f"product {number % NUM_PRODUCTS:02}"


def _write(path: Path, *, first: int = 0, length: int = LENGTH) -> None:
    # Everybody goes round the same products, so what comes next is no secret.
    lines = ["customer,product,bought_at,price"]
    for customer in range(NUM_CUSTOMERS):
        for k in range(first, first + length):
            lines.append(f"c{customer},{_product(customer + k)},{1714032000 + 60 * k},9.99")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    script = Path(sys.executable).with_name(program)  # of this environment
    done = subprocess.run([script, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> tuple[Path, str]:
    """The folder in which the two commands ran, and what they printed."""
    folder = tmp_path_factory.mktemp("user")
    _write(folder / "my.csv")
    commands = _blocks("sh")[0].splitlines()
    assert len(commands) == 2  # the promise of the page
    return folder, "".join(_run(command, folder) for command in commands)


def test_two_commands_from_file_to_recommendations(shown):
    folder, printed = shown
    with (folder / "run" / "recommendations.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["user_id", "rank", "item_id"]
    assert len(rows) == NUM_CUSTOMERS * 10
    lists: dict[str, list[str]] = {}
    for row in rows:
        lists.setdefault(row["user_id"], []).append(row["item_id"])
    num_right = 0
    for customer in range(NUM_CUSTOMERS):
        products = lists[f"c{customer}"]
        had = {_product(customer + k) for k in range(LENGTH)}
        assert len(set(products)) == 10
        assert not had & set(products)
        num_right += _product(customer + LENGTH) in products
    assert num_right > 0.8 * NUM_CUSTOMERS  # by chance 10 of the 24 left: 0.42
    assert f"recommendations for {NUM_CUSTOMERS} users: run/recommendations.csv" in printed
    assert f"  c0: {', '.join(lists['c0'])}" in printed


def test_next_file_keeps_the_rows(shown):
    folder, _ = shown
    _write(folder / "next.csv", first=LENGTH, length=5)
    with (folder / "next.csv").open("a", encoding="utf-8") as file:
        file.write("c0,a new one,1814032000,1.00\n")
    assert len(_blocks("sh")[1].splitlines()) == 1
    _run(_blocks("sh")[1].strip(), folder)
    old, new = (recmodels.SequenceStore.open(folder / name) for name in ("store", "store-2"))
    assert new.item_ids().tolist() == [*old.item_ids().tolist(), "a new one"]


def test_a_grown_catalog_goes_on_to_be_served(shown):
    folder, _ = shown
    _write(folder / "grown.csv", length=LENGTH + 1)
    with (folder / "grown.csv").open("a", encoding="utf-8") as file:
        file.writelines(f"c{n},a new one,1814032000,1.00\n" for n in range(NUM_CUSTOMERS))
    columns = "--format csv --user customer --item product --time bought_at"
    _run(f"recmodels prepare grown.csv {columns} --ids-from store --out store-3", folder)
    train = "recmodels train --recipe sasrec-demo --num-steps 2 --data store-3 --out run-3"
    _run(f"{train} --start-from run", folder)
    _run("recserve build run-3/bundle --out index-3", folder)
    history = ",".join(_product(k) for k in range(10))
    found = json.loads(_run(f"recserve query index-3 --history '{history}' -k 10 --json", folder))
    assert _product(10) in found["item_ids"]  # learned by the old run
    all_items = f"recserve query index-3 --history 'a new one' -k {NUM_PRODUCTS + 1} --json"
    items = json.loads(_run(f"{all_items} --include-seen", folder))["item_ids"]
    assert sorted(items) == sorted([*map(_product, range(NUM_PRODUCTS)), "a new one"])


def test_departments(shown):
    folder, _ = shown
    pairs = [f"{_product(number)},department {number % 5}" for number in range(NUM_PRODUCTS)]
    text = "\n".join(["product,department", *pairs, ""])
    (folder / "products.csv").write_text(text, encoding="utf-8")
    assert "categories      5; 0 items have none" in _run(_blocks("sh")[2].strip(), folder)


def test_describe_as_the_page_says(shown):
    folder, _ = shown
    (command,) = set(re.findall(r"`(recmodels describe store)`", PAGE.read_text(encoding="utf-8")))
    assert f"users              {NUM_CUSTOMERS}" in _run(command, folder)


def test_python_of_the_page_compiles_and_names_what_exists():
    (code,) = _blocks("python")
    compile(code, "your-data.md", "exec")
    for name in re.findall(r"recmodels\.(\w+)\(", code):
        assert callable(getattr(recmodels, name))
