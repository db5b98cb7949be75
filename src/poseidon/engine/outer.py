"""The parameters that all workers share while they take local steps, and the arithmetic of an exchange.

A :class:`Fragment` is a part of the model that is exchanged at once. It keeps the values that all workers agreed on
last, the outer parameters. When it leaves, it has the pseudo-gradient: the outer parameters less the worker's own. Its
mean over the workers is what the outer optimizer steps on; then the worker's own parameters become the outer ones, or
are mixed with them. Nothing here knows of other workers; ``local.py`` exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.errors import ConfigError, unknown_name

Outer = str | Callable[[list[nn.Parameter]], Optimizer] | None
"""What steps the outer parameters: None or "average", "nesterov", or a function that makes an optimizer for them."""

_NAMED: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "average": partial(torch.optim.SGD, lr=1.0),
    "nesterov": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}
_WIDE = {torch.float64: torch.float64}
"""Types in which values are exchanged; all others in float32."""
_DIGEST_MASK = 2**40 - 1
"""So that sums and means of digests are exact, or nearly so, in float64."""

WEIGHT, ACTIVE, DIGEST = range(3)
"""Places in what travels beside a fragment: the worker's weight, whether it still trains, and a sum of bits."""


def check_outer(outer: Outer) -> None:
    """Raise :class:`ConfigError` unless this can make an outer optimizer."""
    if isinstance(outer, str) and outer not in _NAMED:
        raise unknown_name("outer", outer, tuple(_NAMED))
    if outer is not None and not isinstance(outer, str) and not callable(outer):
        raise ConfigError(
            f"outer is {outer!r}; expected {', '.join(map(repr, _NAMED))} or a function that makes an optimizer: "
            "lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)"
        )


