"""What `cutbce_ops.keras` needs before it can be imported, said in one sentence when absent."""

import importlib

MINIMUM_MAJOR = 3


def require_keras() -> None:
    """Imports Keras and checks its version and backend.

    Raises:
      ImportError: Keras 3 is not installed, or runs on another backend than JAX.
    """
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name == "keras":
            raise ImportError(
                "`cutbce_ops.keras` needs Keras 3, which is not installed. "
                'Install it with: pip install "cutbce-ops[keras]".'
            ) from error
        # Keras picks TensorFlow when nothing is said, and fails here where that is not installed.
        raise ImportError(
            f"Keras could not import its backend: no module named {error.name!r}. "
            "`cutbce_ops.keras` needs the JAX backend: set KERAS_BACKEND=jax before importing "
            "keras."
        ) from error
    if int(keras.__version__.split(".")[0]) < MINIMUM_MAJOR:
        raise ImportError(
            f"`cutbce_ops.keras` needs Keras 3; found version {keras.__version__}. "
            'Install it with: pip install "cutbce-ops[keras]".'
        )
    backend = keras.backend.backend()
    if backend != "jax":
        raise ImportError(
            f"`cutbce_ops.keras` needs Keras on the JAX backend; it runs on {backend!r}. "
            "Set KERAS_BACKEND=jax before importing keras."
        )
