import json
import subprocess
import sys

import pytest

from poseidon.lab import Lab

pytestmark = pytest.mark.cluster

SCRIPT = """
import json
from poseidon.job.interfaces import address_of, interface_with, read_interfaces
outside = [one for one in read_interfaces() if not one.is_loopback]
print(json.dumps([[one.name, one.address, one.speed_mbit, address_of(one.name), interface_with(one.address)]
                  for one in outside]))
"""


def test_a_process_in_a_namespace_sees_its_own_interfaces_only():
    with Lab(machines=2, rate="1gbit") as lab:
        for machine in range(2):
            asking = lab.spawn(machine, [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE)
            (found,) = json.loads(asking.communicate(timeout=60)[0])
            name, address = found[0], lab.address(machine)
            # No speed: the lab's links are virtual, and report a constant.
            assert found == [name, address, None, address, name]