def make_outer(outer: Outer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of the outer parameters."""
    make = _NAMED[outer or "average"] if outer is None or isinstance(outer, str) else outer
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"outer made a {type(made).__name__}; it must make a torch.optim.Optimizer")
    return made


Read = Callable[[], Tensor]
"""Returns a tensor of the model as it is now."""


class Stack:
    """Tensors of one device that are exchanged in one type: the values agreed on, and what travels, each flat."""

    def __init__(self, tensors: Sequence[Read], may_be_infinite: bool = False) -> None:
        self._tensors = list(tensors)
        self._may_be_infinite = may_be_infinite
        now = [read() for read in self._tensors]
        self.dtype = _WIDE.get(now[0].dtype, torch.float32)
        size = sum(tensor.numel() for tensor in now)
        self.agreed = torch.empty(size, dtype=self.dtype, device=now[0].device)
        """What all workers hold alike."""
        self.moving = torch.zeros_like(self.agreed)
        """The pseudo-gradient, then its mean."""
        shapes = [tensor.shape for tensor in now]
        self.agreed_parts = _views(self.agreed, shapes)
        self.moving_parts = _views(self.moving, shapes)

    @property
    def own(self) -> list[Tensor]:
        """The worker's own values."""
        return [read().detach() for read in self._tensors]

    def adopt(self, only: Collection[int] | None = None) -> bool:
        """Agree on the worker's own values, or on those of these tensors, by id(); return whether that is all."""
        now = [read() for read in self._tensors]
        chosen = [place for place, tensor in enumerate(now) if only is None or id(tensor) in only]
        if chosen:
            parts, own = [self.agreed_parts[place] for place in chosen], [now[place].detach() for place in chosen]
            torch._foreach_copy_(parts, own)
        return len(chosen) == len(now)

    def collect(self, weight: float) -> None:
        """Put the pseudo-gradient into :attr:`moving`, times this worker's weight."""
        if not weight:
            self.moving.zero_()
            return
        torch._foreach_copy_(self.moving_parts, self.own)
        torch.sub(self._base(), self.moving, out=self.moving)
        if weight != 1.0:
            self.moving.mul_(weight)

    def absorb(self) -> None:
        """Agree on the mean of all workers' values, given that of their changes."""
        torch.sub(self._base(), self.moving, out=self.agreed)

    def _base(self) -> Tensor:
        """Return what changes are counted from: where that is infinite, as in a mask or a least value, from 0."""
        if not self._may_be_infinite:
            return self.agreed
        return self.agreed.masked_fill(self.agreed.isfinite().logical_not_(), 0.0)

    def mix(self, kept: float) -> None:
        """Set the worker's own values to those agreed on, or to a mean in which its own have the weight ``kept``."""
        if not kept:
            torch._foreach_copy_(self.own, self.agreed_parts)
            return
        for own, agreed in zip(self.own, self.agreed_parts, strict=True):
            own.mul_(kept).add_(agreed.to(own.dtype), alpha=1 - kept)


class Fragment:
    """A part of the model that is exchanged at once; the module's docstring says how."""

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Read]) -> None:
        self.name = name
        groups = _grouped({each: partial(_itself, parameter) for each, parameter in parameters.items()})
        self._values = [Stack(list(group.values())) for group in groups]
        self.names = [each for group in groups for each in group]
        extra = _grouped(buffers)
        self._buffers = [Stack(list(group.values()), may_be_infinite=True) for group in extra]
        self._buffer_names = [each for group in extra for each in group]
        self._stacks = [*self._values, *self._buffers]
        self.outer = [nn.Parameter(part) for stack in self._values for part in stack.agreed_parts]
        """The outer parameters, in the memory of the values agreed on."""
        self.note = torch.zeros(3, dtype=torch.float64, device=self.outer[0].device)
        """What travels beside the values: see :data:`WEIGHT`, :data:`ACTIVE`, :data:`DIGEST`."""
        self._digest: Tensor | None = None
        self.adopt()

    @property
    def flats(self) -> list[Tensor]:
        """Everything that travels; each becomes its mean over the workers."""
        return [*(stack.moving for stack in self._stacks), self.note]

    @property
    def value_places(self) -> range:
        """Which of :attr:`flats` hold changes of parameters, not of buffers."""
        return range(len(self._values))

    @property
    def size_bytes(self) -> int:
        """Bytes that travel, apart from the note."""
        return sum(stack.moving.numel() * stack.moving.element_size() for stack in self._stacks)

    @torch.no_grad()
    def adopt(self, only: Collection[int] | None = None) -> bool:
        """Agree on the worker's own values, or on those of these tensors; return whether these are all parameters."""
        for stack in self._buffers:
            stack.adopt(only)
        adopted = [stack.adopt(only) for stack in self._values]
        return all(adopted)

    @torch.no_grad()
    def collect(self, weight: float, is_active: bool, checks: bool) -> None:
        """Make what leaves: the pseudo-gradient times this worker's weight, and the note."""
        for stack in self._stacks:
            stack.collect(weight)
        self._digest = _digest([stack.agreed for stack in self._values], self.note.device) if checks else None
        self.note.copy_(torch.tensor([weight, float(is_active), 0.0], dtype=torch.float64, device="cpu"))
        if self._digest is not None:
            self.note[DIGEST] = self._digest

    @torch.no_grad()
    def absorb(self, outer: Optimizer) -> None:
        """Step the outer parameters on the mean that has arrived, to which some worker has contributed."""
        weight = self.note[WEIGHT]
        for stack in self._stacks:
            stack.moving.div_(weight.to(stack.moving.device))
        for stack in self._buffers:
            stack.absorb()
        means = [part for stack in self._values for part in stack.moving_parts]
        for parameter, mean in zip(self.outer, means, strict=True):
            parameter.grad = mean
        outer.step()
        for parameter in self.outer:
            parameter.grad = None

    @torch.no_grad()
    def mix(self, kept: float) -> None:
        """Set the worker's own values to those agreed on, or to a mean in which its own have the weight ``kept``."""
        for stack in self._stacks:
            stack.mix(kept)

    def has_weight(self) -> bool:
        """Return whether any worker has contributed to what has arrived. Waits for the device."""
        return bool(self.note[WEIGHT] > 0)

    def has_active(self) -> bool:
        """Return whether any worker still trains, according to what has arrived. Waits for the device."""
        return bool(self.note[ACTIVE] > 0)

    def is_agreed(self, workers: int) -> bool:
        """Return whether all workers held the same outer parameters when this left. Waits for the device."""
        if self._digest is None:
            return True
        # Where the workers of a machine divide first, the mean of equal digests may be a rounding off.
        return bool((self.note[DIGEST] - self._digest).abs() * workers < 0.5)

    def agreed(self) -> dict[str, Tensor]:
        """Return what all workers hold alike, by name; half precision is kept in float32."""
        values = {name: outer.detach() for name, outer in zip(self.names, self.outer, strict=True)}
        parts = [part for stack in self._buffers for part in stack.agreed_parts]
        return {**values, **dict(zip(self._buffer_names, parts, strict=True))}

    def own(self) -> dict[str, Tensor]:
        """Return the worker's own values, by name."""
        values = [own for stack in self._stacks for own in stack.own]
        return dict(zip((*self.names, *self._buffer_names), values, strict=True))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _grouped(tensors: Mapping[str, Read]) -> list[dict[str, Read]]:
    """Group tensors that can lie in one flat tensor."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Read]] = {}
    for name, read in tensors.items():
        now = read()
        groups.setdefault((_WIDE.get(now.dtype, torch.float32), now.device), {})[name] = read
    return list(groups.values())


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _digest(flats: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a number that equal values have in common, for sums in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        bits = flat.view(torch.int64 if flat.dtype is torch.float64 else torch.int32)
        total += bits.sum(dtype=torch.int64).bitwise_and(_DIGEST_MASK).to(device)
    return total
