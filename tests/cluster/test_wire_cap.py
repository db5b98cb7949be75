import json
import sys
from pathlib import Path

import pytest

from poseidon.lab import Job, Lab
from poseidon.lab.job import JobOptions

pytestmark = pytest.mark.cluster
CAP_MBIT = 200


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_a_cap_is_kept_at_the_interface(encrypt, tmp_path):
    script = str(Path(__file__).with_name("wire_cap_job.py"))
    command = [sys.executable, script, encrypt, str(CAP_MBIT), str(tmp_path)]
    rates = []
    with Lab(machines=3, rate="1gbit") as lab:
        # A cap must never let more through; that it lets enough through shows when nothing else is in the way.
        while len(rates) < 3 and max(rates, default=0) < 0.95 * CAP_MBIT:
            result = Job(lab, command, JobOptions(timeout_s=60)).run()
            assert result.status == 0, result.reason
            rates.append(json.loads((tmp_path / encrypt).read_text()) / 1e6)
            assert rates[-1] < 1.05 * CAP_MBIT
    assert max(rates) >= 0.95 * CAP_MBIT, rates
    print(f"{max(rates):.1f} Mbit/s")
