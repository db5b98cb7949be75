"""Isolation from the caller's context, for work that runs in the middle of other code.

A gradient may land, or a deferred update run, inside a forward under autocast or an evaluation in inference mode.
Autocast would round a product of factors to bf16; inference mode would make the optimizer's state unusable for further
training. On a CUDA device it may be queued on a stream for which nobody else waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_DEVICE_TYPES = ("cpu", "cuda")
_TRACER: Any = torch._C
"""Its types do not tell of all that it has."""


def aside() -> contextlib.AbstractContextManager[Any]:
    """Run the body without the caller's context: no autocast, no inference mode, no graph."""
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICE_TYPES)):
        return _away()
    return torch.no_grad()


@contextlib.contextmanager
def in_private() -> Iterator[None]:
    """Touch parameters unwatched, and without the caller's context."""
    with aside(), torch._C.DisableTorchFunctionSubclass():
        yield


def is_followed() -> bool:
    """Whether somebody follows the operations of this thread: a transform of ``torch.func``, or ``torch.jit.trace``."""
    return peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def is_seen() -> bool:
    """Whether anybody would see what this thread does: those, or a mode, as a selective checkpoint has one."""
    return (
        peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Run the body unseen by all of them.

    A transform allows no change of what it has not made, and a trace would repeat it. A selective checkpoint keeps
    results by their number, which differ where it computes again and nothing is due any more.
    """
    state = torch._C._get_tracing_state()
    _TRACER._set_tracing_state(None)
    try:
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            yield
    finally:
        _TRACER._set_tracing_state(state)


@contextlib.contextmanager
def _away() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextlib.contextmanager
def in_order(
    streams: Sequence[torch.cuda.Stream], around: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Run the body, inside ``around()``, on these streams, one per device; those in use at present wait for it."""
    pairs = [(torch.cuda.current_stream(stream.device), stream) for stream in streams]
    others = [(now, stream) for now, stream in pairs if now != stream]
    with contextlib.ExitStack() as stack:
        stack.enter_context(around())
        for _, stream in others:
            stack.enter_context(torch.cuda.stream(stream))
        yield
    for now, stream in others:
        now.wait_stream(stream)
