"""Who is trained on what and who is evaluated on what.

Two protocols, for a user with items x[0..n) and L targets:

`"next-8"` (`num_targets` = L = 8; the same formulas hold for every L):

    test input x[:n-L], targets x[n-L:]
    dev  input x[:n-2L-1], targets x[n-2L-1:n-L-1]
    train inputs x[:n-3L-2]; position j predicts x[j+1..j+L], at most x[n-2L-3]

so a user needs n >= 3L+3. Shorter users are not evaluated and are trained on whole.

`"leave-one-out"`, the protocol of the published tables:

    test input x[:n-1], target x[n-1];   dev input x[:n-2], target x[n-2]
    train on x[:n-2]; position j predicts the next L items inside it

so a user needs n >= 3. Shorter users are not evaluated and are trained on whole.

Training never touches an item at or after the first dev target.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

import numpy as np

from recmodels._src.errors import UserError

Protocol = Literal["next-8", "leave-one-out"]
Part = Literal["dev", "test"]

PAD_ROW = 0
"""Row that fills unused history positions."""
PAD_TARGET = -1
"""Value that fills unused target slots."""


class TrainRange(NamedTuple):
    """Training part of users of given lengths; fields have the shape of the lengths."""

    num_inputs: np.ndarray
    """int64: positions 0..num_inputs-1 are inputs, each with at least one target."""
    target_stop: np.ndarray
    """int64: items from here on are never a training target."""


class EvaluationRange(NamedTuple):
    """Evaluation part of users of given lengths; fields have the shape of the lengths."""

    input_stop: np.ndarray
    """int64: the input is x[:input_stop]."""
    target_start: np.ndarray
    """int64: first target."""
    target_stop: np.ndarray
    """int64: one past the last target."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A protocol and the number of targets of each position.

    Example:
      >>> Split("next-8").min_length
      27
      >>> Split("next-8").is_evaluated([26, 27]).tolist()
      [False, True]
    """

    protocol: Protocol
    """`"next-8"` or `"leave-one-out"`."""
    num_targets: int = 8
    """L: how many following items each training position predicts."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.protocol not in get_args(Protocol):
            allowed = ", ".join(get_args(Protocol))
            raise UserError(f"`protocol` must be one of {allowed}; got {self.protocol!r}")
        if self.num_targets < 1:
            raise UserError(f"`num_targets` must be at least 1; got {self.num_targets}")

    @property
    def min_length(self) -> int:
        """Fewest events with which a user is evaluated."""
        return 3 * self.num_targets + 3 if self.protocol == "next-8" else 3

    @property
    def num_evaluation_targets(self) -> int:
        """Number of held-out items of each evaluated user, on dev and on test."""
        return self.num_targets if self.protocol == "next-8" else 1

    def is_evaluated(self, lengths: np.ndarray | int) -> np.ndarray:
        """Whether users of these lengths are evaluated: bool, shape of `lengths`."""
        return np.asarray(lengths) >= self.min_length

    def train_range(self, lengths: np.ndarray | int) -> TrainRange:
        """Training inputs and the bound of training targets.

        Args:
          lengths: integer array (or one integer) of user lengths n.

        Returns:
          `TrainRange` of int64 arrays of that shape; `num_inputs` is 0 for a user that
          cannot be trained on.
        """
        n = np.asarray(lengths, dtype=np.int64)
        evaluated = self.is_evaluated(n)
        if self.protocol == "next-8":
            # Every position of an evaluated user has all its L targets.
            num_inputs = np.where(evaluated, n - 3 * self.num_targets - 2, n - 1)
            target_stop = np.where(evaluated, n - 2 * self.num_targets - 2, n)
        else:
            target_stop = np.where(evaluated, n - 2, n)
            num_inputs = target_stop - 1
        return TrainRange(np.maximum(num_inputs, 0), target_stop)

    def evaluation(self, lengths: np.ndarray | int, part: Part) -> EvaluationRange:
        """Input and targets of evaluated users.

        Args:
          lengths: integer array (or one integer) of user lengths, each at least
            `min_length`.
          part: `"dev"` or `"test"`.

        Returns:
          `EvaluationRange` of int64 arrays of that shape.

        Raises:
          UserError: `part` is unknown.
          ValueError: a user is too short to be evaluated.
        """
        check_part(part)
        n = np.asarray(lengths, dtype=np.int64)
        if not np.all(self.is_evaluated(n)):
            raise ValueError(f"`lengths` must be at least {self.min_length}; got {n.min()}.")
        num_held_out = self.num_evaluation_targets
        if part == "test":
            start = n - num_held_out
        elif self.protocol == "next-8":
            # One item lies between the dev targets and the test targets, as published.
            start = n - 2 * num_held_out - 1
        else:
            start = n - 2
        return EvaluationRange(start, start, start + num_held_out)


def check_part(part: str) -> None:
    """Refuses anything but `"dev"` and `"test"`.

    Raises:
      UserError: `part` is something else.
    """
    if part not in get_args(Part):
        raise UserError(f"`part` must be one of {', '.join(get_args(Part))}; got {part!r}")
