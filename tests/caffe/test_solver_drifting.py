"""Several workers train one net with bounded staleness."""

from __future__ import annotations

import numpy as np
import pytest
from shared_rows import knowing_the_layer, shared_rows, values, write_solver  # noqa: F401 - a fixture

import poseidon.caffe as caffe
from poseidon.caffe.drifting import Drifting
from poseidon.engine.relaxed import Shared
from poseidon.errors import UnsupportedError
from ranks import run_ranks

STEPS = 6


def train(path, staleness, model):
    solver = caffe.get_solver(path, lambda s: Drifting(s.net, staleness, model, 60))
    solver.step(STEPS)
    workers = solver._workers
    with pytest.raises(UnsupportedError, match="in the middle of training"):
        solver.restore("any.solverstate" if not workers.is_root else solver_state(solver))
    solver.close()
    return values(solver.net), dict(workers._table.staleness_seen), workers._job.losses


def solver_state(solver):
    solver.snapshot()
    return f"{solver.param.snapshot_prefix}_iter_{solver.iter}.solverstate"


def train_and_count(path):
    changes = []
    share = Shared.share

    def counted(self, ledger):
        changes.append((ledger.read() - self._seen).astype(np.float64))
        share(self, ledger)

    Shared.share = counted
    solver = caffe.get_solver(path, lambda s: Drifting(s.net, 0, "SSP", 60))
    start = solver._workers._ledger().read()
    solver.step(STEPS)
    end = solver._workers._ledger().read()
    solver.close()
    return start, sum(changes), end


def test_every_change_of_every_worker_counts_once(tmp_path):
    (start, first, end), (_, second, other) = run_ranks(
        knowing_the_layer, 2, train_and_count, str(write_solver(tmp_path, 6, ""))
    )
    # With staleness 0 the last read waits for everybody's last update, and none comes after it.
    for got in (end, other):
        np.testing.assert_allclose(got, start + (first + second) / 2, rtol=1e-5, atol=1e-6)
    assert not np.allclose(first, second), "each has data of its own"
    assert not np.allclose(start, end)


@pytest.mark.parametrize("model", ["SSPPush", "SSPAggr"])
def test_no_read_is_staler_than_allowed_and_everybody_learns(tmp_path, model):
    path = str(write_solver(tmp_path, 6, ""))
    start = values(caffe.get_solver(path).net)
    results = run_ranks(knowing_the_layer, 3, train, path, 2, model)
    for got, seen, losses in results:
        assert max(seen) <= 2
        assert losses == {}
        assert not np.allclose(got["ip1"][0], start["ip1"][0])
