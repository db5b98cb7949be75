"""Work that happens in the middle of somebody else's code and must not depend on it.

A gradient may land, and a deferred update be done, inside a forward under autocast or an evaluation in inference mode.
Under autocast a product of factors would be rounded to bf16; in inference mode the optimizer's state could never take
part in training again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Compute as if nothing surrounded this: no autocast, no inference mode, no graph."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
