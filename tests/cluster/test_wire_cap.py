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
    with Lab(machines=3, rate="1gbit") as lab:
        command = [sys.executable, script, encrypt, str(CAP_MBIT), str(tmp_path)]
        result = Job(lab, command, JobOptions(timeout_s=60)).run()
    assert result.status == 0, result.reason
    rate = json.loads((tmp_path / encrypt).read_text())
    assert rate == pytest.approx(CAP_MBIT * 1e6, rel=0.05)
    print(f"{rate / 1e6:.1f} Mbit/s")
