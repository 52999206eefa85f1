"""Keeps a Keras model whole when its loss fails while a step of `fit` or `evaluate` is traced.

To save memory Keras takes the values out of the variables before the first step and puts them back
after the last one. An error in between leaves variables without values, though nothing has run yet
and every value is still alive: in the local `state` of the method that Keras is in. Keras offers no
call ahead of the step in which a loss could look at its targets, except before the first of all.
"""

import sys
from typing import Any

import jax
import keras
from jax.core import Tracer


def give_back_variables() -> None:
    """Puts the values back into the variables of the models that are calling this, if any."""
    state: list[list[jax.Array]] | None = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        # With several steps in one execution, the inner state is the newer one.
        state = state or _usable(names.get("state"))
        model, method = names.get("self"), frame.f_code.co_name
        if state is not None and method in ("fit", "evaluate") and isinstance(model, keras.Model):
            _give_back(model, method, state)
            state = None
        frame = frame.f_back


def _usable(state: Any) -> list[list[jax.Array]] | None:
    """The state, if it is one, with values that are there (not traced, not donated)."""
    leaves = jax.tree.leaves(state)
    is_usable = isinstance(state, tuple) and leaves and all(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        and not leaf.is_deleted()
        for leaf in leaves
    )  # fmt: skip
    return list(state) if is_usable else None


def _give_back(model: Any, method: str, state: list[list[jax.Array]]) -> None:
    variables = [model.trainable_variables, model.non_trainable_variables]
    variables += [model.optimizer.variables] if method == "fit" else []
    variables += [model.metrics_variables]
    if [len(each) for each in variables] != [len(values) for values in state]:
        return  # not the state that this Keras is known for
    for each, values in zip(variables, state, strict=True):
        for variable, value in zip(each, values, strict=True):
            if variable._value is None:
                variable._value = value
    model._jax_state_synced = True
