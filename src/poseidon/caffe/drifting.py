"""Several workers train one Caffe net with bounded staleness: no worker is more than that ahead of the slowest.

Each worker's solver updates its own copy with its own gradients. The change, divided by the number of workers, is
added to a table of the parameter server, and the worker then reads the parameters back from the table
(``engine/relaxed.py``). Displays and tests wait for all workers, because they show means over them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from poseidon.caffe.joined import JoinedWorkers
from poseidon.caffe.net import BuiltNet
from poseidon.caffe.solver.workers import ActionFunction
from poseidon.engine.relaxed import WIDTH, Ledger, Shared
from poseidon.errors import ConfigError, UnsupportedError, unknown_name
from poseidon.ps import Table, connect

log = logging.getLogger("poseidon.caffe")

MODELS = {
    "SSPPush": {"eager": True},
    "SSPAggr": {"eager": True, "managed": True},
    "SSP": {"eager": False},
}
"""The original's consistency models with staleness: servers push changed rows, also use idle bandwidth, or wait for a
read."""


class Drifting(JoinedWorkers):
    """The workers of torch's default process group, each at its own pace (see ``solver/workers.py`` for the calls).

    The constructor is collective: it copies worker 0's parameters and raises if the workers' nets differ.
    """

    def __init__(self, net: BuiltNet, staleness: int, model: str = "SSPPush", timeout_s: float | None = None) -> None:
        if model not in MODELS:
            raise unknown_name("consistency model with staleness", model, tuple(MODELS))
        if not net.learnable:
            raise ConfigError(f"net {net.name!r} learns nothing, so there is nothing to train on several workers")
        super().__init__(net, timeout_s)
        self._staleness = staleness
        self._model = model
        self._job = connect(timeout_s=timeout_s)
        self._table: Table | None = None
        self._shared: Shared | None = None

    # Called by the solver.

    def begin_iteration(self) -> None:
        """Open the table in the first iteration."""
        if self._shared is None:
            ledger = self._ledger()
            # Not earlier: a snapshot may be restored before the first iteration.
            self._table = self._job.table(
                "parameters",
                ledger.rows,
                WIDTH,
                ledger.dtype_name,
                consistency="ssp",
                staleness=self._staleness,
                **MODELS[self._model],
            )
            self._shared = Shared(ledger, self._table, self._team.size)

    def begin_backward(self, is_last: bool) -> None:
        """Do nothing: gradients stay here."""

    def end_iteration(self) -> None:
        """Do nothing: gradients stay here."""

    def end_update(self) -> None:
        """Share what the update changed and read the others' changes; waits for workers that are too far behind."""
        assert self._shared is not None
        self._shared.share(self._ledger())

    def ask(self, wanted: ActionFunction) -> ActionFunction:
        """Return ``wanted`` itself: agreeing in every iteration would keep all workers in step."""
        return wanted

    def take_from_root(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the root's numbers and make the tensors equal to the root's; before the first iteration only."""
        if self._shared is not None:
            raise UnsupportedError("cannot restore a snapshot in the middle of training with staleness; start again")
        return super().take_from_root(numbers, tensors)

    def settle(self) -> None:
        """Do nothing: each worker keeps its own running averages, as it keeps its own parameters."""

    def close(self) -> None:
        """Serve the others until all are done, then leave."""
        self._job.close()
        if self._table is not None:
            seen = ", ".join(f"{behind}: {count}" for behind, count in sorted(self._table.staleness_seen.items()))
            log.info("Rows read at each staleness: %s", seen)
        for worker, clock in self._job.losses.items():
            log.warning("Worker %d was lost after iteration %d; the others continued without it", worker, clock)
        self._team.close()

    def _ledger(self) -> Ledger:
        return Ledger([entry.blob.data_tensor for entry in self._net.learnable])
