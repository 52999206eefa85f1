"""Layers and a loss for Keras 3 on its JAX backend, in place of a wide `Dense` and its logits.

    pip install "cutbce-ops[keras]"

`CutDense` stands where `Dense(num_items)` stood and passes the activations through;
`CutBinaryCrossentropy` scores them against its table tile by tile; `CutTopK` ranks the catalog in a
serving model. Importing this module imports Keras, which must run on JAX.
"""

from cutbce_ops._src.keras.requirements import require_keras as _require_keras

_require_keras()

from cutbce_ops._src.keras.head import CutDense as CutDense  # noqa: E402  (after the check)
from cutbce_ops._src.keras.loss import (  # noqa: E402
    CutBinaryCrossentropy as CutBinaryCrossentropy,
)
from cutbce_ops._src.keras.top_k import CutTopK as CutTopK  # noqa: E402
