"""Several workers train one net with bounded staleness."""

from __future__ import annotations

import numpy as np
import pytest
from shared_rows import knowing_the_layer, shared_rows, values, write_solver  # noqa: F401 - a fixture

import poseidon.caffe as caffe
from poseidon.caffe.drifting import Drifting
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


def test_without_staleness_workers_equal_one_with_the_total_batch(tmp_path):
    (tmp_path / "alone").mkdir()
    alone = caffe.get_solver(write_solver(tmp_path / "alone", 12, ""))
    alone.step(STEPS)
    want = values(alone.net)
    for got, seen, losses in run_ranks(knowing_the_layer, 2, train, str(write_solver(tmp_path, 6, "")), 0, "SSP"):
        assert set(seen) == {0}
        assert losses == {}
        for name, blobs in want.items():
            for number, blob in enumerate(blobs):
                np.testing.assert_allclose(got[name][number], blob, rtol=2e-4, atol=2e-6, err_msg=f"{name} {number}")


@pytest.mark.parametrize("model", ["SSPPush", "SSPAggr"])
def test_no_read_is_staler_than_allowed_and_everybody_learns(tmp_path, model):
    path = str(write_solver(tmp_path, 6, ""))
    start = values(caffe.get_solver(path).net)
    results = run_ranks(knowing_the_layer, 3, train, path, 2, model)
    for got, seen, losses in results:
        assert max(seen) <= 2
        assert losses == {}
        assert not np.allclose(got["ip1"][0], start["ip1"][0])
