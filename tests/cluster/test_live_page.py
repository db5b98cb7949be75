"""The page of a job on four machines in a real browser: while it trains, during faults, and after its end.

``POSEIDON_PICTURES=folder`` keeps pictures of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sshd import serving

from browser import browsing, text_of, until, why_no_browser
from poseidon.job import members
from poseidon.lab import Lab

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "there is a browser"),
]
HOSTS = [f"machine{number}" for number in range(4)]
PROGRAM = """
import sys, time, torch, poseidon
poseidon.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
model = poseidon.DistributedDataParallel(net, trials=False)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(10**6):
    loss = model(torch.randn(16, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if step % 20 == 0:
        print("step", step, "loss", loss.item(), flush=True)
"""


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve a run's page on this machine, as a person does; yield its address."""
    command = [sys.executable, "-m", "poseidon", "page", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as page:
        try:
            assert page.stdout is not None
            found = next(filter(None, (re.search(r"http://\S+", line) for line in page.stdout)))
            yield found[0]
        finally:
            page.send_signal(signal.SIGINT)


def keep(driver: Any, name: str) -> None:
    folder = os.environ.get("POSEIDON_PICTURES")
    if folder:
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def worker_on(lab: Lab, machine: int) -> int:
    """Return the process that trains on a machine: the one whose command ends in the program's name."""
    for pid in lab.processes(machine):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if words[-1].endswith(b"train.py") and b"python" in words[0] and b"poseidon" not in words:
            return pid
    raise AssertionError(f"nothing trains on machine{machine}")


def test_a_job_on_four_machines_is_seen_in_a_browser_until_a_worker_is_killed(tmp_path: Path) -> None:
    program, run = tmp_path / "train.py", tmp_path / "run"
    program.write_text(PROGRAM)
    with Lab(machines=4, rate="1gbit") as lab, serving(lab, tmp_path) as ssh:
        command = [sys.executable, "-m", "poseidon", "run", "--log-dir", str(run), "--hosts", ",".join(HOSTS)]
        env = {**os.environ, **ssh.env, "OMP_NUM_THREADS": "1"}
        with (tmp_path / "said").open("wb") as said:
            job = lab.spawn(0, [*command, str(program)], env=env, stdout=said, stderr=said)
        try:
            until(lambda: run.exists(), 90)
            with browsing(tmp_path / "browser") as driver, served(run) as address:
                driver.get(address)
                until(lambda: text_of(driver, "badge") == "running", 90)
                until(lambda: all(host in text_of(driver, "workers") for host in HOSTS))
                until(lambda: text_of(driver, "links").count("bit/s") == 12)
                until(lambda: "loss" in text_of(driver, "log"))
                for shown in ("speed", "timeline", "memory"):
                    until(lambda shown=shown: driver.execute_script(f"return !!document.querySelector('#{shown} svg')"))
                keep(driver, "live")

                # A machine goes to sleep, and wakes up: the job waits, and goes on.
                lab.pause(2)
                until(lambda: "worker 2 on machine2 has said nothing" in text_of(driver, "verdict"))
                keep(driver, "paused")
                lab.heal(2)
                until(lambda: "machine2 has said nothing" not in text_of(driver, "verdict"))

                os.kill(worker_on(lab, 1), signal.SIGKILL)
                until(lambda: text_of(driver, "badge").startswith("ended with status"))
                assert text_of(driver, "verdict").startswith("machine1: worker 1: it was killed by SIGKILL")
                assert "Before it ended: " in text_of(driver, "verdict")
                assert "worker 1" in text_of(driver, "events")
                keep(driver, "ended")
                assert driver.get_log("browser") == []
            assert job.wait(60) != 0
        finally:
            job.kill()
            members.kill_all(lambda: lab.processes(0))
