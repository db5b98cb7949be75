"""Checks during training that all workers hold the same parameters, so that no divergence stays unnoticed.

Every few steps a worker adds up the bits of one part of its parameters, a sixteenth, and a later roll call carries the
sum; unequal sums end the step with an error. The whole model is due in the first step and after a worker loaded a
checkpoint or changed its parameters more often than another did. Sums are taken when a backward begins: the last update
has landed by then, and the next one is not due. On CUDA nothing waits for them, because they are sent two steps later.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = 16
"""Parts of a model; one is due at a time."""
_LAG = 2
"""Steps between a sum and the roll call that carries it: enough for the device to have caught up."""
_MASK = 2**62 - 1
_ALIGNMENT = 8
_version_of = operator.attrgetter("_version")


@dataclass(frozen=True)
class Stretch:
    """Some bytes of one parameter."""

    parameter: int
    start: int
    stop: int


def stretches_of(sizes: Sequence[int], part: int, parts: int = PARTS) -> list[Stretch]:
    """Return what one of ``parts`` equal parts covers, given the parameters' sizes in bytes. Pure."""
    total = sum(sizes)
    found, begin = [], 0
    for parameter, size in enumerate(sizes):
        start, stop = (_cut(total * place // parts - begin, size) for place in (part, part + 1))
        if start < stop:
            found.append(Stretch(parameter, start, stop))
        begin += size
    return found


def _cut(place: int, size: int) -> int:
    """Move a cut to where whole values of any type end."""
    return size if place >= size else max(place, 0) // _ALIGNMENT * _ALIGNMENT


class ReplicaCheck:
    """Sums of a worker's parameters, step by step; ``interval`` steps apart, never if that is 0."""

    def __init__(self, parameters: Sequence[Tensor], interval: int) -> None:
        self._parameters = [p for p in parameters if p.layout is torch.strided]
        self._sizes = [p.numel() * p.element_size() for p in self._parameters]
        self._parts: dict[int, list[Stretch]] = {}
        """What the parts cover, once they were due."""
        self._interval = interval
        self._is_full_due = True
        self._last_full = 0
        self._asks = False
        self._versions = self._version()
        self._under_way: deque[Callable[[], int]] = deque([_nothing] * _LAG)

    def ask(self) -> None:
        """Ask all workers to compare the whole model soon."""
        self._asks = True

    def words(self, step: int, is_joined: bool) -> tuple[int, int, bool]:
        """Return what the roll call of a step says of the replicas: a sum, a count of changes, whether all is due.

        The sum is that of an earlier step, and 0 if there was none. A worker that has run out of input (``is_joined``)
        holds old parameters, which it does not compare.
        """
        if not self._interval:
            return 0, 0, False
        stretches: list[Stretch] = []
        if self._is_full_due:
            stretches, self._last_full = stretches_of(self._sizes, 0, 1), step
        elif step % self._interval == 0:
            part = step // self._interval % PARTS
            if part not in self._parts:
                self._parts[part] = stretches_of(self._sizes, part)
            stretches = self._parts[part]
        self._is_full_due = False  # on workers without input too: all must agree on what is due
        self._under_way.append(_nothing if is_joined or not stretches else self._start(stretches))
        version, asks = self._version(), self._asks
        changes, self._versions, self._asks = version - self._versions, version, False
        return self._under_way.popleft()(), changes, asks

    def hear(self, step: int, changes: Sequence[int], asks: Sequence[bool]) -> None:
        """Read what the workers with input said: if they differ in how often parameters changed, look at all.

        Not in every step, should one worker have a reason to change them more often than the others in every step.
        """
        if any(asks) or (len(set(changes)) > 1 and step - self._last_full >= self._interval):
            self._is_full_due = True

    def _version(self) -> int:
        return sum(map(_version_of, self._parameters)) if self._interval else 0

    @torch.no_grad()
    def _start(self, stretches: Sequence[Stretch]) -> Callable[[], int]:
        sums: dict[torch.device, list[Tensor]] = {}
        for stretch in stretches:
            tensor = self._parameters[stretch.parameter]
            sums.setdefault(tensor.device, []).append(_add_bits(_raw(tensor.detach()), stretch.start, stretch.stop))
        return _combined([_fetch(torch.stack(some)) for some in sums.values()])


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Return a number that depends on all bits of some tensors; waits for a device."""
    raw = [_raw(tensor.detach()) for tensor in tensors]
    return _combined([_fetch(_add_bits(flat, 0, flat.nbytes).reshape(1)) for flat in raw])()


def words_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values, as they lie in memory, as whole numbers of their size, flat."""
    flat = _raw(tensor.detach())
    if flat.element_size() not in _WORDS:  # complex128
        flat = torch.view_as_real(flat).flatten()
    return flat.view(_WORDS[flat.element_size()])


def _raw(tensor: Tensor) -> Tensor:
    """Return a tensor's values as they lie in memory, flat, without a copy if they lie close together."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return tensor.contiguous().view(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _add_bits(flat: Tensor, start: int, stop: int) -> Tensor:
    """Return a sum, of 64 bits, that depends on all bits between two bytes of a flat tensor."""
    size = flat.element_size()
    if size not in _WORDS:  # complex128
        flat, size = torch.view_as_real(flat).flatten(), 8
    return flat[start // size : stop // size].view(_WORDS[size]).sum()


def _fetch(sums: Tensor) -> Callable[[], list[int]]:
    """Start to bring sums to the host; the result waits for them."""
    if not sums.is_cuda:
        return sums.tolist
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True, device="cpu")
    host.copy_(sums, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[int]:
        done.synchronize()
        values: list[int] = host.tolist()
        return values

    return wait


def _combined(fetches: Sequence[Callable[[], list[int]]]) -> Callable[[], int]:
    def combine() -> int:
        total = 1
        for fetch in fetches:
            for value in fetch():
                total = (total * 1000003 + value) & _MASK
        return total or 1  # 0 says that there is none

    return combine


def _nothing() -> int:
    return 0
