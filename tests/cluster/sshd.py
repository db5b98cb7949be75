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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from poseidon.job import members
from poseidon.lab import Lab, state

SERVER = "/usr/sbin/sshd"
PORT = 22


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
    if Path(SERVER).exists() and shutil.which("ssh"):
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"no {SERVER}, and only root with apt-get could install openssh-server"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # The package would start a server on the host itself; tests want none there.
    command = "apt-get -qq update; RUNLEVEL=1 apt-get -qq -y install openssh-server openssh-client"
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["sh", "-c", command], env=env, capture_output=True, timeout=100, check=False)
    return "" if Path(SERVER).exists() else "openssh-server could not be installed with apt-get"


@contextlib.contextmanager
def serving(
    lab: Lab, folder: Path, without: tuple[int, ...] = (), login_env: Mapping[str, str] | None = None
) -> Iterator[Ssh]:
    """Run an ssh server on every machine but those ``without``; ``login_env`` is set for all that logs in."""
    reason = ensure_sshd()
    if reason:
        pytest.skip(reason)
    home = folder / "ssh"
    home.mkdir(mode=0o700)
    # sshd insists on this folder for its unprivileged half.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True, timeout=20)
    shutil.copy(home / "user_key.pub", home / "authorized_keys")
    # A home of its own: what the user's shell does at login is slow, and may not like being killed half-way.
    marks = {members.LAB_MARK: lab.name, "HOME": str(home), **dict(login_env or {})}
    if state.FOLDER_VARIABLE in os.environ:
        marks[state.FOLDER_VARIABLE] = os.environ[state.FOLDER_VARIABLE]
    _write_server_config(home, marks)
    _write_client_config(home, lab)
    machines = [machine for machine in range(lab.machines) if machine not in without]
    servers = [_spawn_server(lab, machine, home) for machine in machines]
    try:
        for machine in machines:
            _wait_for_server(lab, machine, home)
        yield Ssh(home / "config")
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _spawn_server(lab: Lab, machine: int, home: Path) -> subprocess.Popen[bytes]:
    return lab.spawn(machine, [SERVER, "-D", "-f", str(home / "sshd_config"), "-E", str(home / f"sshd{machine}.log")])


def start_server(lab: Lab, machine: int, home: Path) -> None:
    """Start a machine's server again after it was killed; the lab ends it."""
    _spawn_server(lab, machine, home)
    _wait_for_server(lab, machine, home)


def _write_server_config(home: Path, env: Mapping[str, str]) -> None:
    pairs = " ".join(f'"{name}={value}"' for name, value in env.items())
    (home / "sshd_config").write_text(
        f"Port {PORT}\nHostKey {home}/host_key\nAuthorizedKeysFile {home}/authorized_keys\nPidFile none\n"
        "UsePAM no\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nPrintMotd no\n"
        f"MaxStartups 100\nSetEnv {pairs}\n"
    )


def _write_client_config(home: Path, lab: Lab) -> None:
    key = (home / "host_key.pub").read_text().strip()
    lines = [f"machine{number},{lab.address(number)} {key}\n" for number in range(lab.machines)]
    (home / "known_hosts").write_text("".join(lines))
    blocks = [f"Host machine{number}\n  HostName {lab.address(number)}\n" for number in range(lab.machines)]
    (home / "config").write_text(
        "".join(blocks)
        + f"Host *\n  IdentityFile {home}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {home}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
    )


def _wait_for_server(lab: Lab, machine: int, home: Path) -> None:
    """Return when the machine's server greets; asked from the machine itself."""
    code = f"import socket; s = socket.create_connection(('{lab.address(machine)}', {PORT}), 2); print(s.recv(4))"
    deadline = time.monotonic() + 20
    while True:
        probe = lab.spawn(machine, ["python3", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        out, _ = probe.communicate(timeout=10)
        if b"SSH-" in out:
            return
        if time.monotonic() > deadline:
            log = home / f"sshd{machine}.log"
            raise AssertionError(
                f"sshd on machine {machine} does not answer: {log.read_text() if log.exists() else ''}"
            )
