"""The touched rows of several tables as one part of bytes, and their means in one piece of memory.

What a step does with one table costs a dozen small operations, and on a GPU a wait for the device, whatever the number
of rows. So tables of equal width and type count as one: the rows of each are numbered after those of the table before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from poseidon.routes.base import LiveUnit
from poseidon.routes.shortening import find_repeats
from poseidon.sums.events import record
from poseidon.team.tensors import in_a_row

Part = tuple[Tensor, Tensor]
"""What one worker brought: the rows' numbers, ascending, and their values."""

_INDEX_BYTES, _WHICH_BYTES = 8, 4
_LARGEST_BYTES = 1 << 30
"""Of a group's full gradients: their memory is free only once nobody refers to any of them."""
_WIDE = torch.float32
_LONGEST_PAUSE = 255
"""Steps without a look for repeated rows, after many in vain."""


@dataclass(frozen=True, eq=False)
class TableGroup:
    """Tables of equal width, type and device."""

    units: tuple[LiveUnit, ...]
    repeats: Repeats | None = None
    """Set if rows that repeat each other are to travel once."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The number of each table's first row; at the end, the number of all rows."""
        return tuple(accumulate((unit.weight.shape[0] for unit in self.units), initial=0))

    @cached_property
    def _bounds(self) -> Tensor:
        return torch.tensor(self.starts[1:], device=self.weight.device)

    @property
    def weight(self) -> Tensor:
        """One of the tables, as an example."""
        return self.units[0].weight

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.weight.shape[1]

    @property
    def _sums_together(self) -> bool:
        """Whether duplicates of all tables are summed in one call: on CUDA each call waits for the device.

        In host memory a call may add duplicates in an order that depends on how many it is given.
        """
        return self.weight.is_cuda

    def join(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the tables' sparse gradients as that of one table, each row once; on CUDA, wait for the device."""
        present = [(start, one) for start, one in zip(self.starts, gradients, strict=False) if one is not None]
        if not present:
            return None
        starts, found = zip(*present, strict=True)
        if not self._sums_together:
            found = tuple(one.coalesce() for one in found)
        if len(self.units) == 1:
            joined: Tensor = found[0].coalesce()
            return joined
        indices = torch._foreach_add([one._indices() for one in found], list(starts))
        joined = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            torch.cat([one._values() for one in found]),
            (self.starts[-1], self.width),
            is_coalesced=all(one.is_coalesced() for one in found),
            check_invariants=False,
        )
        return joined.coalesce()

    def pack(
        self, gradients: Sequence[Tensor | None], flags: Sequence[int]
    ) -> tuple[Tensor, int, Callable[[], None] | None]:
        """Return a part in host memory, how many rows of values it has, and what waits for it if the device fills it.

        A part holds each table's flags and where its rows end, the rows' numbers, and the rows; or the distinct rows,
        and which one of them each is.
        """
        head = torch.tensor(flags, dtype=torch.int64, device="cpu")
        gradient = self.join(gradients)
        if gradient is None:
            return torch.cat([head, torch.zeros_like(head)]).view(torch.uint8), 0, None
        indices, values = gradient._indices()[0], gradient._values()
        fields = [self._ends(indices), indices, values]
        if self.repeats is not None and (found := self.repeats.find(values)) is not None:
            fields[2:] = found
        host, settle = _to_host(head.view(torch.uint8), [_as_bytes(field) for field in fields])
        return host, len(fields[2]), settle

    def read_head(self, part: Tensor) -> tuple[list[int], list[int]]:
        """Return each table's flags in a part, and where its rows begin and end."""
        tables = len(self.units)
        words: list[int] = part[: 2 * tables * _INDEX_BYTES].view(torch.int64).tolist()
        return words[:tables], [0, *words[tables:]]

    def unpack(self, part: Tensor, count: int, distinct: int) -> Part:
        """Return the numbers and the values of the rows in a part."""
        sizes = [count * _INDEX_BYTES, distinct * self.width * self.weight.element_size(), count * _WHICH_BYTES]
        aligned = (-(-size // _INDEX_BYTES) * _INDEX_BYTES for size in sizes)
        first, second, third, _ = accumulate(aligned, initial=2 * len(self.units) * _INDEX_BYTES)
        indices = part[first:second].view(torch.int64)
        values = part[second : second + sizes[1]].view(self.weight.dtype).view(distinct, self.width)
        if distinct < count:
            values = values.index_select(0, part[third : third + sizes[2]].view(torch.int32))
        return indices, values

    def parts_of(self, table: int, parts: Sequence[Part], ends: Sequence[Sequence[int]]) -> list[Part]:
        """Return what the workers brought for one table; its rows are numbered from 0."""
        start = self.starts[table]
        cuts = [slice(each[table], each[table + 1]) for each in ends]
        return [
            (indices[cut] - start if start else indices[cut], values[cut])
            for (indices, values), cut in zip(parts, cuts, strict=True)
        ]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return each table's rows of a tensor that holds all; none is a view of it, but they share its memory."""
        return [flat[start:stop].data for start, stop in pairwise(self.starts)]

    def sparse_means(self, parts: Sequence[Part], ends: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return each table's mean as a sparse gradient."""
        if not self._sums_together or len(self.units) == 1:
            own = (self.parts_of(table, parts, ends) for table in range(len(self.units)))
            return [_sparse_mean(unit.weight.shape, mine) for unit, mine in zip(self.units, own, strict=True)]
        mean = _sparse_mean((self.starts[-1], self.width), parts)
        cuts = [slice(*pair) for pair in pairwise([0, *self._ends(mean._indices()[0]).tolist()])]
        numbers = torch._foreach_sub([mean._indices()[:, cut] for cut in cuts], list(self.starts[:-1]))
        values = [mean._values()[cut] for cut in cuts]
        return [
            torch.sparse_coo_tensor(one, rows, unit.weight.shape, is_coalesced=True, check_invariants=False)
            for unit, one, rows in zip(self.units, numbers, values, strict=True)
        ]

    def _ends(self, indices: Tensor) -> Tensor:
        """Return how many of the ascending numbers lie before the end of each table."""
        if len(self.units) == 1:
            return torch.full((1,), len(indices), dtype=torch.int64, device=indices.device)
        return torch.searchsorted(indices, self._bounds)


class Repeats:
    """Looks for rows that repeat each other: more and more seldom while there are few."""

    def __init__(self, least_bytes: float = 0.0) -> None:
        self._least_bytes = least_bytes
        self._pause = 0
        self._left = 0

    def find(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the distinct rows and which of them each is; None if ``values`` are to travel as they are."""
        if values.nbytes < self._least_bytes:
            return None
        if self._left:
            self._left -= 1
            return None
        found = find_repeats(values)
        self._pause = 0 if found is not None else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._left = self._pause
        return found


def group_tables(units: Sequence[LiveUnit], is_slow: bool, least_on_device: float = math.inf) -> list[TableGroup]:
    """Return groups of the tables of a shipment, in their order; equal on all workers.

    Repeated rows are looked for in host memory if the link ``is_slow``, and on a device from so many bytes.
    """
    groups: dict[tuple[object, ...], list[list[LiveUnit]]] = {}
    for unit in units:
        weight = unit.weight
        shortens = (is_slow or weight.is_cuda) and _repeats_rows(unit)
        key = (shortens, weight.shape[1], weight.dtype, weight.device, unit.spec.is_sparse)
        found = groups.setdefault(key, [[]])
        if sum(other.weight.nbytes for other in found[-1]) + weight.nbytes > _LARGEST_BYTES:
            found.append([])
        found[-1].append(unit)
    return [
        TableGroup(tuple(tables), Repeats(least_on_device if tables[0].weight.is_cuda else 0.0) if shortens else None)
        for (shortens, *_), found in groups.items()
        for tables in found
        if tables
    ]


def add_rows(total: Tensor, parts: Sequence[Part]) -> None:
    """Add the mean of what all workers brought, in rank order."""
    if total.dtype.itemsize < _WIDE.itemsize:
        indices, means = _means(parts)
        total.index_add_(0, indices, means.to(total.dtype))
        return
    for indices, values in parts:
        total.index_add_(0, indices, values, alpha=1 / len(parts))


def _repeats_rows(unit: LiveUnit) -> bool:
    """Return whether many rows of the unit's gradient may be equal: a bag gives all its rows the same one."""
    module = unit.module
    return isinstance(module, nn.EmbeddingBag) and module.mode != "max"


def _means(parts: Sequence[Part]) -> Part:
    """Return the touched rows' numbers and means; added in float32, so that short types are rounded only once."""
    touched, places = torch.unique(torch.cat([indices for indices, _ in parts]), return_inverse=True)
    sums = torch.zeros(touched.numel(), parts[0][1].shape[1], dtype=_WIDE, device=touched.device)
    for (_, values), where in zip(parts, places.split([len(indices) for indices, _ in parts]), strict=True):
        sums.index_add_(0, where, values.to(_WIDE))
    return touched, sums / len(parts)


def _sparse_mean(shape: Sequence[int], parts: Sequence[Part]) -> Tensor:
    indices = torch.cat([indices for indices, _ in parts]).unsqueeze(0)
    values = torch.cat([values for _, values in parts]) / len(parts)
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False).coalesce()


def _as_bytes(field: Tensor) -> Tensor:
    """Return a field as bytes; aligned, so that the next one can be read in place."""
    data = in_a_row(field).view(torch.uint8)
    missing = -len(data) % _INDEX_BYTES
    return torch.cat([data, data.new_zeros(missing)]) if missing else data


def _to_host(head: Tensor, fields: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None] | None]:
    """Join bytes in host memory; the returned function, if any, waits until they are there."""
    if not fields[0].is_cuda:
        return torch.cat([head, *fields]), None
    data = torch.cat(list(fields))
    host = torch.empty(len(head) + len(data), dtype=torch.uint8, device="cpu", pin_memory=True)
    host[: len(head)] = head
    host[len(head) :].copy_(data, non_blocking=True)
    return host, record(torch.cuda.current_stream(data.device)).synchronize
