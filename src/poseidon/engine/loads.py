"""Noticing what is loaded into a model whose workers drift apart: all must go on from that."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.engine.replicas import words_of

_PIECE = 1 << 20
_MASK = 2**62 - 1


@dataclass
class _Loaded:
    tensor: Tensor
    before: int
    """A fingerprint of its values before the first load."""
    load: object
    """What the latest load alone has."""
    times: int = 1


class Loads:
    """Which parameters and buffers of a module got other values from a state dict, from construction to :meth:`close`.

    Values that are put in place for an evaluation, and replaced by one's own again, do not count.
    """

    def __init__(self, module: nn.Module) -> None:
        self._loaded: dict[int, _Loaded] = {}
        hook = _Noticing(self._before_load)
        self._handles = [part.register_load_state_dict_pre_hook(hook) for part in module.modules()]

    @property
    def is_due(self) -> bool:
        """Whether anything was loaded since the last :meth:`take`."""
        return bool(self._loaded)

    def take(self) -> set[int]:
        """Return, by id(), the tensors that got other values since the last call."""
        loaded, self._loaded = self._loaded, {}
        # A single load counts even if it changes nothing here: it may be this worker's state that all have loaded.
        return {number for number, one in loaded.items() if one.times == 1 or fingerprint(one.tensor) != one.before}

    def close(self) -> None:
        """Notice nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._loaded.clear()

    def _before_load(self, part: nn.Module, state: Mapping[str, Any], prefix: str, *rest: object) -> None:
        # The list of its errors: one object for all modules of a load. A tied tensor has several names in one.
        load = rest[-1]
        own = itertools.chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        for name, tensor in own:
            if prefix + name not in state:
                continue
            known = self._loaded.get(id(tensor))
            if known is None:
                self._loaded[id(tensor)] = _Loaded(tensor, fingerprint(tensor), load)
            elif known.load is not load:
                known.load = load
                known.times += 1


class _Noticing:
    """The hook of a module; its copies and files have one that does nothing, and needs no Poseidon."""

    def __init__(self, notice: Callable[..., None]) -> None:
        self._notice = notice

    def __call__(self, *call: Any) -> None:
        self._notice(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class itemgetter: a call of it takes any arguments and has no effect.
        return operator.attrgetter("__class__"), (operator.itemgetter(0),)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Return a number that depends on all values of a tensor, and on their order; waits for a device."""
    total = 1
    for piece in words_of(tensor).split(_PIECE):
        weights = torch.arange(1, 2 * len(piece) + 1, 2, device=piece.device)
        total = (total * 1000003 + int((piece.to(torch.int64) * weights).sum())) & _MASK
    return total
