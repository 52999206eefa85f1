"""One table of cases, crossed with dtype, direction and layout. Names are generated."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import cutbce_ops


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and regime of one problem; `tiles` cut it into several blocks."""

    num_positions: int = 24
    vocab_size: int = 640
    dim: int = 16
    num_targets: int = 8
    tiles: tuple[int, int] = (8, 128)
    mean_logit: float = 0.0
    logit_scale: float = 1.0
    targets: str = "random"  # random | duplicates | padding | outside
    weights: str = "none"  # none | random | zero | some_zero
    bias: bool = False
    unused_rows: int = 0
    label_smoothing: float = 0.0
    pos_weight: float | None = None
    focal_gamma: float = 0.0
    scale_option: float | None = None  # the operator's `logit_scale`; above is the data's
    logit_cap: float | None = None

    @property
    def name(self) -> str:
        default = Case()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ",".join(changed).replace(" ", "") or "default"


CASES = [
    Case(),
    # Sizes that divide nothing: a ragged last block of rows and a ragged last chunk of positions.
    Case(num_positions=29, vocab_size=1003, dim=13, num_targets=3),
    Case(vocab_size=5, dim=3, num_targets=2),  # the whole table is smaller than a block
    Case(vocab_size=1, num_targets=1),
    Case(num_positions=1),
    Case(num_targets=1),
    Case(num_targets=64),
    Case(tiles=(1, 1), num_positions=3, vocab_size=7, num_targets=2),
    Case(targets="duplicates"),
    Case(targets="padding"),
    Case(targets="outside"),
    Case(weights="random"),
    Case(weights="zero"),
    Case(weights="some_zero", bias=True),
    Case(bias=True, unused_rows=37, targets="outside"),
    Case(mean_logit=-14.0),  # probabilities near 1e-6, where training lives
    Case(logit_scale=100.0),
    Case(label_smoothing=0.1),
    Case(pos_weight=5.0),
    Case(label_smoothing=0.3, pos_weight=2.5, bias=True, weights="random", unused_rows=3),
    Case(focal_gamma=2.0, weights="random"),
    Case(focal_gamma=0.5, label_smoothing=0.2, pos_weight=2.5, bias=True, unused_rows=37),
    Case(logit_cap=3.0, scale_option=2.0, bias=True),  # scaled by a power of 2: no rounding
    Case(logit_cap=30.0, focal_gamma=1.5, mean_logit=-14.0),
]


@dataclasses.dataclass(frozen=True)
class Problem:
    case: Case
    activations: jnp.ndarray
    embeddings: jnp.ndarray
    targets: jnp.ndarray
    weights: jnp.ndarray | None
    bias: jnp.ndarray | None

    def options(self, **changes) -> dict:
        case = self.case
        return {
            "bias": self.bias,
            "vocab_size": case.vocab_size if case.unused_rows else None,
            "label_smoothing": case.label_smoothing,
            "pos_weight": case.pos_weight,
            "focal_gamma": case.focal_gamma,
            "logit_scale": case.scale_option,
            "logit_cap": case.logit_cap,
            "tiles": cutbce_ops.TileConfig(*case.tiles),
        } | changes

    def oracle_options(self) -> dict:
        case = self.case
        return {
            "weights": self.weights,
            "bias": self.bias,
            "vocab_size": case.vocab_size,
            "label_smoothing": case.label_smoothing,
            "pos_weight": case.pos_weight or 1.0,
            "focal_gamma": case.focal_gamma,
            "scale": case.scale_option or 1.0,
            "cap": case.logit_cap,
        }


def make_problem(case: Case, dtype=jnp.float32, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    num_rows = case.vocab_size + case.unused_rows
    activations = rng.normal(size=(case.num_positions, case.dim))
    embeddings = rng.normal(size=(num_rows, case.dim)) * case.logit_scale / np.sqrt(case.dim)
    if case.mean_logit:
        activations[:, 0], embeddings[:, 0] = 1.0, case.mean_logit
    bias = rng.normal(size=num_rows) if case.bias else None
    return Problem(
        case,
        jnp.asarray(activations, dtype),
        jnp.asarray(embeddings, dtype),
        jnp.asarray(_targets(case, rng), jnp.int32),
        _weights(case, rng),
        None if bias is None else jnp.asarray(bias, dtype),
    )


def _targets(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = (case.num_positions, case.num_targets)
    targets = rng.integers(0, case.vocab_size, shape)
    if case.targets == "duplicates":
        targets[:, 1::2] = targets[:, ::2]
    elif case.targets == "padding":
        targets[:] = -1
    elif case.targets == "outside":
        outside = np.array([-7, -1, case.vocab_size, case.vocab_size + 5, 2**31 - 1])
        targets = np.where(rng.random(shape) < 0.5, rng.choice(outside, shape), targets)
    return targets


def _weights(case: Case, rng: np.random.Generator) -> jnp.ndarray | None:
    if case.weights == "none":
        return None
    weights = rng.random(case.num_positions) * 2
    if case.weights == "zero":
        weights[:] = 0
    elif case.weights == "some_zero":
        weights[::3] = 0
    return jnp.asarray(weights, jnp.float32)
