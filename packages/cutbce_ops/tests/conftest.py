"""Test-wide settings: 8 virtual CPU devices for sharding, and no silent promotion."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples every time: a failure must be one that anyone can repeat.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("fixed")
