"""Which weights travel and lie rounded, with the server's own step: those that the model uses in bf16 anyway.

``served.py`` tells it how the first forward touches parameters, moves the values, and asks it what they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor, nn

from poseidon.engine.engine import Engine
from poseidon.engine.watched import Touch
from poseidon.routes.base import LiveItem


class Rounding:
    """Chooses the parameters that are sent rounded, and knows which of them hold rounded values."""

    def __init__(self) -> None:
        self.candidates: set[nn.Parameter] = set()
        """Parameters that the model only uses rounded..."""
        self.rounded: set[nn.Parameter] = set()
        """... and those of them that hold rounded values at present."""
        self._exact_items: set[LiveItem] = set()
        """Items of rounded parameters that arrive exact from now on."""
        self._exact_rows: dict[nn.Parameter, list[Tensor]] = {}
        """Numbers of rows that hold exact values in a parameter that is rounded otherwise."""
        self._observed: dict[nn.Parameter, set[Touch]] | None = defaultdict(set)
        """How the first forward touches parameters..."""
        self._looked_up: Counter[nn.Parameter] = Counter()
        """... and how many rows it looks up."""

    # The choice.

    @property
    def is_open(self) -> bool:
        """Whether the choice is still to be made, at the end of the first backward."""
        return self._observed is not None

    def observe(self, parameter: nn.Parameter, touch: Touch) -> None:
        """Note a touch, while it may matter."""
        if self._observed is not None:
            self._observed[parameter].add(touch)

    def observe_rows(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Note that rows are looked up, while it may matter."""
        if self._observed is not None:
            self._observed[parameter].add(Touch.ROWS)
            self._looked_up[parameter] += numbers.unique().numel()

    def agree(self, engine: Engine) -> None:
        """Let all workers choose the same parameters. Collective."""
        everybody = engine.team.gather_ints([self._need_of(p) for p in engine.parameters], "how parameters are used")
        columns = dict(zip(engine.parameters, zip(*everybody, strict=True), strict=True))
        self.candidates = {parameter for parameter, column in columns.items() if all(column)}
        engine.mark_rounded(self.candidates, {p for p in self.candidates if 2 in columns[p]})
        self._observed = None

    def _need_of(self, parameter: nn.Parameter) -> int:
        """Return what the first forward needed of a parameter: 0 exact values, 1 rounded ones, 2 some exact rows too.

        Rows pay up to half of them: the exact ones take 32 bits, and rounding saves 16.
        """
        assert self._observed is not None
        touches = self._observed[parameter] & {Touch.ROUNDED, Touch.VALUES, Touch.ROWS}
        if parameter.dtype is not torch.float32 or Touch.ROUNDED not in touches or Touch.VALUES in touches:
            return 0
        if Touch.ROWS not in touches:
            return 1
        is_table = parameter.is_contiguous() and 2 * self._looked_up[parameter] < parameter.shape[0]
        return 2 if is_table else 0

    # What is in place.

    def comes_rounded(self, item: LiveItem) -> bool:
        """Return whether the owners send the weights of an item rounded."""
        return item.parameters[0] in self.candidates and item not in self._exact_items

    def note_landed(self, item: LiveItem) -> None:
        """Note that the weights of an item are in place as its owners sent them."""
        if self.comes_rounded(item):
            self.rounded.update(item.parameters)

    def note_exact(self, item: LiveItem, is_exact_later: bool) -> None:
        """Note that the exact weights of an item are in place, and whether its owners send them exact from now on."""
        self.rounded.difference_update(item.parameters)
        if is_exact_later:
            self._exact_items.add(item)

    def put_rows(self, parameter: nn.Parameter, numbers: Tensor, rows: Tensor) -> None:
        """Put exact rows in place, until the next backward begins."""
        # Not counted as a change: in the lower precision, in which all others use it, it is none.
        parameter.data.index_copy_(0, numbers, rows)
        self._exact_rows[parameter] = [*self._exact_rows.get(parameter, []), numbers]

    def round_rows(self) -> None:
        """Round the rows that were looked up again: all workers hold the same bits when a backward begins."""
        for parameter, looked_up in self._exact_rows.items():
            if parameter in self.rounded:
                numbers, table = torch.cat(looked_up), parameter.data
                table.index_copy_(0, numbers, table[numbers].to(torch.bfloat16).to(table.dtype))
        self._exact_rows.clear()
