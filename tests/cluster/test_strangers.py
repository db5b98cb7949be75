"""Strangers at every port of a running job: from elsewhere on the network, and from the machines of the job itself.

They learn nothing and change nothing: the losses stay the same, bit for bit, and nothing is left of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eavesdrop import Eavesdropper

import nightly
from poseidon.lab import Job, Lab
from poseidon.lab.environment import WorkerPlace
from poseidon.lab.job import JobOptions

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
ATTACK_S = nightly.amount(3.0, 60.0)
GROWTH_BYTES = 16 << 20
"""Memory that comes and goes by itself: pools, and the allocator's own."""
KINDS = {"silent", "drip", "crowd", "junk", "wrong secret", "replay", "forge", "downgrade", "half"}
LISTENING = "0A"


def listeners(pid: int) -> set[int]:
    """Return the ports on which the machine of a process listens, from the kernel's own list."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


class Siege:
    """A job on the first two machines of a lab; strangers come from the third, and from the first two."""

    def __init__(self, lab: Lab, folder: Path, encrypts: bool) -> None:
        self._lab = lab
        self._folder = folder
        self.lines: list[str] = []
        env = {**os.environ, "POSEIDON_WIRE_ENCRYPT": str(int(encrypts)), "POSEIDON_RUN": "1"}
        command = [sys.executable, str(HERE / "besieged.py"), str(folder)]
        self._job = Job(lab, command, JobOptions(timeout_s=110), env, self._hear)
        # The third machine has no worker.
        self._job.places = [WorkerPlace(machine, 2) for machine in range(2)]
        self.result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._job.run()

    def _hear(self, place: WorkerPlace, line: str) -> None:
        self.lines.append(f"{place.label}: {line}")

    def rounds(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder / str(rank)
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, until: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not until():
            assert self._thread.is_alive(), f"the job ended: {self.result}\n" + "\n".join(self.lines)
            assert time.monotonic() < deadline, f"{what} did not happen:\n" + "\n".join(self.lines)
            time.sleep(0.05)

    def wait_for_rounds(self, more: int) -> None:
        goals = [self._count(rank) + more for rank in range(2)]
        self.wait(lambda: all(self._count(rank) >= goals[rank] for rank in range(2)), f"{more} rounds")

    def _count(self, rank: int) -> int:
        return len(self.rounds(rank)) if (self._folder / str(rank)).exists() else 0

    def ports(self, machine: int) -> set[int]:
        return set().union(*(listeners(pid) for pid in self._lab.processes(machine)[:1]))

    def attack(self, recorded: list[str]) -> list[dict[str, Any]]:
        """Let strangers try all ports from every machine; return what they tell."""
        places = {machine: [(self._lab.address(machine), port) for port in self.ports(machine)] for machine in range(2)}
        assert min(map(len, places.values())) >= 2, places
        processes = []
        for origin, targets in ((0, places[1]), (1, places[0]), (2, places[0] + places[1])):
            plan = self._folder / f"plan{origin}"
            plan.write_text(json.dumps({"places": targets, "recorded": recorded, "seconds": ATTACK_S}))
            command = [sys.executable, str(HERE / "strangers.py"), str(plan)]
            processes.append(self._lab.spawn(origin, command, stdout=subprocess.PIPE))
        outs = [process.communicate(timeout=ATTACK_S + 40)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        return [json.loads(out) for out in outs]

    def end(self) -> None:
        (self._folder / "stop").touch()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.result.status == 0, f"{self.result.reason}\n" + "\n".join(self.lines)


def record(ear: Eavesdropper, ports: set[int], folder: Path) -> list[str]:
    """Write what was said to some ports into files; return their names, a few of the longest and of the shortest."""
    said = [one for flow, ones in ear.streams().items() if flow.target.port in ports for one in ones if one]
    said.sort(key=len)
    paths = []
    for number, one in enumerate([*said[:3], *said[-3:]]):
        paths.append(str(folder / f"recorded{number}"))
        Path(paths[-1]).write_bytes(one)
    return paths


@pytest.mark.parametrize("encrypts", [True, pytest.param(False, marks=nightly.only)], ids=["encrypted", "plain"])
def test_strangers_at_every_port_change_nothing(encrypts: bool, tmp_path: Path) -> None:
    with Lab(machines=3) as lab:
        with Eavesdropper(lab) as ear:
            siege = Siege(lab, tmp_path, encrypts)
            siege.wait_for_rounds(4)
        ports = siege.ports(0) | siege.ports(1)
        recorded = record(ear, ports, tmp_path)
        assert recorded
        before = [siege.rounds(rank)[-1] for rank in range(2)]
        told = siege.attack(recorded)
        attacked = [len(siege.rounds(rank)) for rank in range(2)]
        # All that the strangers left is gone, and training goes on.
        siege.wait(
            lambda: all(siege.rounds(rank)[-1]["files"] <= before[rank]["files"] for rank in range(2)),
            "the end of the strangers' connections",
            limit_s=20,
        )
        siege.wait_for_rounds(2)
        siege.end()
    for one in told:
        assert set(one["attacks"]) == KINDS
        assert one["let in"] == []
        # A challenge, a refused proof; TLS's answer to a greeting, with a certificate that is encrypted.
        assert max(one["longest"].values()) < 2048, one["longest"]
    for rank in range(2):
        rounds = siege.rounds(rank)
        assert attacked[rank] > before[rank]["round"] + 1, "training stood still"
        assert {tuple(one["losses"]) for one in rounds[1:]} == {tuple(rounds[1]["losses"])}
        after = rounds[-1]
        assert Counter(after["threads"]) == Counter(before[rank]["threads"])
        assert after["files"] <= before[rank]["files"]
        assert after["rss"] < before[rank]["rss"] + GROWTH_BYTES
    check_words(siege.lines)
    print(json.dumps(told), *siege.lines, sep="\n")


def check_words(lines: list[str]) -> None:
    """Check that the workers said nothing but, once for each door and reason, that they refused somebody."""
    ours = [line for line in lines if "[W" not in line and "[E" not in line]
    odd = [line for line in ours if "counted from now on" not in line]
    assert not odd, odd
    assert len(ours) <= 60, ours
