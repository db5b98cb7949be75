"""Which changes to send first when there is bandwidth to spare. Pure."""

from __future__ import annotations

import numpy as np

from poseidon.wire.formats import Array


def most_changed(changes: Array, sizes: Array, count: int) -> Array:
    """Return the positions of the ``count`` rows with the largest relative change, largest first.

    ``changes`` and ``sizes`` hold, for each row, how much of it is waiting to be sent and how large it is. A row that
    is zero and changes at all comes before any other; rows that do not change are left out; ties go to the lower
    position.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(changes > 0, changes / sizes, -1.0)
    order = np.argsort(-relative, kind="stable")[:count]
    chosen: Array = order[relative[order] > 0]
    return chosen
