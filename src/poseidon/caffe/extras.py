"""Optional packages, imported when first needed, with an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any

from poseidon.errors import ConfigError


def require(module: str) -> Any:
    """Import ``module`` (protobuf, lmdb, h5py, PIL ...), or raise an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the Caffe interface needs {module!r}, which cannot be imported ({error}); "
            "install Poseidon with its extra: pip install '.[caffe]' in the checkout"
        ) from error
