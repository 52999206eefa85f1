"""What users of such systems trip over, as far as the data layer answers it.

The numbers are those of the list of user wishes; each test states the right behaviour.
"""

import tracemalloc
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from store_cases import Options, distinct_store, tiny_store

from recmodels._src.data import raw, sequences
from recmodels._src.data.pipeline import evaluation_batches, train_batches, training_window_lengths
from recmodels._src.data.prepare import prepare
from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore

PROTOCOLS = ["next-8", "leave-one-out"]


def _epoch(store, options):
    batches = train_batches(store, options)
    num_batches = -(-len(training_window_lengths(store, options)) // options.batch_size)
    return [next(batches) for _ in range(num_batches)]


@pytest.mark.parametrize(
    "ids",
    [[5, 10**18, 0], ["B000123", "ä", "a b"], [2**63 - 1, 3, 2**40]],
    ids=["sparse", "text", "64 bit"],
)
def test_point_1_any_ids(tmp_path, ids):
    # Any ids go in, rows are dense, and the map back is kept with the data.
    events = pl.DataFrame({"u": [ids[0]] * 3 + [ids[2]] * 2, "i": [*ids, ids[1], ids[0]]})
    events.write_parquet(tmp_path / "a.parquet")
    prepare(tmp_path / "a.parquet", tmp_path / "s", format="parquet", user="u", item="i")
    store = SequenceStore.open(tmp_path / "s")
    assert sorted(set(store.items.tolist())) == [1, 2, 3]
    users = store.user_ids().tolist()
    histories = [store.item_ids()[store.sequence(user) - 1].tolist() for user in range(2)]
    assert dict(zip(users, histories, strict=True)) == {ids[0]: ids, ids[2]: [ids[1], ids[0]]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_point_2_padding_is_never_an_item_or_a_target(tmp_path, protocol):
    store = tiny_store(tmp_path / "s", [[1, 2], [1] * 40, list(range(1, 31)), [2]])
    assert store.items.min() == 1
    for batch in _epoch(store, Options(protocol=protocol)):
        assert not (batch["targets"] == 0).any()
        # Padded positions ask for nothing, real ones for at least one item.
        np.testing.assert_array_equal((batch["targets"] != -1).any(-1), batch["history"] != 0)
        # Padding is on the left only.
        assert (np.diff((batch["history"] != 0).astype(int), axis=1) >= 0).all()
    for part in ("dev", "test"):
        for batch in evaluation_batches(store, Split(protocol), part, 8, 4):
            assert not (batch["targets"] == 0).any()
            assert not (batch["seen"] == 0).any()


def test_point_3_equal_times_keep_the_order_of_the_file(tmp_path):
    rng = np.random.default_rng(0)
    user, item, time = rng.integers(0, [[9], [1000], [4]], (3, 2_000))
    events = pl.DataFrame({"u": user, "i": item, "t": time})
    for name in ("first", "again"):
        events.write_csv(tmp_path / "a.csv")
        prepare(tmp_path / "a.csv", tmp_path / name, format="csv", user="u", item="i", time="t")
    store = SequenceStore.open(tmp_path / "first")
    for row, user_id in enumerate(store.user_ids()):
        own = [(t, i) for u, i, t in events.rows() if u == user_id]
        expected = [i for _, i in sorted(own, key=lambda pair: pair[0])]
        assert store.item_ids()[store.sequence(row) - 1].tolist() == expected
    assert store.digest == SequenceStore.open(tmp_path / "again").digest


def test_point_3_equal_times_keep_the_order_however_the_file_is_cut(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    user, item, time = rng.integers(0, [[9], [1000], [4]], (3, 2_000))
    events = pl.DataFrame({"u": user, "i": item, "t": time})
    events.write_csv(tmp_path / "a.csv")
    columns = {"format": "csv", "user": "u", "item": "i", "time": "t"}
    prepare(tmp_path / "a.csv", tmp_path / "whole", **columns)
    monkeypatch.setattr(raw, "CHUNK_EVENTS", 300)
    monkeypatch.setattr(sequences, "PART_EVENTS", 150)
    prepare(tmp_path / "a.csv", tmp_path / "pieces", **columns)
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "pieces" / path.name).read_bytes()


@pytest.mark.parametrize(("protocol", "minimum"), [("next-8", 27), ("leave-one-out", 3)])
def test_point_4_short_users_are_counted_and_trained_on(tmp_path, protocol, minimum):
    lengths = [1, 2, 3, 4, 26, 27, 60]
    store = distinct_store(tmp_path / "s", lengths)
    split = Split(protocol)
    evaluated = {
        int(user)
        for batch in evaluation_batches(store, split, "test", 8, 4)
        for user in batch["user"]
    } - {-1}
    assert evaluated == {user for user, n in enumerate(lengths) if n >= minimum}
    trained = {
        int(row) for b in _epoch(store, Options(protocol=protocol)) for row in b["history"].flat
    }
    for user, n in enumerate(lengths):
        if 2 <= n < minimum:  # every item but the last is an input, the last is a target
            assert trained.issuperset(store.sequence(user)[:-1].tolist())
    (tmp_path / "lines").write_text("\n".join(" ".join(["7"] * (n + 1)) + f" {n}" for n in lengths))
    report = prepare(tmp_path / "lines", tmp_path / "s2", format="user-lines")
    assert str(minimum) in str(report)
    assert protocol in str(report)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_point_6_no_target_is_in_its_input_or_in_training(tmp_path, protocol):
    # Every event has an item of its own, so any leak shows as a common value.
    store = distinct_store(tmp_path / "s", [3, 5, 9, 18, 26, 27, 28, 35, 44, 90, 200])
    split = Split(protocol)
    trained = set()
    for batch in _epoch(store, Options(protocol=protocol, max_length=16)):
        for history, targets in zip(batch["history"], batch["targets"], strict=True):
            for j, row in enumerate(history):
                own = set(targets[j].tolist()) - {-1}
                # A target is later than its input and than all of the window up to it.
                assert not own.intersection(history[: j + 1].tolist())
                trained |= own | ({int(row)} if row else set())
    held_out = {"dev": set(), "test": set()}
    for part, rows in held_out.items():
        for batch in evaluation_batches(store, split, part, 16, 4):
            for history, targets, seen in zip(
                batch["history"], batch["targets"], batch["seen"], strict=True
            ):
                own = set(targets.tolist()) - {-1}
                assert not own & set(history.tolist())
                assert not own & set(seen.tolist())
                assert not own or set(history.tolist()) - {0} <= set(seen.tolist())
                rows |= own
    assert held_out["dev"]
    assert held_out["test"]
    assert not held_out["dev"] & held_out["test"]
    assert not trained & (held_out["dev"] | held_out["test"])


def test_point_9_windows_are_views_not_copies(tmp_path):
    # One copy per prefix of 200 items would be 80 MB here, one per window 0.8 MB.
    store = distinct_store(tmp_path / "s", [1_000] * 100)
    tracemalloc.start()
    batches = train_batches(store, Options(max_length=200, batch_size=4))
    next(batches)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 400_000


def test_point_9_preparation_makes_no_python_objects_per_event(tmp_path):
    # NumPy arrays are counted here, polars columns are not; a Python int per event would be
    # 28 bytes for each of user, item and time on top.
    num_events = 200_000
    rng = np.random.default_rng(0)
    pl.DataFrame(
        {"u": rng.integers(0, 500, num_events), "i": rng.integers(0, 900, num_events),
         "t": rng.integers(0, 10**6, num_events)}
    ).write_csv(tmp_path / "a.csv")  # fmt: skip
    tracemalloc.start()
    prepare(tmp_path / "a.csv", tmp_path / "s", format="csv", user="u", item="i", time="t")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 60 * num_events
    assert SequenceStore.open(tmp_path / "s").num_interactions == num_events


def _peak_bytes_of_preparing(path: Path, out: Path) -> int:
    tracemalloc.start()
    prepare(path, out, format="parquet", user="u", item="i", time="t")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak_bytes


def test_point_9_memory_does_not_grow_with_the_number_of_events(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "CHUNK_EVENTS", 10_000)
    monkeypatch.setattr(sequences, "PART_EVENTS", 10_000)
    rng, peaks = np.random.default_rng(0), []
    for num_events in (40_000, 400_000):
        columns = {name: rng.integers(0, high, num_events) for name, high in
                   (("u", 500), ("i", 900), ("t", 10**6))}  # fmt: skip
        path = tmp_path / f"{num_events}.parquet"
        pl.DataFrame(columns).write_parquet(path)
        peaks.append(_peak_bytes_of_preparing(path, tmp_path / f"s{num_events}"))
    assert peaks[1] < 1.5 * peaks[0]


def test_point_13_a_grown_catalog_keeps_the_rows_of_known_items(tmp_path):
    (tmp_path / "old").write_text("u m\nu b\nv x\n")
    (tmp_path / "new").write_text("u m\nu a\nw x\nw z\nw a\n")
    prepare(tmp_path / "old", tmp_path / "s1", format="pairs")
    prepare(tmp_path / "new", tmp_path / "s2", format="pairs", ids_from=tmp_path / "s1")
    old, new = (SequenceStore.open(tmp_path / name) for name in ("s1", "s2"))
    # "b" did not occur again and keeps its row all the same; new items come after.
    assert old.item_ids().tolist() == ["b", "m", "x"]
    assert new.item_ids().tolist() == ["b", "m", "x", "a", "z"]
    assert [new.sequence(user).tolist() for user in range(2)] == [[2, 4], [3, 5, 4]]
    assert pl.read_parquet(tmp_path / "s2" / "items.parquet")["count"].to_list() == [0, 1, 1, 2, 1]
    assert new.meta["source"]["ids_from"] == old.digest
    # And once more, over what was grown already.
    (tmp_path / "third").write_text("u A\n")
    prepare(tmp_path / "third", tmp_path / "s3", format="pairs", ids_from=tmp_path / "s2")
    third = SequenceStore.open(tmp_path / "s3")
    assert third.item_ids().tolist() == ["b", "m", "x", "a", "z", "A"]


def test_point_10_data_position_is_part_of_the_state(tmp_path):
    store = distinct_store(tmp_path / "s", [50, 60, 70, 10])
    unbroken = train_batches(store, Options(max_length=7))
    for _ in range(11):
        next(unbroken)
    resumed = train_batches(store, Options(max_length=7))
    resumed.set_state(unbroken.get_state())
    for _ in range(11):
        np.testing.assert_array_equal(next(unbroken)["history"], next(resumed)["history"])
