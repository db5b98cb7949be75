"""Which distributed model steps the parameters in which memory after ``step()``: if two did, steps would be lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from poseidon.errors import UnsupportedError
from poseidon.routes.base import LiveUnit

_CLAIMS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By the address of a parameter's memory: who writes there."""


def claim_memory(claimant: object, units: Sequence[LiveUnit], is_served: bool) -> Callable[[], None]:
    """Claim the memory of all parameters, or raise if another claimant has it; return what ends that.

    ``is_served``: no two parameters may share it either, since owners write each of them.
    """
    here: dict[int, tuple[str, nn.Parameter]] = {}
    for unit in units:
        for spec, parameter in zip(unit.spec.parameters, unit.parameters, strict=True):
            place = parameter.data_ptr()
            if not parameter.numel():
                continue
            name, other = here.setdefault(place, (spec.name, parameter))
            if is_served and other is not parameter:
                raise UnsupportedError(
                    f'{name} and {spec.name} are two parameters in one memory, which update="server" would write '
                    "twice; let both modules have the same nn.Parameter"
                )
            if _CLAIMS.get(place, claimant) is not claimant:
                raise UnsupportedError(
                    f"{name} belongs to another model that distribute() was called with, whose steps are taken when "
                    "somebody needs them: put all that shares parameters into one model, close() the other one, or use "
                    "poseidon.DistributedDataParallel for both"
                )
    _CLAIMS.update(dict.fromkeys(here, claimant))

    def end() -> None:
        for place in here:
            _CLAIMS.pop(place, None)

    return end
