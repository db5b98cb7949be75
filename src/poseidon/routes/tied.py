"""Step 3, tied: a table that is a linear layer's weight too, as in many language models.

Its gradient is the sum of the rows that look-ups touched and a product of factors. Both travel as they would alone; on
landing the rows are added first, then the product, on all workers alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.factors import FactorsExchanger
from poseidon.routes.rows import RowsExchanger


class TiedExchanger(Exchanger):
    """Exchanges the rows and factors of tied units; calls may come in any order."""

    def __init__(self, context: Context) -> None:
        # A copy has its own connections: a unit's rows and factors do not get into each other's way.
        self._context = replace(context)
        self._rows = RowsExchanger(self._context)
        self._factors = FactorsExchanger(context)

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Make room for the full gradients."""
        self._rows.prepare(items)

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send the touched rows and the factors."""
        rows = self._rows.start(item, brought, step)
        brought[0].has_dense = False  # it travels with the rows
        return _TiedExchange(rows, self._factors.start(item, brought, step))

    def close(self) -> None:
        """Stop the threads of its own connections."""
        self._context.close()


class _TiedExchange(Exchange):
    def __init__(self, rows: Exchange, factors: Exchange) -> None:
        self.flags = rows.flags
        self._rows = rows
        self._factors = factors

    def finish(self, is_used: bool) -> None:
        self._rows.finish(is_used)
        self._factors.finish(is_used)
