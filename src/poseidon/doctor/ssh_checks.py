"""Explains why a host's probe did not start, from the output of ssh or the remote shell. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from poseidon.doctor.findings import Finding, error
from poseidon.launch.hosts import Host
from poseidon.launch.ssh import FAILED


@dataclass(frozen=True)
class _Sign:
    """Words in ssh's error and their meaning; ``{target}``, ``{address}`` and ``{port}`` are the host's."""

    words: str
    check: str
    meaning: str
    fix: str


_SIGNS = (
    _Sign(
        "could not resolve hostname",
        "ssh-name",
        "the name is not known here",
        "echo 'IP-ADDRESS {address}' | sudo tee -a /etc/hosts",
    ),
    _Sign(
        "connection refused",
        "ssh-refused",
        "no ssh server listens at port {port}",
        "on the host: sudo apt install openssh-server && sudo systemctl enable --now ssh",
    ),
    _Sign(
        "remote host identification has changed",
        "ssh-host-key",
        "the host's key has changed",
        "if the host was reinstalled: ssh-keygen -R '{known}' && ssh-keyscan -p {port} {address} >> ~/.ssh/known_hosts",
    ),
    _Sign(
        "host key verification failed",
        "ssh-host-key",
        "the host's key is not known here",
        "ssh-keyscan -p {port} {address} >> ~/.ssh/known_hosts  (compare the key with the host's own)",
    ),
    _Sign(
        "unprotected private key file",
        "ssh-permission",
        "other users can read the private key, so ssh does not use it",
        "chmod 600 {identity}",
    ),
    _Sign(
        "permission denied",
        "ssh-permission",
        "the host does not let {target} in without a password",
        "ssh-copy-id -p {port} {target}",
    ),
    _Sign(
        "too many authentication failures",
        "ssh-permission",
        "ssh offered so many keys that the host gave up",
        "name the right key: identity=~/.ssh/KEY in the host file",
    ),
    _Sign(
        "no route to host",
        "ssh-unreachable",
        "the host is off, unplugged or behind a firewall that rejects ssh",
        "ping -c 3 {address}",
    ),
    _Sign("network is unreachable", "ssh-unreachable", "there is no route to it from here", "ip route get {address}"),
    _Sign(
        "timed out",
        "ssh-unreachable",
        "nothing answers: the host is off, or a firewall drops ssh",
        "ping -c 3 {address}; on the host: sudo ufw allow {port}/tcp",
    ),
    _Sign(
        "no answer within",
        "ssh-unreachable",
        "ssh connects, but no program starts there in time",
        "ssh -p {port} {target} true",
    ),
)


def check_start(host: Host, status: int, stderr: str) -> Finding:
    """Return the finding for a probe that did not start."""
    if status == FAILED:
        return _check_ssh(host, stderr)
    return _check_python(host, status, stderr)


def _check_ssh(host: Host, stderr: str) -> Finding:
    words = {
        "address": host.address,
        "identity": host.identity or "~/.ssh/id_*",
        "known": host.address if host.port is None else f"[{host.address}]:{host.port}",
        "port": host.port or 22,
        "target": f"{host.user}@{host.address}" if host.user else host.address,
    }
    for sign in _SIGNS:
        if sign.words in stderr.lower():
            line = next(line for line in reversed(stderr.splitlines()) if sign.words in line.lower())
            seen = f"{sign.meaning.format(**words)} ({line.strip(' @')})"
            return error(host.name, sign.check, seen, "a login by ssh without a password", sign.fix.format(**words))
    return error(
        host.name,
        "ssh",
        _last_line(stderr) or "ssh failed without a message",
        "a login by ssh without a password",
        "ssh -v -p {port} {target} true".format(**words),
    )


def _check_python(host: Host, status: int, stderr: str) -> Finding:
    python = host.python or sys.executable
    said = _last_line(stderr) or f"status {status}"
    if status in (126, 127):
        return error(
            host.name,
            "python",
            f"no Python at {python} ({said})",
            "a Python with Poseidon installed",
            f"name it with python= in the host file, or there: python3 -m venv {python.removesuffix('/bin/python')}",
        )
    if "no module named" in said.lower():
        return error(
            host.name,
            "poseidon",
            f"{python} there has no Poseidon, or an older one ({said})",
            "Poseidon, in the same version as here",
            f"{python} -m pip install CHECKOUT  (the checkout or wheel that this host uses)",
        )
    return error(
        host.name,
        "probe",
        f"the probe ended with status {status}: {said}",
        "a Python in which Poseidon runs",
        f"there: {python} -m poseidon.doctor.probe",
    )


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""
