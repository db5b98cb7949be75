"""Parameters whose update is still to come: whoever touches one first makes it land.

While a parameter is pending its class is one that PyTorch asks before every operation on it (``__torch_function__``),
so a forward, ``.grad``, ``state_dict()``, ``copy.deepcopy`` or a print all wait for just the parameters they read.
Afterwards the parameter has its own class again and costs nothing extra.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Land = Callable[[nn.Parameter], None]

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "register_hook", "register_post_accumulate_grad_hook"),
)
_HARMLESS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)
"""What tells nothing about a parameter's values and so need not wait for them."""


class Pending:
    """Mixed into a parameter's class while its update is to come."""

    _poseidon_land: Land

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let every pending parameter among the arguments land, then do what was asked for."""
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        land(*tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        land(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        land(self)
        return self.__reduce_ex__(protocol)


@cache
def _pending_class(plain: type) -> type:
    return type(f"Pending{plain.__name__}", (Pending, plain), {})


def make_pending(parameter: nn.Parameter, land_it: Land) -> None:
    """From now on the first touch calls ``land_it(parameter)``, which must call :func:`make_plain` before all else."""
    if not isinstance(parameter, Pending):
        parameter.__class__ = _pending_class(type(parameter))
    parameter._poseidon_land = land_it  # type: ignore[attr-defined]


def make_plain(parameter: nn.Parameter) -> None:
    """Give a parameter its own class back."""
    if isinstance(parameter, Pending):
        parameter.__class__ = type(parameter).__bases__[1]
        del parameter._poseidon_land


def land(*values: Any) -> None:
    """Let the pending parameters among ``values`` land; for code that PyTorch does not ask before it reads them."""
    for value in values:
        if isinstance(value, Pending):
            value._poseidon_land(value)  # type: ignore[arg-type]
