"""The system's ssh: its argument list (pure), commands run through it, and what its failures mean (pure).

Secrets never appear in an argument list: a remote program gets them on stdin.
"""

from __future__ import annotations

import getpass
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import ConfigError
from poseidon.job.settings import SSH_OPTIONS
from poseidon.launch.hosts import Host

FAILED = 255
"""Exit status of ssh if it failed itself, rather than the remote program."""


@dataclass(frozen=True)
class SshSettings:
    """How to call ssh, for every host."""

    program: str = "ssh"
    connect_timeout_s: int = 10
    alive_s: int = 4
    """Seconds between ssh's own keep-alive messages; three unanswered ones end the connection."""
    extra: tuple[str, ...] = ()
    """Further arguments for ssh: ``("-F", "my_config")``."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> SshSettings:
        """Return the settings with the arguments from ``POSEIDON_SSH_OPTIONS``."""
        return cls(extra=SSH_OPTIONS.read(environ))


def ssh_arguments(host: Host, remote: Sequence[str], settings: SshSettings | None = None) -> list[str]:
    """Return the argument list that runs ``remote`` on the host. Pure.

    It never prompts for a password (nobody could answer for twenty hosts) and has no terminal.
    """
    settings = settings or SshSettings()
    words = [settings.program, "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={settings.connect_timeout_s}"]
    words += ["-o", f"ServerAliveInterval={settings.alive_s}", "-o", "ServerAliveCountMax=3", *settings.extra]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.identity:
        words += ["-i", str(Path(host.identity).expanduser()), "-o", "IdentitiesOnly=yes"]
    if host.user:
        words += ["-l", host.user]
    # The remote shell splits its command line, so every word is quoted.
    return [*words, "--", host.address, " ".join(map(_remote_word, remote))]


def remote_python(host: Host, directory: str) -> str:
    """Return the interpreter to call on the host; a relative path is below ``directory``. Pure."""
    python = host.python or sys.executable
    if "/" in python and not python.startswith(("/", "~")):
        return f"{directory}/{python}"
    return python


def start_command(host: Host, remote: Sequence[str], settings: SshSettings | None = None) -> subprocess.Popen[bytes]:
    """Start a command on the host with pipes for all its streams, in its own session.

    Otherwise a Ctrl-C on the terminal would cut the connections before the launcher could end the job.
    """
    arguments = ssh_arguments(host, remote, settings)
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except FileNotFoundError:
        raise ConfigError(f"{arguments[0]} is not installed on this machine; install OpenSSH's client") from None


def is_here(host: Host) -> bool:
    """Return whether the host is this machine, which needs no ssh: only a machine's own address can be bound."""
    if host.port is not None or (host.user and host.user != getpass.getuser()):
        return False
    try:
        found = socket.getaddrinfo(host.address, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


_REASONS: tuple[tuple[str, str], ...] = (
    ("could not resolve hostname", "the name is not known here; check the spelling, DNS or /etc/hosts"),
    ("connection refused", "no ssh server listens there; install and start openssh-server, or give its port"),
    ("no route to host", "the machine is off or unplugged, or a firewall rejects ssh"),
    ("network is unreachable", "there is no network path to it from here"),
    ("connection timed out", "nothing answers at this address; is the machine on, is a firewall dropping ssh?"),
    ("no answer within", "the machine accepts connections but does not answer; try `ssh {target} true` by hand"),
    ("remote host identification has changed", "its host key has changed; if that is expected, "
     "run `ssh-keygen -R {address}` and log in once by hand"),
    ("host key verification failed", "its host key is not known yet; log in once by hand to accept it: ssh {target}"),
    ("permission denied", "the login needs a password; run `ssh-copy-id {target}`"),
    ("too many authentication failures", "ssh offers too many keys; name the right one with identity="),
    ("identity file", "the key file does not exist; correct identity="),
)  # fmt: skip


def explain(host: Host, status: int, stderr: str) -> str:
    """Return in one line why a remote command failed, and what to do about it. Pure."""
    target = f"{host.user}@{host.address}" if host.user else host.address
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"ended with status {status}"
    lowered = stderr.lower()
    if status == FAILED:
        for sign, advice in _REASONS:
            if sign in lowered:
                seen = next(line for line in lines if sign in line.lower())
                return f"cannot reach {host.name} by ssh: {advice.format(target=target, address=host.address)} ({seen})"
        return f"cannot reach {host.name} by ssh: {last}"
    python = host.python or sys.executable
    if status in (126, 127):
        return f"{host.name} has no Python at {python} ({last}); give its path there with --python or python="
    if "no module named" in lowered and "poseidon" in lowered:
        return f"{python} on {host.name} has no Poseidon ({last}); install it there or choose another with --python"
    return f"{host.name}: the command there ended with status {status}: {last}"


def _remote_word(word: str) -> str:
    # The shell does not expand a quoted tilde.
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)
