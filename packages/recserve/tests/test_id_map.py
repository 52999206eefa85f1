"""Raw ids to positions and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve._src.catalog import IdMap
from recserve._src.errors import UserError

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def int_map(ids):
    """Returns a map of numbers."""
    return IdMap(np.array(ids, dtype=np.int64), "int64", "item id")


def string_map(ids):
    """Returns a map of strings."""
    array = np.empty(len(ids), dtype=object)
    array[:] = ids
    return IdMap(array, "string", "item id")


@settings(derandomize=True, deadline=None)
@given(ids=st.lists(INT64, unique=True), others=st.lists(INT64))
def test_numbers_round_trip_in_any_order(ids, others):
    id_map = int_map(ids)
    assert id_map.positions(ids).tolist() == list(range(len(ids)))
    assert id_map.ids(np.arange(len(ids))) == tuple(ids)
    wanted = [ids.index(other) if other in ids else -1 for other in others]
    assert id_map.positions(others).tolist() == wanted


@settings(derandomize=True, deadline=None)
@given(ids=st.lists(TEXT, unique=True), others=st.lists(TEXT))
def test_strings_round_trip_in_any_order(ids, others):
    id_map = string_map(ids)
    assert id_map.positions(ids).tolist() == list(range(len(ids)))
    assert id_map.ids(np.arange(len(ids))) == tuple(ids)
    wanted = [ids.index(other) if other in ids else -1 for other in others]
    assert id_map.positions(others).tolist() == wanted


def test_numpy_numbers_and_arrays_are_ids():
    id_map = int_map([5, 9])
    assert id_map.positions(np.array([9, 5], dtype=np.uint16)).tolist() == [1, 0]
    assert id_map.positions([np.int32(9)]).tolist() == [1]
    assert string_map(["a", "b"]).positions(np.array(["b"])).tolist() == [1]


def test_ids_come_back_as_python_values():
    assert type(int_map([5]).ids(np.array([0]))[0]) is int
    assert type(string_map(["a"]).ids(np.array([0]))[0]) is str


@pytest.mark.parametrize(
    ("id_map", "raw_ids", "message"),
    [
        (int_map([5]), ["5"], "item ids of this model are whole numbers; got '5'"),
        (int_map([5]), [5.0], "item ids of this model are whole numbers; got 5.0"),
        (int_map([5]), [True], "item ids of this model are whole numbers; got True"),
        (int_map([5]), [2**63], "item ids of this model have 64 bits; got 9223372036854775808"),
        (string_map(["5"]), [5], "item ids of this model are strings; got 5"),
        (string_map(["5"]), "5", "item ids must be a sequence of ids; got the text '5'"),
        (int_map([5]), 5, "item ids must be a sequence of ids; got 5"),
    ],
)
def test_ids_of_the_wrong_type_are_refused(id_map, raw_ids, message):
    with pytest.raises(UserError) as error:
        id_map.positions(raw_ids)
    assert message in str(error.value)


def test_text_is_parsed_as_the_model_numbers_its_items():
    assert int_map([5]).parse("-7") == -7
    assert string_map(["5"]).parse(" 5") == " 5"
    with pytest.raises(UserError, match="are whole numbers; got '5x'"):
        int_map([5]).parse("5x")


def test_duplicates_are_found():
    assert int_map([5, 3, 5]).find_duplicate() == 5
    assert string_map(["a", "b", "a"]).find_duplicate() == "a"
    assert int_map([5, 3]).find_duplicate() is None
