"""Real ssh servers on the machines of a lab, so that what is done on a cluster can be rehearsed.

Keys are made for the lab, and only its machines accept and know them. ``serve`` also makes every ssh on the machines
use them, so that ``ssh machine1`` just works there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from poseidon.errors import ConfigError
from poseidon.job import members
from poseidon.lab import state
from poseidon.lab.cluster import Lab
from poseidon.lab.spec import machine_name

SERVER = Path("/usr/sbin/sshd")
CLIENT_CONFIG = Path("/etc/ssh/ssh_config")
PORT = 22
_ANSWER_S = 20.0
_ASK_S = 0.02


def serve(lab: Lab) -> Path:
    """Start a server on every machine, and make every ssh there use the lab's key; return the client's settings."""
    why = why_not()
    if why:
        raise ConfigError(f"--ssh: {why}")
    home = state.ssh_folder(lab.name)
    prepare(lab, home)
    for machine in range(lab.machines):
        # Popen would warn about a child that is still running, which is intended here: the lab ends it.
        start_server(lab, machine, home).returncode = 0
    for machine in range(lab.machines):
        await_server(lab, machine, home)
    lab.bind(home / "config", CLIENT_CONFIG)
    return home / "config"


def why_not() -> str:
    """Return why there can be no servers here; empty if there can."""
    if os.geteuid() != 0:
        return "sshd needs root"
    if not SERVER.exists() or not CLIENT_CONFIG.exists() or shutil.which("ssh-keygen") is None:
        return f"there is no {SERVER} or no ssh; install OpenSSH (Debian: openssh-server, openssh-client)"
    return ""


def prepare(lab: Lab, home: Path, login_env: Mapping[str, str] | None = None) -> None:
    """Make keys and settings in the folder ``home``; ``login_env`` is set for all that logs in."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700, parents=True)
    # sshd insists on this folder for its unprivileged half.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True, timeout=20)
    shutil.copy(home / "user_key.pub", home / "authorized_keys")
    # What logs in carries the lab's mark, by which the lab ends it.
    marks = {members.LAB_MARK: lab.name, **dict(login_env or {})}
    if state.FOLDER_VARIABLE in os.environ:
        marks[state.FOLDER_VARIABLE] = os.environ[state.FOLDER_VARIABLE]
    _write_server_config(home, marks)
    _write_client_config(home, lab)


def start_server(lab: Lab, machine: int, home: Path) -> subprocess.Popen[bytes]:
    """Start a machine's server; the lab ends it."""
    return lab.spawn(
        machine, [str(SERVER), "-D", "-f", str(home / "sshd_config"), "-E", str(home / f"sshd{machine}.log")]
    )


def await_server(lab: Lab, machine: int, home: Path) -> None:
    """Return when the machine's server greets; asked from the machine itself."""
    deadline = time.monotonic() + _ANSWER_S
    while not _greets(lab, machine):
        time.sleep(_ASK_S)
        if time.monotonic() > deadline:
            log = home / f"sshd{machine}.log"
            said = log.read_text(errors="replace").strip() if log.exists() else "nothing"
            raise ConfigError(
                f"sshd on {machine_name(machine)} does not answer within {_ANSWER_S:g} s; it says: {said}"
            )


def _greets(lab: Lab, machine: int) -> bool:
    try:
        with lab.connect(machine, (lab.address(machine), PORT), timeout_s=2.0) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _write_server_config(home: Path, env: Mapping[str, str]) -> None:
    pairs = " ".join(f'"{name}={value}"' for name, value in env.items())
    (home / "sshd_config").write_text(
        f"Port {PORT}\nHostKey {home}/host_key\nAuthorizedKeysFile {home}/authorized_keys\nPidFile none\n"
        "UsePAM no\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nPrintMotd no\n"
        f"MaxStartups 100\nSetEnv {pairs}\n"
    )


def _write_client_config(home: Path, lab: Lab) -> None:
    key = (home / "host_key.pub").read_text().strip()
    names = {machine_name(number): lab.address(number) for number in range(lab.machines)}
    (home / "known_hosts").write_text("".join(f"{name},{address} {key}\n" for name, address in names.items()))
    blocks = [f"Host {name}\n  HostName {address}\n" for name, address in names.items()]
    (home / "config").write_text(
        "".join(blocks)
        + f"Host *\n  IdentityFile {home}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {home}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
    )
