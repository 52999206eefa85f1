"""What is asked for, what it comes to, and which combinations are refused."""

import dataclasses

import pytest

from recserve import ScannSizes, SearcherConfig, UserError, derive_scann_sizes, plan_searcher


@pytest.mark.parametrize("num_items", [1, 16, 17, 1000, 20_000, 54_542, 876_938, 10_000_000])
@pytest.mark.parametrize("vector_dim", [1, 2, 33, 257])
def test_derived_sizes_fit_every_catalog(num_items, vector_dim):
    sizes = derive_scann_sizes(num_items, vector_dim)
    assert 1 <= sizes.leaves_to_search <= sizes.num_leaves <= sizes.training_sample_size
    assert sizes.training_sample_size <= num_items
    assert 1 <= sizes.reorder <= num_items
    assert 1 <= sizes.dimensions_per_block <= vector_dim


def test_derived_sizes_are_pinned():
    # Changing them changes recall and latency of every index folder: measure before editing.
    assert derive_scann_sizes(20_000, 65) == ScannSizes(141, 70, 500, 20_000, 2, 0.2)
    assert derive_scann_sizes(1_000, 65) == ScannSizes(32, 32, 250, 1_000, 2, 0.2)
    assert derive_scann_sizes(876_938, 257) == ScannSizes(936, 133, 500, 250_000, 2, 0.2)


@pytest.mark.parametrize(
    ("config", "num_items", "problem", "kind"),
    [
        (SearcherConfig(), 19_999, None, "exact"),
        (SearcherConfig(), 20_000, None, "scann"),
        (SearcherConfig(), 20_000, "ScaNN is not installed", "exact"),
        (SearcherConfig(exact_below=100), 100, None, "scann"),
        (SearcherConfig(exact_below=100), 99, None, "exact"),
        (SearcherConfig(searcher="scann"), 16, None, "scann"),
        (SearcherConfig(searcher="exact"), 1_000_000, None, "exact"),
    ],
)
def test_choice_of_searcher(config, num_items, problem, kind):
    plan = plan_searcher(config, num_items, 33, problem)
    assert plan.kind == kind
    assert (plan.scann is not None) == (kind == "scann")


def test_every_size_can_be_overridden():
    wanted = ScannSizes(50, 7, 90, 700, 3, 0.3)
    config = SearcherConfig(searcher="scann", **dataclasses.asdict(wanted))
    assert plan_searcher(config, 1000, 33, None).scann == wanted


def test_fewer_leaves_keep_the_searched_share():
    sizes = plan_searcher(SearcherConfig(searcher="scann", num_leaves=10), 20_000, 33, None).scann
    assert sizes is not None
    assert sizes.leaves_to_search == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"searcher": "faiss"}, "`searcher` must be one of auto, scann, exact; got 'faiss'"),
        ({"num_leaves": 0}, "`num_leaves` must be a whole number, at least 1; got 0"),
        ({"reorder": 2.5}, "`reorder` must be a whole number, at least 1; got 2.5"),
        ({"reorder": True}, "`reorder` must be a whole number, at least 1; got True"),
        ({"exact_below": -1}, "`exact_below` must be a whole number, at least 0; got -1"),
        ({"anisotropic_threshold": 1.0}, "`anisotropic_threshold` must be between 0 and 1; got 1"),
        ({"anisotropic_threshold": float("nan")}, "must be between 0 and 1; got nan"),
        ({"searcher": "exact", "exact_below": 5}, "`exact_below` only applies to searcher 'auto'"),
    ],
)
def test_bad_field_is_refused_at_construction(fields, message):
    with pytest.raises(UserError) as error:
        SearcherConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_leaves": 10, "leaves_to_search": 11}, "`leaves_to_search` must be at most the 10"),
        ({"num_leaves": 99, "training_sample_size": 98}, "`num_leaves` must be at most the 98"),
        ({"training_sample_size": 1001}, "at most the 1,000 items; got 1,001"),
        ({"training_sample_size": 15, "num_leaves": 3}, "`training_sample_size` must be at least"),
        ({"reorder": 1001}, "`reorder` must be at most the 1,000 items; got 1,001"),
        ({"dimensions_per_block": 34}, "`dimensions_per_block` must be at most the 33 dimensions"),
    ],
)
def test_sizes_that_do_not_fit_the_catalog_are_refused(fields, message):
    with pytest.raises(UserError) as error:
        plan_searcher(SearcherConfig(searcher="scann", **fields), 1000, 33, None)
    assert message in str(error.value)


def test_scann_needs_sixteen_items():
    with pytest.raises(UserError, match="at least 16 items; the catalog has 15"):
        plan_searcher(SearcherConfig(searcher="scann"), 15, 33, None)


@pytest.mark.parametrize("fields", [{}, {"searcher": "exact"}])
def test_scann_size_is_never_ignored(fields):
    with pytest.raises(UserError, match="`reorder` applies to ScaNN only, but exact search"):
        plan_searcher(SearcherConfig(reorder=50, **fields), 1000, 33, None)


def test_explicit_scann_does_not_fall_back():
    with pytest.raises(UserError, match="no wheel"):
        plan_searcher(SearcherConfig(searcher="scann"), 30_000, 33, "no wheel")
