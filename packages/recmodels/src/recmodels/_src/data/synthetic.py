"""Generated interactions with structure worth learning, in the published Yambda schema.

The catalog is cut into clusters (genres). A user likes a few of them. A session starts in a
liked cluster or in one related to the last; inside it the next item is usually one of the
few successors of the current item, else a popular item of the cluster, and now and then the
session moves to a related cluster or anywhere. Cluster and item popularity follow Zipf
laws. So popularity alone predicts little, the current cluster a good deal, and the current
item most.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from recmodels._src.errors import UserError

_CLUSTER_SIZE = 100  # items; about the size at which in-cluster popularity still has a tail
_CLUSTER_ZIPF = 0.7  # exponent of cluster popularity
_NUM_LIKED = 4  # clusters a user likes
_NUM_RELATED = 3  # clusters that follow a cluster
_SUCCESSOR_SHARES = (0.5, 0.25, 0.15, 0.1)  # of the successors of an item

# What the next event is; the rest of the probability is a new session.
_FOLLOW = 0.62  # a successor of the current item
_SAME_CLUSTER = 0.2  # a popular item of the cluster
_RELATED = 0.06  # a popular item of a related cluster
_ANYWHERE = 0.03  # an item of any cluster
# (so a session has 1 / 0.09, about 11, events)

_LENGTH_SIGMA = 0.8  # of the log of a user's number of events
_LAST_TIMESTAMP = 26_000_000  # seconds, as in the published data: 300.9 days
_TIME_STEP = 5  # published timestamps are multiples of 5 seconds
_MAX_USER_ID, _MAX_ITEM_ID = 1_000_000, 9_390_623  # published id ranges


class _World(NamedTuple):
    # The catalog: item c * cluster_size + r is the r-th most popular of cluster c.
    cluster_size: np.ndarray  # [num_clusters] int64
    cluster_start: np.ndarray  # [num_clusters] int64
    cluster_cdf: np.ndarray  # [num_clusters] float64: cumulative popularity
    related: np.ndarray  # [num_clusters, _NUM_RELATED] int64
    successors: np.ndarray  # [num_items, len(_SUCCESSOR_SHARES)] int64


def write_synthetic_interactions(
    path: str | Path,
    *,
    num_users: int = 4_000,
    num_items: int = 24_000,
    median_length: int = 80,
    seed: int = 0,
) -> None:
    """Writes generated listens as a Yambda `flat` parquet file.

    Columns, types, order of rows (by uid and timestamp, ties included), sparse ids, 5-second
    timestamps, sessions, and the spread of played ratio and track length are those of the
    published `listens` files. The same arguments give the same events.

    Args:
      path: file to write.
      num_users: users; each has at least 2 events.
      num_items: items of the catalog; the rarest may not occur.
      median_length: median number of events of a user; the mean is about 1.4 times that.
      seed: of all random choices.

    Raises:
      UserError: a size is out of range.
    """
    _check(num_users, num_items, median_length, seed)
    rng = np.random.default_rng(seed)
    world = _make_world(num_items, rng)
    lengths = np.exp(rng.normal(np.log(median_length), _LENGTH_SIGMA, num_users))
    lengths = np.clip(lengths, 2, 30 * median_length).astype(np.int64)
    items, session_start = _walk(world, lengths, rng)
    user = np.repeat(np.arange(num_users), lengths)
    track_length = _round(np.clip(np.exp(rng.normal(np.log(200), 0.35, num_items)), 5, 2495))
    played = _played_pct(len(items), rng)
    timestamp = _timestamps(user, lengths, track_length[items] * played / 100, session_start, rng)
    uid = np.sort(_sparse_ids(num_users, _MAX_USER_ID, rng))
    item_id = _sparse_ids(num_items, _MAX_ITEM_ID, rng)
    frame = pl.DataFrame(
        {
            "uid": uid[user].astype(np.uint32),
            "timestamp": timestamp.astype(np.uint32),
            "item_id": item_id[items].astype(np.uint32),
            "is_organic": (rng.random(len(items)) < 0.5).astype(np.uint8),
            "played_ratio_pct": played.astype(np.uint16),
            "track_length_seconds": track_length[items].astype(np.uint32),
        }
    )
    frame.write_parquet(path, compression="lz4")


def _check(num_users: int, num_items: int, median_length: int, seed: int) -> None:
    bounds = {
        "num_users": (num_users, 1, _MAX_USER_ID // 2),
        "num_items": (num_items, _CLUSTER_SIZE, _MAX_ITEM_ID // 2),
        "median_length": (median_length, 2, 1_000_000),
        "seed": (seed, 0, 2**32 - 1),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise UserError(f"`{name}` must be between {low} and {high}; got {value}")


def _make_world(num_items: int, rng: np.random.Generator) -> _World:
    num_clusters = max(num_items // _CLUSTER_SIZE, 1)
    bounds = np.linspace(0, num_items, num_clusters + 1).astype(np.int64)
    size, start = np.diff(bounds), bounds[:-1]
    weights = np.arange(1, num_clusters + 1) ** -_CLUSTER_ZIPF
    cluster = np.repeat(np.arange(num_clusters), size)[:, None]
    # Successors are popular items of the cluster rather than rare ones, but not only.
    uniform = rng.random((num_items, len(_SUCCESSOR_SHARES)))
    successors = start[cluster] + (size[cluster] * uniform**2).astype(np.int64)
    return _World(
        cluster_size=size,
        cluster_start=start,
        cluster_cdf=np.cumsum(weights) / weights.sum(),
        related=rng.integers(0, num_clusters, (num_clusters, _NUM_RELATED)),
        successors=successors,
    )


def _walk(
    world: _World, lengths: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    # One step of all users at once. Users go from longest to shortest, so that those still
    # active are a prefix.
    order = np.argsort(-lengths, kind="stable")
    num_active = np.searchsorted(-lengths[order], -np.arange(lengths.max()), side="left")
    first = (np.cumsum(lengths) - lengths)[order]
    liked = _any_cluster(world, rng, (len(lengths), _NUM_LIKED))
    cluster = liked[:, 0].copy()
    item = _popular_item(world, cluster, rng)
    items = np.empty(lengths.sum(), dtype=np.int64)
    session_start = np.zeros(lengths.sum(), dtype=bool)
    session_start[first] = True
    items[first] = item
    for step in range(1, lengths.max()):
        n = num_active[step]
        cluster[:n], item[:n], new = _next(world, cluster[:n], item[:n], liked[:n], rng)
        items[first[:n] + step] = item[:n]
        session_start[first[:n] + step] = new
    return items, session_start


def _next(
    world: _World,
    cluster: np.ndarray,
    item: np.ndarray,
    liked: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(item)
    kind = rng.random(n)
    bounds = np.cumsum([_FOLLOW, _SAME_CLUSTER, _RELATED, _ANYWHERE])
    follow = kind < bounds[0]
    new_session = kind >= bounds[3]
    related = world.related[cluster, rng.integers(0, _NUM_RELATED, n)]
    favourite = liked[np.arange(n), rng.integers(0, _NUM_LIKED, n)]
    cluster = np.select(
        [kind < bounds[1], kind < bounds[2], kind < bounds[3]],
        [cluster, related, _any_cluster(world, rng, n)],
        np.where(rng.random(n) < 0.3, related, favourite),
    )
    choice = np.searchsorted(np.cumsum(_SUCCESSOR_SHARES)[:-1], rng.random(n), side="right")
    successor = world.successors[item, choice]
    return cluster, np.where(follow, successor, _popular_item(world, cluster, rng)), new_session


def _any_cluster(
    world: _World, rng: np.random.Generator, shape: int | tuple[int, ...]
) -> np.ndarray:
    return np.searchsorted(world.cluster_cdf[:-1], rng.random(shape), side="right")


def _popular_item(world: _World, cluster: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # Rank by Zipf's law with exponent 1: the inverse of its (continuous) distribution.
    size = world.cluster_size[cluster]
    rank = np.exp(rng.random(len(cluster)) * np.log(size + 1)) - 1
    return world.cluster_start[cluster] + np.minimum(rank.astype(np.int64), size - 1)


def _played_pct(num_events: int, rng: np.random.Generator) -> np.ndarray:
    # Measured on the published data: 0 in 7.4 % of listens, above 100 in 0.47 %.
    kind = rng.random(num_events)
    part = rng.integers(1, 100, num_events)
    rewound = rng.integers(101, 160, num_events)
    return np.select([kind < 0.074, kind < 0.35, kind < 0.9953], [0, part, 100], rewound)


def _timestamps(
    user: np.ndarray,
    lengths: np.ndarray,
    listened_s: np.ndarray,
    session_start: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    # Within a session an event starts when the one before it stopped; skipped tracks
    # therefore tie. The pauses between sessions fill the rest of the user's time.
    first = np.cumsum(lengths) - lengths
    within = np.concatenate([[0], listened_s[:-1]]) * ~session_start
    pause = rng.exponential(size=len(user)) * session_start
    busy = np.add.reduceat(within, first)
    idle = np.maximum(_LAST_TIMESTAMP - busy, 0) * rng.uniform(0.5, 1.0, len(lengths))
    gap = within + pause * (idle / np.add.reduceat(pause, first))[user]
    elapsed = np.cumsum(gap)
    return _round(elapsed - (elapsed[first] - gap[first])[user])


def _round(seconds: np.ndarray) -> np.ndarray:
    return seconds.astype(np.int64) // _TIME_STEP * _TIME_STEP


def _sparse_ids(count: int, maximum: int, rng: np.random.Generator) -> np.ndarray:
    # Distinct, not dense, in random order.
    return rng.choice(maximum, size=count, replace=False) + 1
