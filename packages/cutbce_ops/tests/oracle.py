"""Dense NumPy float64 truth. It shares no code and no formula trick with the package."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Truth:
    loss: float
    per_position: np.ndarray
    d_activations: np.ndarray
    d_embeddings: np.ndarray
    d_bias: np.ndarray
    d_weights: np.ndarray
    tp: np.ndarray
    fp: np.ndarray
    fn: np.ndarray
    tn: np.ndarray


def multi_hot(targets: np.ndarray, vocab_size: int) -> np.ndarray:
    labels = np.zeros((len(targets), vocab_size))
    for position, rows in enumerate(targets):
        for row in rows:
            if 0 <= row < vocab_size:
                labels[position, row] = 1
    return labels


def binary_cross_entropy(
    activations, embeddings, targets, *, weights=None, bias=None, vocab_size=None,
    label_smoothing=0.0, pos_weight=1.0, chunk=32,
) -> Truth:  # fmt: skip
    a, e = np.asarray(activations, np.float64), np.asarray(embeddings, np.float64)
    num_positions, num_rows = len(a), len(e)
    v = num_rows if vocab_size is None else vocab_size
    b = np.zeros(num_rows) if bias is None else np.asarray(bias, np.float64)
    w = np.ones(num_positions) if weights is None else np.asarray(weights, np.float64)
    mean_w = w / w.sum() if w.sum() else np.zeros_like(w)
    per_position = np.zeros(num_positions)
    d_a, d_e, d_b = np.zeros_like(a), np.zeros_like(e), np.zeros(num_rows)
    counts = np.zeros((4, num_positions), np.int64)
    for start in range(0, num_positions, chunk):
        part = slice(start, start + chunk)
        x = a[part] @ e[:v].T + b[:v]
        hot = multi_hot(np.asarray(targets)[part], v)
        y = hot * (1 - label_smoothing) + label_smoothing / 2
        # Both tails in their own exponential, so that tiny probabilities keep their digits.
        small = np.exp(-np.abs(x))
        softplus = np.maximum(x, 0) + np.log1p(small)
        per_position[part] = (pos_weight * y * (softplus - x) + (1 - y) * softplus).mean(axis=1)
        p = np.where(x >= 0, 1, small) / (1 + small)
        not_p = np.where(x >= 0, small, 1) / (1 + small)
        d_x = (-pos_weight * y * not_p + (1 - y) * p) * mean_w[part, None] / v
        d_a[part] = d_x @ e[:v]
        d_e[:v] += d_x.T @ a[part]
        d_b[:v] += d_x.sum(axis=0)
        predicted = x > 0
        counts[0, part] = (predicted & (hot > 0)).sum(axis=1)
        counts[1, part] = (predicted & (hot == 0)).sum(axis=1)
        counts[2, part] = (~predicted & (hot > 0)).sum(axis=1)
        counts[3, part] = (~predicted & (hot == 0)).sum(axis=1)
    loss = float((mean_w * per_position).sum())
    d_w = (per_position - loss) / w.sum() if w.sum() else np.zeros_like(w)
    return Truth(loss, per_position, d_a, d_e, d_b, d_w, *counts)


def scores(queries, embeddings, bias=None, exclude=None, vocab_size=None) -> np.ndarray:
    v = len(embeddings) if vocab_size is None else vocab_size
    result = np.asarray(queries, np.float64) @ np.asarray(embeddings, np.float64)[:v].T
    if bias is not None:
        result = result + np.asarray(bias, np.float64)[:v]
    for query, rows in enumerate([] if exclude is None else np.asarray(exclude)):
        for row in rows:
            if 0 <= row < v:
                result[query, row] = -np.inf
    return result
