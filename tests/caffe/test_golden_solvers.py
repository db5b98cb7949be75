"""Cases of the kind ``solvers``: parameters after each of ten iterations, and resuming from snapshots."""

from __future__ import annotations

import pytest
from caffe_golden import case_names, check_params, set_params


@pytest.mark.parametrize("case", [pytest.param(("solvers", n), id=n) for n in case_names("solvers")], indirect=True)
def test_solver(case, caffe):
    arrays = case.arrays
    solver = caffe.get_solver("solver.prototxt")
    set_params(solver.net, arrays, "iter0/param/")
    is_snapshot = case.meta.get("check") == "snapshot"
    losses = record_losses(solver.net)
    for k in range(5 if is_snapshot else case.meta["iterations"]):
        case.check(f"lr {k}", solver.lr, arrays["lr"][k])
        losses.clear()
        solver.step(1)
        case.check(f"loss {k}", losses, arrays["loss"][k])
        check_params(case, solver.net, arrays, f"iter{k + 1}/param/")
    if is_snapshot:
        for k in range(6, 11):
            solver.step(1)
            check_params(case, solver.net, arrays, f"uninterrupted/iter{k}/param/")
        for state in ("snap_iter_5.solverstate", "snap_iter_5.solverstate.h5"):
            check_resumed(case, caffe, state)


def check_resumed(case, caffe, state):
    arrays = case.arrays
    solver = caffe.get_solver("solver.prototxt")
    solver.restore(state)
    check_params(case, solver.net, arrays, "resumed/iter5/param/")
    for k in range(5):
        case.check("lr", solver.lr, arrays["resumed/lr"][k])
        solver.step(1)
        check_params(case, solver.net, arrays, f"resumed/iter{6 + k}/param/")


def record_losses(net):
    losses = []
    last = len(net.layers) - 1
    net.after_forward(lambda layer: losses.append(float(net.blobs["loss"].data)) if layer == last else None)
    return losses
