"""Parameters whose owner wants to know how they are touched: ``served.py`` keeps some of their contents elsewhere.

While a parameter is watched, its class overrides ``__torch_function__``, as in ``pending.py``. Unlike a pending one it
may stay watched: a rounded weight serves a layer under autocast, which rounds it anyway, as well as the exact one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from poseidon.engine import classes
from poseidon.engine.aside import is_followed
from poseidon.engine.classes import Replacement, mixed
from poseidon.engine.pending import HARMLESS


class Touch(Enum):
    """What an operation does with a parameter."""

    ROUNDED = "uses its values rounded to bf16"
    VALUES = "uses its values"
    ROWS = "looks rows of it up"
    GRADIENT = "reads its gradient"
    NEW_GRADIENT = "replaces its gradient"


class Watcher(Protocol):
    """Who watches."""

    def touch(self, parameter: nn.Parameter, touch: Touch) -> None:
        """Prepare a parameter for an operation; afterwards the parameter may be watched still."""

    def look_up(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Prepare these rows of a parameter; afterwards it may be watched still."""

    def open(self, parameter: nn.Parameter) -> None:
        """Put everything in place, and stop watching this parameter."""


_ROUNDING = frozenset(
    [
        *(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
        *(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm),
        *(torch.addbmm, Tensor.addbmm, torch.baddbmm, Tensor.baddbmm),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        F.scaled_dot_product_attention,
    ]
)
"""Functions that autocast runs in the lower precision on CPUs and on CUDA devices: each argument is rounded first. Not
``einsum`` and ``prelu``, which are on one of the two lists only."""
_ATTENTION = F.multi_head_attention_forward
"""Uses its weights, and views of them, in ``F.linear`` only, but concatenates ``bias_k`` and ``bias_v``."""

_GRADIENT: tuple[Any, ...] = (Tensor.grad, Tensor._grad)
_READS = frozenset(attribute.__get__ for attribute in _GRADIENT)
_WRITES = frozenset(way for attribute in _GRADIENT for way in (attribute.__set__, attribute.__delete__))


class Watched(Replacement):
    """Mixed into a parameter's class while it is watched."""

    _poseidon_watcher: Watcher

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Prepare every watched parameter among the arguments, then run the operation."""
        kwargs = kwargs or {}
        if func not in HARMLESS:
            found: dict[int, Any] = {
                id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Watched)
            }
            for parameter in found.values():
                watcher = getattr(parameter, "_poseidon_watcher", None)
                if watcher is None:  # one of the others has put this one in place too
                    continue
                if not all(issubclass(each, Watched) or each in (Tensor, nn.Parameter) for each in types):
                    watcher.open(parameter)  # another class wants to see the operation too
                    continue
                touch = _kind(func, parameter, args, kwargs)
                if touch is Touch.ROWS:
                    watcher.look_up(parameter, args[0])
                else:
                    watcher.touch(parameter, touch)
            if not any(isinstance(parameter, Watched) for parameter in found.values()):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _poseidon_open(self) -> None:
        self._poseidon_watcher.open(self)  # type: ignore[arg-type]


def _kind(func: Callable[..., Any], parameter: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Touch:
    if func in _READS:
        return Touch.GRADIENT
    if func in _WRITES:
        return Touch.NEW_GRADIENT
    if func in _ROUNDING and kwargs.get("out") is None:  # autocast leaves functions alone that write into a tensor
        return Touch.ROUNDED if is_rounding(parameter.device.type) else Touch.VALUES
    if func is F.embedding:
        is_table = len(args) > 1 and args[1] is parameter and args[0] is not parameter and not is_followed()
        # With a largest norm, a look-up changes the rows.
        return Touch.ROWS if is_table and kwargs.get("max_norm") is None and len(args) == 2 else Touch.VALUES
    if func is _ATTENTION:
        kept = [*args[7:9], kwargs.get("bias_k"), kwargs.get("bias_v")]
        is_kept = any(one is parameter for one in kept)
        return Touch.ROUNDED if is_rounding(parameter.device.type) and not is_kept else Touch.VALUES
    return Touch.VALUES


def use_in_linear(parameter: nn.Parameter) -> None:
    """Prepare a parameter for a linear layer that reads it without ``__torch_function__``."""
    watcher = getattr(parameter, "_poseidon_watcher", None)
    if watcher is not None:
        watcher.touch(parameter, Touch.ROUNDED if is_rounding(parameter.device.type) else Touch.VALUES)


def is_rounding(device_type: str) -> bool:
    """Return whether autocast rounds to bf16 at present; inside ``torch.func.vmap`` it leaves the bias of a layer."""
    if not torch.is_autocast_enabled(device_type) or torch.get_autocast_dtype(device_type) is not torch.bfloat16:
        return False
    return not is_followed()


def watch(parameters: Iterable[nn.Parameter], watcher: Watcher) -> None:
    """Let ``watcher`` prepare each of these parameters for whatever touches it."""
    if not classes.others_yield:
        classes.make_others_yield()
    for parameter in parameters:
        if not isinstance(parameter, Watched):
            parameter.__class__ = mixed(Watched, type(parameter))
        parameter._poseidon_watcher = watcher  # type: ignore[attr-defined]


def unwatch(parameter: nn.Parameter) -> None:
    """Restore a parameter's own class."""
    if isinstance(parameter, Watched):
        parameter.__class__ = type(parameter).__bases__[1]
        del parameter._poseidon_watcher
