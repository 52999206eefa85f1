"""Every tolerance of the package, and the comparators that use them."""

import numpy as np

# Relative error against float64 on the same (already rounded) operands. bfloat16 rounds the
# probabilities that enter the gradient products, never the loss.
TOLERANCES = {
    # 2e-7 at full size (test_full_size.py); a mean over a few thousand logits averages less away.
    ("float32", "loss"): 4e-7,
    ("float32", "per_position"): 1e-6,
    ("float32", "gradient"): 1e-6,
    ("float32", "gradient_rare"): 2e-6,  # mean logit -14: rounding the logit itself costs 1e-6
    ("bfloat16", "loss"): 4e-7,
    ("bfloat16", "per_position"): 1e-6,
    ("bfloat16", "gradient"): 5e-3,
    ("bfloat16", "gradient_rare"): 5e-3,
}


def relative_l2(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / norm) if norm else float(np.linalg.norm(got))


def assert_close(got, want, dtype: str, quantity: str, factor: float = 1.0) -> None:
    error, bound = relative_l2(got, want), TOLERANCES[dtype, quantity] * factor
    assert error <= bound, f"{quantity} ({dtype}): relative error {error:.2e} exceeds {bound:.2e}"
