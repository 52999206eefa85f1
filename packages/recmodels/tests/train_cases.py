"""A small store with structure worth learning, and recipes that train on it in seconds."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
from store_cases import tiny_store

from recmodels._src.data.store import SequenceStore
from recmodels._src.recipe import Recipe
from recmodels._src.train.loop import TrainResult, train

NUM_ITEMS = 40


def chain_store(path: Path, *, num_users: int = 60, seed: int = 0) -> SequenceStore:
    """Users walk along a ring of items with small steps; some are too short to be evaluated."""
    rng = np.random.default_rng(seed)
    sequences = []
    for user in range(num_users):
        length = 5 if user % 10 == 0 else int(rng.integers(30, 50))
        steps = rng.integers(1, 3, length)
        sequences.append((rng.integers(NUM_ITEMS) + np.cumsum(steps)) % NUM_ITEMS + 1)
    sequences.append([NUM_ITEMS] * 3)  # so that every store has the same catalog
    return tiny_store(path, sequences)


def category_store(path: Path | str) -> SequenceStore:
    """The same walks with times, and up to two of five categories for most items."""
    chains = chain_store(Path(path))
    sequences = [chains.sequence(user) for user in range(chains.num_users)]
    rng = np.random.default_rng(1)
    times = [np.cumsum(rng.integers(0, 100_000, len(each))) for each in sequences]
    categories = [[f"c{row % 5}", f"c{row % 3}"][: row % 4] for row in range(1, NUM_ITEMS + 1)]
    return tiny_store(Path(path), sequences, times=times, categories=categories)


def small_recipe(**values: object) -> Recipe:
    """A model of a few hundred weights."""
    small = Recipe(
        name="small",
        protocol="next-8",
        max_length=8,
        hidden_dim=8,
        num_layers=1,
        num_heads=2,
        batch_size=8,
        num_steps=12,
        learning_rate=1e-2,
        warmup_steps=2,
        hide_seen=False,  # users go round the ring several times
        log_every=2,
        evaluate_every=6,
        checkpoint_every=4,
    )
    return small.override(**values)


@functools.cache
def finished_run() -> tuple[SequenceStore, TrainResult]:
    """A store and a run of `small_recipe` on it, made once for all tests that only read them."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = chain_store(folder / "store")
    return store, train(small_recipe(num_steps=60), store, folder / "run", progress=False)
