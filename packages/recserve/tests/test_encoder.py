"""Histories to query vectors, through the exported encoder."""

import numpy as np
import pytest

from recserve._src.encoder import QueryEncoder
from recserve._src.errors import UserError
from recserve._src.header import BUNDLE, read_manifest


@pytest.fixture
def encoder(bundle):
    """The encoder of the small bundle, which reads four items."""
    header = read_manifest(bundle.path, BUNDLE).header
    return QueryEncoder(bundle.path / "query_encoder.stablehlo", bundle.vectors, header)


def test_only_the_most_recent_items_count(encoder, bundle, toys):
    histories = [np.array(rows) for rows in ([3], [1, 2], [9, 8, 7, 6], [20, 19, 1, 2, 3, 4])]
    wanted = [toys.encode(bundle.vectors, rows) for rows in histories]
    np.testing.assert_allclose(encoder.encode(histories), wanted, rtol=1e-6)


def test_empty_history_is_finite(encoder):
    assert encoder.encode([np.empty(0, np.int32)]).tolist() == [[0, 0, 0, 0, 1]]


def test_no_history_gives_no_query(encoder):
    assert encoder.encode([]).shape == (0, 5)


@pytest.mark.parametrize("num_histories", [1, 2, 8, 9, 64, 65, 130])
def test_any_batch_compiles_for_few_sizes(encoder, bundle, toys, num_histories):
    sizes = set()
    compiled = encoder._compiled()

    def spy(vectors, mask):
        sizes.add(len(vectors))
        return compiled(vectors, mask)

    encoder._call = spy
    rng = np.random.default_rng(3)
    histories = [rng.integers(1, 21, rng.integers(0, 7)) for _ in range(num_histories)]
    wanted = [toys.encode(bundle.vectors, rows) for rows in histories]
    np.testing.assert_allclose(encoder.encode(histories), wanted, rtol=1e-5, atol=1e-6)
    assert sizes <= {1, 8, 64}


def test_second_call_compiles_nothing(encoder, bundle):
    import jax

    encoder.encode([np.array([1])])
    with jax.log_compiles(False), jax.check_tracer_leaks(False):
        before = encoder._compiled()._cache_size()
        for length in range(6):
            encoder.encode([np.ones(length, np.int32)])
        assert encoder._compiled()._cache_size() == before == 1


def test_missing_jax_names_the_install_command(encoder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"jax, which is not installed; pip install jax flatbuffers$"
    ):
        encoder.encode([np.array([1])])


def test_encoder_whose_numbers_are_not_finite(encoder):
    encoder._call = lambda vectors, mask: np.full((len(vectors), 5), np.nan)
    with pytest.raises(UserError, match=r"query_encoder.stablehlo gives query vectors that are n"):
        encoder.encode([np.array([1])])
