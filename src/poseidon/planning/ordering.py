"""The order of collectives when the next forward may begin before all have landed. Pure.

Collectives keep one order on all workers, so it is fixed in advance, by simulating one step with measured times.
"""

from __future__ import annotations

from collections.abc import Sequence


def order_by_need(ready_s: Sequence[float], wire_s: Sequence[float]) -> list[int]:
    """Return the order in which to send items that become ready at ``ready_s`` and take ``wire_s`` each.

    Items are numbered in backward's order, so the next forward needs the last one first. Whenever the wire is free,
    the ready item that is needed soonest leaves; the wire never waits while anything is ready.
    """
    left = set(range(len(ready_s)))
    order: list[int] = []
    now_s = 0.0
    while left:
        ready = [item for item in left if ready_s[item] <= now_s]
        if not ready:
            now_s = min(ready_s[item] for item in left)
            continue
        chosen = max(ready)
        left.remove(chosen)
        order.append(chosen)
        now_s += wire_s[chosen]
    return order
