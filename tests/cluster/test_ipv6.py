"""Machines that have IPv6 addresses only: ``poseidon run`` over ssh, encrypted and not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sshd import serving

import nightly
from poseidon.lab import Lab
from run_jobs import Started

pytestmark = pytest.mark.cluster

CHANGE = """
import socket, sys
from pyroute2 import IPRoute
with IPRoute() as netlink:
    index = netlink.link_lookup(ifname="eth0")[0]
    netlink.flush_addr(index=index, family=socket.AF_INET)
    # Without the search for duplicates, which takes a second.
    netlink.addr("add", index=index, address=sys.argv[1], prefixlen=64, family=socket.AF_INET6, flags=0x02)
"""
PROGRAM = """
import os, torch, torch.distributed as dist
import poseidon
place = poseidon.init()
torch.manual_seed(place.rank)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
wrapped = poseidon.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    wrapped(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
wrapped.verify_replicas()
print("trained at", os.environ["POSEIDON_WIRE_IP"], wrapped.plan.entries[0].route, flush=True)
wrapped.close()
dist.barrier()
"""


@pytest.mark.parametrize("encrypt", ["1", pytest.param("0", marks=nightly.only)], ids=["encrypted", "plain"])
def test_machines_without_ipv4_train(encrypt: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with Lab(machines=2) as lab:
        for machine in range(2):
            change = lab.spawn(machine, [sys.executable, "-c", CHANGE, f"fd77::{machine + 1}"], stderr=subprocess.PIPE)
            _, problem = change.communicate(timeout=30)
            assert change.returncode == 0, problem.decode()
        lab.address = lambda machine: f"fd77::{machine + 1}"  # type: ignore[method-assign]
        with serving(lab, tmp_path) as ssh:
            words = ["--quiet", "--log-dir", "none", "--hosts", "[fd77::1],[fd77::2]", script]
            env = {**ssh.env, "POSEIDON_WIRE_ENCRYPT": encrypt}
            job = Started(words, tmp_path, env, lambda command, **options: lab.spawn(0, command, **options))
            ended = job.end()
    assert ended.status == 0, ended.err
    for rank in range(2):
        assert f"[{rank} fd77::{rank + 1}] trained at fd77::{rank + 1}" in ended.out, ended.out
