"""Replace functions of TensorFlow in all of its modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from poseidon.following.patches import Patches


def replace_everywhere(patches: Patches, original: Callable[..., Any], around: Callable[..., Any]) -> None:
    """Replace a function in all of TensorFlow's modules by one that calls ``around(original, *args, **kwargs)``.

    ``tf.gradients``, ``tf.compat.v1.gradients`` and the module that defines it hold the same function three times.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tensorflow" and module is not None:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patches.replace(module, attribute, wrapper)
