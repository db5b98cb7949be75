"""Parameters with a pending update: the first operation to touch one lands it.

While a parameter is pending, its class overrides ``__torch_function__``, which PyTorch calls before every operation, so
a forward, ``.grad``, ``state_dict()``, ``copy.deepcopy`` or a print waits for exactly the parameters it reads.
Afterwards the parameter gets its own class back and has no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import tree_leaves

from poseidon.engine import classes
from poseidon.engine.classes import Replacement, mixed

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
HARMLESS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)
"""Attributes that do not depend on a parameter's values, so reading them need not wait."""


_LEAVES = (Tensor, int, float, str, type(None), torch.dtype, torch.device)
"""What most arguments are: nothing is inside them."""


class Pending(Replacement):
    """Mixed into a parameter's class while its update is pending."""

    _poseidon_land: Land

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Land every pending parameter among the arguments, then run the operation."""
        kwargs = kwargs or {}
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if land(*args, *kwargs.values()):
            return func(*args, **kwargs)
        # This thread is landing one of them. The parameter's own class wants to see the operation, and so do others, as
        # they have left it to ours.
        kinds: Any = tuple(kind.__bases__[1] if issubclass(kind, Pending) else kind for kind in types)
        seeing = [kind for kind in kinds if kind.__torch_function__ is not torch._C._disabled_torch_function_impl]
        if not seeing:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for kind in seeing:
            result = kind.__torch_function__(func, kinds, args, kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented

    def _poseidon_open(self) -> None:
        land(self)


# Otherwise torch.optim would step such parameters one after the other, with other bits; DTensor is told to it likewise.
_foreach_supported_types.append(mixed(Pending, nn.Parameter))  # type: ignore[arg-type]


def make_pending(parameters: Iterable[nn.Parameter], land_it: Land) -> None:
    """Make the first touch call ``land_it(parameter)``, which must call :func:`make_plain` when it has landed.

    Until then other threads that touch it call ``land_it`` too, and whatever lands it must do so under
    ``DisableTorchFunctionSubclass``, or return from a call within the call without having called it.
    """
    if not classes.others_yield:
        classes.make_others_yield()
    for parameter in parameters:
        parameter._poseidon_land = land_it  # type: ignore[attr-defined]
        if not isinstance(parameter, Pending):
            parameter.__class__ = mixed(Pending, type(parameter))


def make_plain(parameters: Iterable[nn.Parameter]) -> None:
    """Restore the parameters' own class."""
    for parameter in parameters:
        if isinstance(parameter, Pending):
            parameter.__class__ = type(parameter).__bases__[1]
            del parameter._poseidon_land


def land(*values: Any) -> bool:
    """Land the pending parameters among ``values`` and inside them; return whether all have landed.

    One that this very thread is landing has not.
    """
    has_landed = True
    for value in values:
        if isinstance(value, Pending):
            land_it = getattr(value, "_poseidon_land", None)
            if land_it is not None:  # or another thread has landed it just now
                land_it(value)
                has_landed &= not isinstance(value, Pending)
        elif type(value) in (tuple, list):  # such as strides
            has_landed &= land(*value)
        elif not isinstance(value, _LEAVES):
            has_landed &= land(*(leaf for leaf in tree_leaves(value) if isinstance(leaf, Pending)))
    return has_landed
