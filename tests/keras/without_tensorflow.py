"""Keras on torch or JAX, computing in float64, and without TensorFlow, which would take seconds to import.

Imported before anything else imports Keras.
"""

import sys

sys.modules["tensorflow"] = None  # type: ignore[assignment]

from keras.src.backend.common import dtypes  # noqa: E402

# Off TensorFlow, Keras narrows float64 in products and in BatchNormalization, which would hide small errors.
dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
