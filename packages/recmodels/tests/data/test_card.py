"""The dataset card against slow, plain definitions."""

import argparse
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import slow_evaluation, slow_training_pairs, tiny_store

from recmodels._src import page
from recmodels._src.data import card as card_module
from recmodels._src.data.card import describe
from recmodels._src.data.cli import add_describe_parser
from recmodels._src.data.prepare import prepare
from recmodels._src.errors import UserError


def _run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    add_describe_parser(parser.add_subparsers())
    args = parser.parse_args(["describe", *map(str, arguments)])
    return args.run(args)


def _slow_unseen_share(sequences, protocol) -> float:
    minimum = {"next-8": 27, "leave-one-out": 3}[protocol]
    trained, targets = set(), []
    for sequence in sequences:
        for item, following in slow_training_pairs(sequence, protocol):
            trained |= {item, *following}
        if len(sequence) >= minimum:
            targets += slow_evaluation(sequence, protocol, "test")[1]
    return np.mean([item not in trained for item in targets]) if targets else 0.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    sequences=st.lists(
        st.lists(st.integers(1, 30), min_size=1, max_size=45), min_size=1, max_size=8
    ),
    block=st.sampled_from([1, 7, 10_000]),
)
def test_card_equals_its_definition(tmp_path, sequences, block):
    store = tiny_store(tmp_path / "s", sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_module, "_BLOCK_EVENTS", block)
        card = describe(store)
    flat = [row for sequence in sequences for row in sequence]
    pairs = sum(len(set(sequence)) for sequence in sequences)
    assert (card.num_users, card.num_interactions) == (len(sequences), len(flat))
    assert card.num_items == max(flat)
    assert card.density == pytest.approx(pairs / (len(sequences) * max(flat)))
    assert card.repeats_share == pytest.approx(1 - pairs / len(flat))
    lengths = [len(sequence) for sequence in sequences]
    assert card.lengths["mean"] == pytest.approx(np.mean(lengths))
    assert (card.lengths["min"], card.lengths["max"]) == (min(lengths), max(lengths))
    assert card.item_counts["max"] == max(flat.count(row) for row in flat)
    assert sum(users for _, _, users in card.length_bins) == len(sequences)
    for low, high, num_users in card.length_bins:
        assert num_users == sum(low <= n <= high for n in lengths)
    for protocol, share in card.evaluation.items():
        assert share.num_users == sum(n >= share.min_length for n in lengths)
        expected = _slow_unseen_share(sequences, protocol)
        assert share.unseen_targets_share == pytest.approx(expected)
    assert (card.ties_share, card.first_timestamp) == (None, None)


@pytest.fixture
def timed_store(tmp_path):
    """Two users with 5 events are left of three with 8."""
    day = 86_400
    rows = [("a", 1, 0), ("a", 2, day), ("a", 1, day), ("c", 1, 0)]
    rows += [("b", 3, day), ("b", 3, day), ("b", 4, 2 * day), ("b", 4, 2 * day)]
    start = 1_600_000_000
    lines = [f"{user},{item},{start + time}" for user, item, time in rows]
    (tmp_path / "<my>.csv").write_text("\n".join(["u,i,t", *lines]))
    prepare(
        tmp_path / "<my>.csv", tmp_path / "s", format="csv", user="u", item="i", time="t",
        min_interactions=2, deduplicate="exact",
    )  # fmt: skip
    return tmp_path / "s"


def test_what_is_printed(timed_store, capsys):
    assert _run(timed_store) == 0
    assert capsys.readouterr().out.splitlines() == [
        "source             <my>.csv",
        "users              2",
        "items              4",
        "interactions       5",
        "density            50.000% of all pairs of user and item",
        "events of a user   2 / 3 / 2.5 / 3 / 3  (min / median / mean / p90 / max)",
        "events of an item  1 / 1 / 1.2 / 2 / 2  (min / median / mean / p90 / max)",
        "top items          1%: 40.0%, 10%: 40.0%",
        "repeats            20.0% of the events, the user had the item before",
        "time               2020-09-13 to 2020-09-15, 2.0 days; 20.0% of the events at the time of "
        "the one before",
        "next-8             0 users to evaluate, 2 shorter than 27",
        "leave-one-out      1 users to evaluate, 1 shorter than 3; 100.0% of the test targets are "
        "never seen in training",
        "filters            deduplicate exact, min_interactions 2",
        "left out           2 x exact duplicate of an earlier event",
        "left out           1 x user with fewer than 2 events",
    ]


def test_python_gives_the_same(timed_store, capsys):
    _run(timed_store)
    card = describe(timed_store)
    assert str(card) + "\n" == capsys.readouterr().out
    assert card.to_dict()["evaluation"]["next-8"]["min_length"] == 27
    assert card.to_dict()["ties_share"] == pytest.approx(0.2)


def test_times_without_a_date_are_not_given_one(tmp_path):
    (tmp_path / "a.csv").write_text("u,i,t\n1,1,5\n1,2,20000000\n")
    prepare(tmp_path / "a.csv", tmp_path / "s", format="csv", user="u", item="i", time="t")
    assert "5 s to 20,000,000 s, 231.5 days" in str(describe(tmp_path / "s"))


def test_page_has_both_plots_and_no_reference_to_other_files(timed_store, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "card.html"
    assert _run(timed_store, "--out", page) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 2
    assert "Users by number of events" in text
    assert "rank of the item, most frequent first" in text
    assert "<td>2 x exact duplicate of an earlier event</td>" in text
    assert "<my>" not in text
    assert "<h1>&lt;my&gt;.csv</h1>" in text
    # Namespaces aside, nothing is fetched.
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith("#") for link in links)
    with pytest.raises(UserError, match=r"card\.html exists already"):
        _run(timed_store, "--out", page)
    before = page.read_bytes()
    assert _run(timed_store, "--out", page, "--overwrite") == 0
    assert page.read_bytes() == before


def test_page_without_matplotlib(timed_store, tmp_path, monkeypatch):
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r'needs matplotlib; .* `pip install "recmodels\[report\]"`'
    ):
        _run(timed_store, "--out", tmp_path / "card.html")
    assert not (tmp_path / "card.html").exists()
    assert _run(timed_store) == 0


def test_overwrite_alone_says_what_it_needs(timed_store):
    with pytest.raises(UserError, match="--overwrite needs --out"):
        _run(timed_store, "--overwrite")


def test_no_store(tmp_path):
    with pytest.raises(UserError, match="is not a sequence store"):
        _run(tmp_path)
