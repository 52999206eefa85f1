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
    d_scale: float
    tp: np.ndarray  # counts: [T], or [T, K] for a tuple of thresholds
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


def sigmoids(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p and 1 - p, each tail from its own exponential, so that tiny ones keep their digits."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small), np.where(x >= 0, small, 1) / (1 + small)


def pointwise_loss(x, y, pos_weight=1.0, focal_gamma=0.0):
    """Loss of logits x with soft labels y, and its derivative by x."""
    p, not_p = sigmoids(x)
    log_terms = np.log1p(np.exp(-np.abs(x)))
    positive, negative = np.maximum(-x, 0) + log_terms, np.maximum(x, 0) + log_terms
    loss = pos_weight * y * positive + (1 - y) * negative
    d_loss = -pos_weight * y * not_p + (1 - y) * p
    if focal_gamma:
        miss = y * not_p + (1 - y) * p
        d_miss = (1 - 2 * y) * p * not_p
        d_loss = (
            miss**focal_gamma * d_loss + focal_gamma * miss ** (focal_gamma - 1) * d_miss * loss
        )
        loss = miss**focal_gamma * loss
    return loss, d_loss


def capped(z: np.ndarray, cap: float | None):
    """c tanh(z / c) and its derivative."""
    return (z, np.ones_like(z)) if cap is None else (cap * np.tanh(z / cap), np.cosh(z / cap) ** -2)


def binary_cross_entropy(
    activations, embeddings, targets, *, weights=None, bias=None, vocab_size=None,
    label_smoothing=0.0, pos_weight=1.0, focal_gamma=0.0, scale=1.0, cap=None, thresholds=0.5,
    chunk=32,
) -> Truth:  # fmt: skip
    a, e = np.asarray(activations, np.float64), np.asarray(embeddings, np.float64)
    num_positions, num_rows = len(a), len(e)
    v = num_rows if vocab_size is None else vocab_size
    b = np.zeros(num_rows) if bias is None else np.asarray(bias, np.float64)
    w = np.ones(num_positions) if weights is None else np.asarray(weights, np.float64)
    mean_w = w / w.sum() if w.sum() else np.zeros_like(w)
    per_position = np.zeros(num_positions)
    d_a, d_e, d_b, d_scale = np.zeros_like(a), np.zeros_like(e), np.zeros(num_rows), 0.0
    counts = np.zeros((4, num_positions, *np.shape(thresholds)), np.int64)
    for start in range(0, num_positions, chunk):
        part = slice(start, start + chunk)
        dots = a[part] @ e[:v].T
        x, d_cap = capped(scale * dots + b[:v], cap)
        hot = multi_hot(np.asarray(targets)[part], v)
        y = hot * (1 - label_smoothing) + label_smoothing / 2
        loss, d_x = pointwise_loss(x, y, pos_weight, focal_gamma)
        per_position[part] = loss.mean(axis=1)
        d_z = d_x * d_cap * mean_w[part, None] / v
        d_a[part] = scale * d_z @ e[:v]
        d_e[:v] += scale * d_z.T @ a[part]
        d_b[:v] += d_z.sum(axis=0)
        d_scale += (d_z * dots).sum()
        predicted = np.moveaxis(np.greater.outer(sigmoids(x)[0], thresholds), 1, -1)
        is_hot = (hot > 0).reshape(*hot.shape[:1], *(1,) * np.ndim(thresholds), v)
        for kind, chosen in enumerate(
            (predicted & is_hot, predicted & ~is_hot, ~predicted & is_hot, ~predicted & ~is_hot)
        ):
            counts[kind, part] = chosen.sum(axis=-1)
    loss = float((mean_w * per_position).sum())
    d_w = (per_position - loss) / w.sum() if w.sum() else np.zeros_like(w)
    return Truth(loss, per_position, d_a, d_e, d_b, d_w, d_scale, *counts)


@dataclasses.dataclass
class SoftmaxTruth:
    loss: float
    per_position: np.ndarray
    d_activations: np.ndarray
    d_embeddings: np.ndarray
    d_bias: np.ndarray
    d_scale: float


def softmax_cross_entropy(
    activations, embeddings, targets, *, weights=None, bias=None, vocab_size=None, scale=1.0,
    cap=None, normalize=True,
) -> SoftmaxTruth:  # fmt: skip
    """Dense; gradients of the weighted mean, or of the weighted sum without `normalize`."""
    a, e = np.asarray(activations, np.float64), np.asarray(embeddings, np.float64)
    targets = np.asarray(targets)
    v = len(e) if vocab_size is None else vocab_size
    b = np.zeros(len(e)) if bias is None else np.asarray(bias, np.float64)
    has_target = (targets >= 0) & (targets < v)
    w = (np.ones(len(a)) if weights is None else np.asarray(weights, np.float64)) * has_target
    if normalize:
        w = w / w.sum() if w.sum() else w
    dots = a @ e[:v].T
    x, d_cap = capped(scale * dots + b[:v], cap)
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    hot = multi_hot(targets[:, None], v)
    per_position = np.log(powers.sum(axis=1)) + x.max(axis=1) - (hot * x).sum(axis=1)
    per_position = np.where(has_target, per_position, 0)
    d_z = (powers / powers.sum(axis=1, keepdims=True) - hot) * d_cap * w[:, None]
    d_e, d_b = np.zeros_like(e), np.zeros(len(e))
    d_e[:v], d_b[:v] = scale * d_z.T @ a, d_z.sum(axis=0)
    return SoftmaxTruth(
        float((w * per_position).sum()), per_position, scale * d_z @ e[:v], d_e, d_b,
        float((d_z * dots).sum()),
    )  # fmt: skip


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
