"""Real ssh servers on the machines of a lab, with keys and a client configuration made for the test.

::

    with Lab(machines=4) as lab, serving(lab, tmp_path) as ssh:
        lab.spawn(0, [*command, "--hosts", "machine0,machine1"], env={**os.environ, **ssh.env})

``ssh.env`` makes every ssh that Poseidon starts use the test's key and know the machines by name and address. What the
servers start carries the lab's marks, so the tests' check for leftovers sees it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from poseidon.lab import Lab
from poseidon.lab import ssh as lab_ssh

SERVER = lab_ssh.SERVER
PORT = lab_ssh.PORT


@dataclass(frozen=True)
class Ssh:
    """How to reach the machines."""

    config: Path
    """For ``ssh -F``: names machine0, machine1, ... and their addresses."""

    @property
    def env(self) -> dict[str, str]:
        return {"POSEIDON_SSH_OPTIONS": f"-F {self.config}"}


def ensure_sshd() -> str:
    """Install OpenSSH's server where it is missing; return an empty string, or why there is none."""
    if SERVER.exists() and shutil.which("ssh"):
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"no {SERVER}, and only root with apt-get could install openssh-server"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # The package would start a server on the host itself; tests want none there.
    command = "apt-get -qq update; RUNLEVEL=1 apt-get -qq -y install openssh-server openssh-client"
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["sh", "-c", command], env=env, capture_output=True, timeout=100, check=False)
    return "" if SERVER.exists() else "openssh-server could not be installed with apt-get"


@contextlib.contextmanager
def serving(
    lab: Lab, folder: Path, without: tuple[int, ...] = (), login_env: Mapping[str, str] | None = None
) -> Iterator[Ssh]:
    """Run an ssh server on every machine but those ``without``; ``login_env`` is set for all that logs in."""
    reason = ensure_sshd()
    if reason:
        pytest.skip(reason)
    home = folder / "ssh"
    # A home of its own: what the user's shell does at login is slow, and may not like being killed half-way.
    lab_ssh.prepare(lab, home, {"HOME": str(home), **dict(login_env or {})})
    machines = [machine for machine in range(lab.machines) if machine not in without]
    servers = [lab_ssh.start_server(lab, machine, home) for machine in machines]
    try:
        for machine in machines:
            lab_ssh.await_server(lab, machine, home)
        yield Ssh(home / "config")
    finally:
        for server in servers:
            server.kill()
            server.wait()


def start_server(lab: Lab, machine: int, home: Path) -> None:
    """Start a machine's server again after it was killed; the lab ends it."""
    lab_ssh.start_server(lab, machine, home)
    lab_ssh.await_server(lab, machine, home)
