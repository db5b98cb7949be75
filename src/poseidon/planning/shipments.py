"""Which units in a short form share messages. Pure.

A message costs both ends processor time whatever its size: a unit's rows to one peer take a header, a payload, and a
thread on either side that wakes for each. So small units leave together, once the last of them is ready. What takes
long on the wire leaves alone and early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.planning.packing import LARGEST_BUCKET_BYTES

SLOW_BYTES_PER_S = 2e8
"""Links up to this speed are worth the work of leaving out repeated rows and zeros (``routes/shortening.py``)."""
LEAST_SAVED = 0.2
"""Share of the bytes that must be saved by that; for less, the receivers' work is not worth it."""
LEAST_SAVED_S = 5e-4
"""On a faster link, where a device leaves zeros out: less is not worth its work, nor that the host waits for it."""
SLACK = 1.05
"""There, room for values that are not zero: how many there are varies a little from step to step."""
PLACE_BYTES = 4
"""Says for a row which of the distinct ones it is."""
TRIFLE_S = 2e-3
"""Units join until they take so long on the wire together: what they wait for each other may go unhidden."""


def share_without_zeros(filled: float, value_bytes: int) -> float:
    """Return which share of the bytes of factors is sent if zeros are left out; 1 if that would save too little."""
    share = filled + 1 / (8 * value_bytes)
    return share if share <= 1 - LEAST_SAVED else 1.0


@dataclass(frozen=True)
class Sending:
    """What one unit sends by direct messages."""

    place: int
    """Position of the unit in the order in which gradients become ready."""
    route: str
    wire_bytes: float
    """From one machine, to all its peers."""
    is_leaf: bool
    """Nothing is computed from it in backward, as with a table; so the next one is ready at the same time."""


def share_messages(sendings: Sequence[Sending], bytes_per_s: float) -> list[list[int]]:
    """Return which sendings, given in the order they become ready, share messages; each is in one group.

    Leaves that become ready one right after the other do not wait for each other, so they share whatever they weigh.
    """
    groups: list[list[int]] = []
    totals: list[float] = []
    latest: dict[str, int] = {}
    for index, sending in enumerate(sendings):
        at = latest.get(sending.route)
        if at is not None and _joins(sendings[groups[at][-1]], sending, totals[at], bytes_per_s):
            groups[at].append(index)
            totals[at] += sending.wire_bytes
        else:
            latest[sending.route] = len(groups)
            groups.append([index])
            totals.append(sending.wire_bytes)
    return groups


def _joins(last: Sending, sending: Sending, total_bytes: float, bytes_per_s: float) -> bool:
    together = total_bytes + sending.wire_bytes
    if last.is_leaf and sending.is_leaf and sending.place == last.place + 1:
        return together <= LARGEST_BUCKET_BYTES
    return together <= TRIFLE_S * bytes_per_s
