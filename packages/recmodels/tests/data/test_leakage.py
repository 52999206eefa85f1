"""Nothing that is held out is in a training window or in the input it is held out from.

Every event has an item of its own, so a leak shows as a common item whatever the indexing.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import Options, distinct_store

from recmodels._src.data.pipeline import evaluation_batches, train_batches, training_window_lengths
from recmodels._src.data.splits import Split
from recmodels._src.errors import UserError

PROTOCOLS = ["next-8", "leave-one-out"]
LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=6)


def _held_out(sequence: list[int], protocol: str, num_targets: int) -> dict[str, list[int]]:
    # From the written definition; empty for a user that is too short.
    x, n, width = sequence, len(sequence), num_targets
    if protocol == "next-8":
        if n < 3 * width + 3:
            return {}
        return {"test": x[n - width :], "dev": x[n - 2 * width - 1 : n - width - 1]}
    return {"test": [x[n - 1]], "dev": [x[n - 2]]} if n >= 3 else {}


def _trained_items(store, options, num_ranks) -> set[int]:
    num_windows = len(training_window_lengths(store, options))
    items: set[int] = set()
    for rank in range(num_ranks):
        batches = train_batches(store, options, rank=rank, num_ranks=num_ranks)
        for _ in range(-(-num_windows // options.batch_size)):
            batch = next(batches)
            items.update(batch["history"].ravel().tolist(), batch["targets"].ravel().tolist())
    return items - {0, -1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    lengths=LENGTHS,
    num_targets=st.integers(1, 10),
    max_length=st.integers(1, 30),
    num_ranks=st.sampled_from([1, 2]),
)
def test_no_held_out_item_is_trained_on(
    tmp_path, protocol, lengths, num_targets, max_length, num_ranks
):
    store = distinct_store(tmp_path / "s", lengths)
    options = Options(
        protocol=protocol, num_targets=num_targets, max_length=max_length, batch_size=4
    )
    try:
        trained = _trained_items(store, options, num_ranks)
    except UserError:  # nothing to train on
        return
    kept_back = set()
    for user in range(store.num_users):
        parts = _held_out(store.sequence(user).tolist(), protocol, num_targets)
        kept_back.update(*parts.values())
    assert not trained & kept_back


@pytest.mark.parametrize("part", ["dev", "test"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(lengths=LENGTHS, num_targets=st.integers(1, 10), max_length=st.integers(1, 30))
def test_no_input_holds_its_targets_or_what_comes_later(
    tmp_path, protocol, part, lengths, num_targets, max_length
):
    store = distinct_store(tmp_path / "s", lengths)
    held_out = {
        user: _held_out(store.sequence(user).tolist(), protocol, num_targets)
        for user in range(store.num_users)
    }
    expected = {user for user, parts in held_out.items() if parts}
    if not expected:
        return
    found = set()
    for batch in evaluation_batches(store, Split(protocol, num_targets), part, max_length, 3):
        for k in np.flatnonzero(batch["user"] >= 0):
            user = int(batch["user"][k])
            found.add(user)
            assert batch["targets"][k].tolist() == held_out[user][part]
            known = set(batch["history"][k].tolist()) | set(batch["seen"][k].tolist())
            later = set(range(held_out[user][part][0], int(store.items.max()) + 1))
            assert not (known - {0, -1}) & later  # items count up with time
    assert found == expected
