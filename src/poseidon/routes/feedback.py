"""What lossy routes keep from one step to the next: error feedback, and where low rank begins its search.

Kept by parameter, whatever shares an item with it, so it outlives plans and teams. All of it is in float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.errors import ConfigError, MismatchError
from poseidon.routes.base import LiveItem, LiveUnit


class Feedback:
    """One worker's; whoever exchanges gradients writes it, so read and load it between steps only."""

    def __init__(self) -> None:
        self._names: dict[nn.Parameter, str] = {}
        self._flats: dict[tuple[int, ...], Tensor] = {}
        """By the ids of the parameters that share an item."""
        self._rests: dict[nn.Parameter, Tensor] = {}
        """What the mean still lacks of this worker's gradients: views of these, in the shapes of the parameters."""
        self._base_flats: dict[tuple[int, ...], Tensor] = {}
        """By rank, and the ids of the parameters that are matrices of an item."""
        self._bases: dict[nn.Parameter, Tensor] = {}
        """Where low rank begins its search: views of these."""
        self.exact_steps = 0
        """Steps of the warm-up that were taken; nothing was lost in them."""

    def bind(self, units: Sequence[LiveUnit]) -> None:
        """Learn the names of the parameters."""
        for unit in units:
            for parameter, spec in zip(unit.parameters, unit.spec.parameters, strict=True):
                self._names[parameter] = spec.name

    def flat_of(self, item: LiveItem, device: torch.device) -> Tensor:
        """Return what is kept for an item's parameters, laid out like its bucket; at first zeros."""
        key = tuple(map(id, item.parameters))
        flat = self._flats.get(key)
        if flat is not None and flat.device == device:
            return flat
        assert item.bucket is not None
        flat = torch.zeros(item.item.numel, dtype=torch.float32, device=device)
        for parameter, view in zip(item.parameters, item.bucket.views_of(flat), strict=True):
            if parameter in self._rests:
                view.copy_(self._rests[parameter])
            self._rests[parameter] = view
        mine = set(key)
        self._flats = {other: one for other, one in self._flats.items() if mine.isdisjoint(other)}
        self._flats[key] = flat
        return flat

    def rest_of(self, parameter: nn.Parameter) -> Tensor:
        """Return what is kept of one parameter, to be changed in place."""
        return self._rests[parameter]

    def bases_of(self, matrices: Sequence[tuple[nn.Parameter, int]], rank: int, device: torch.device) -> Tensor:
        """Return the second factors of an item's matrices, one behind the other, from which the next step begins.

        Each has a row for each column of its matrix, and ``rank`` columns. At first all are random, alike everywhere.
        """
        key = (rank, *(id(parameter) for parameter, _ in matrices))
        flat = self._base_flats.get(key)
        if flat is not None and flat.device == device:
            return flat
        flat = torch.empty(rank * sum(columns for _, columns in matrices), dtype=torch.float32, device=device)
        views = flat.split([rank * columns for _, columns in matrices])
        for (parameter, columns), view in zip(matrices, views, strict=True):
            place, base = view.view(columns, rank), self._bases.get(parameter)
            is_new = base is None or base.shape != place.shape
            place.copy_(_draw(self._names[parameter], place.shape) if is_new else base)
            self._bases[parameter] = place
        mine = set(key[1:])
        self._base_flats = {other: one for other, one in self._base_flats.items() if mine.isdisjoint(other[1:])}
        self._base_flats[key] = flat
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Return everything by the parameters' names; the tensors are those in use."""
        return {
            "rests": {self._names[parameter]: rest for parameter, rest in self._rests.items()},
            "bases": {self._names[parameter]: base for parameter, base in self._bases.items()},
            "exact_steps": self.exact_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over, in place; of parameters that it does not name, nothing is kept."""
        self.load_shares([state])

    def load_shares(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the sum of what several workers kept; of none, nothing."""
        for state in states:
            if not {"rests", "bases"} <= set(state):
                raise ConfigError(f"a lossy state has {', '.join(map(str, state)) or 'nothing'}, not rests and bases")
        self.exact_steps = max((state.get("exact_steps", 0) for state in states), default=0)
        for parameter, rest in self._rests.items():
            name = self._names[parameter]
            rest.zero_()
            for state in states:
                if name in state["rests"]:
                    _check_shape(name, state["rests"][name], rest)
                    rest.add_(state["rests"][name].to(rest.device))
        for parameter, base in self._bases.items():
            name = self._names[parameter]
            found = next((state["bases"][name] for state in states if name in state["bases"]), None)
            # Saved for another rank, it is of no use: the search begins anew, as without one.
            base.copy_(_draw(name, base.shape) if found is None or found.shape != base.shape else found)


def _draw(name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def _check_shape(name: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise MismatchError(
            f"the lossy state has {name} of shape {tuple(found.shape)}, but the model's is {tuple(expected.shape)}; "
            "was it saved for another model?"
        )
