"""``close()`` ends in time, whatever has become of the others."""

import os
import sys
import threading
from pathlib import Path

import pytest

import nightly
from poseidon.lab import Job, Lab
from poseidon.lab.job import JobOptions

pytestmark = pytest.mark.cluster

JOB = str(Path(__file__).with_name("closing_job.py"))
STARTUP = str(Path(__file__).parents[1] / "startup")


@pytest.mark.parametrize("fault", ["half_open", pytest.param("kill", marks=nightly.only)])
def test_close_ends_beside_a_peer_that_cannot_answer(fault, tmp_path):
    closed, ready = {}, set()
    is_ready = threading.Event()

    def show(place, line):
        if line == "ready":
            ready.add(place.machine)
        elif line.startswith("closed"):
            _, mode, seconds = line.split()
            closed[place.machine, mode] = float(seconds)
        if len(ready) == 2:
            is_ready.set()

    def strike():
        assert is_ready.wait(60)
        getattr(lab, fault)(1)
        (tmp_path / "go").touch()

    env = {**os.environ, "POSEIDON_WIRE_STREAMS_PER_PEER": "2", "POSEIDON_WIRE_LOST_AFTER_S": "3"}
    env |= {"POSEIDON_TRIALS": "0", "POSEIDON_SECRET": "0123456789abcdef", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH", "")]))
    with Lab(machines=2, rate="1gbit") as lab:
        striker = threading.Thread(target=strike)
        striker.start()
        options = JobOptions(timeout_s=80, stop_on_failure=False)
        Job(lab, [sys.executable, JOB, str(tmp_path / "go")], options, env=env, show=show).run()
        striker.join()
    machines = (0,) if fault == "kill" else (0, 1)
    assert set(closed) == {(machine, mode) for machine in machines for mode in ("sharded", "factors", "server")}
    assert max(closed.values()) < 30
