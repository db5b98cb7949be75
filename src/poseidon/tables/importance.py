"""Which changes to send first over idle bandwidth. Pure."""

from __future__ import annotations

import numpy as np

from poseidon.wire.formats import Array


def most_changed(changes: Array, sizes: Array, count: int) -> Array:
    """Return the positions of the ``count`` rows with the largest relative change, largest first.

    ``changes`` and ``sizes`` hold for each row the size of its unsent change and of the row itself. A zero row with any
    change comes first; rows without a change are left out; of equal ones the lower position comes first.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(changes > 0, changes / sizes, -1.0)
    order = np.argsort(-relative, kind="stable")[:count]
    chosen: Array = order[relative[order] > 0]
    return chosen
