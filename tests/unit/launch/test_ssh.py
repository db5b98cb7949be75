from __future__ import annotations

import getpass
import shlex
import socket
import sys

import pytest

from poseidon.errors import ConfigError
from poseidon.launch.hosts import Host
from poseidon.launch.ssh import SshSettings, explain, is_here, remote_python, ssh_arguments, start_command


def test_a_plain_host_is_reached_as_ssh_is_configured() -> None:
    words = ssh_arguments(Host("node1"), ["echo", "two words", "$HOME"])
    assert words[0] == "ssh"
    assert words[-3:] == ["--", "node1", "echo 'two words' '$HOME'"]
    assert "BatchMode=yes" in words
    assert not {"-p", "-i", "-l"} & set(words)


def test_what_the_host_says_becomes_options() -> None:
    host = Host("node1", address="10.0.0.1", user="ann", port=2222, identity="/k")
    words = ssh_arguments(host, ["true"], SshSettings(extra=("-F", "cfg")))
    text = shlex.join(words)
    for part in ("-p 2222", "-i /k", "-l ann", "-F cfg", "-- 10.0.0.1 true"):
        assert part in text


def test_a_home_directory_is_left_to_the_remote_shell() -> None:
    assert ssh_arguments(Host("a"), ["~/my env/bin/python", "~x"])[-1] == "~/'my env/bin/python' '~x'"


def test_the_remote_interpreter() -> None:
    assert remote_python(Host("a"), "/job") == sys.executable
    assert remote_python(Host("a", python="python3"), "/job") == "python3"
    assert remote_python(Host("a", python=".venv/bin/python"), "/job") == "/job/.venv/bin/python"
    assert remote_python(Host("a", python="~/v/bin/python"), "/job") == "~/v/bin/python"


def test_more_options_come_from_the_environment() -> None:
    assert SshSettings.from_environment({"POSEIDON_SSH_OPTIONS": "-F 'my config'"}).extra == ("-F", "my config")
    with pytest.raises(ConfigError, match="POSEIDON_SSH_OPTIONS is"):
        SshSettings.from_environment({"POSEIDON_SSH_OPTIONS": "'"})


def test_ssh_that_is_not_installed_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no-such-ssh is not installed"):
        start_command(Host("a"), ["true"], settings=SshSettings(program="no-such-ssh"))


def test_only_this_machines_own_addresses_are_here() -> None:
    assert is_here(Host("localhost"))
    assert is_here(Host("127.0.0.1"))
    assert is_here(Host("me", address=socket.gethostbyname("localhost")))
    assert not is_here(Host("192.0.2.77"))
    assert not is_here(Host("no-such-host.invalid"))
    assert not is_here(Host("localhost", user="somebody")), "another user needs a login"
    assert is_here(Host("localhost", user=getpass.getuser()))


@pytest.mark.parametrize(
    ("status", "stderr", "match"),
    [
        (255, "ssh: Could not resolve hostname node1: Name or service not known", "name is not known here"),
        (255, "ssh: connect to host node1 port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: connect to host node1 port 22: Connection timed out", "nothing answers"),
        (255, "ssh: connect to host node1 port 22: No route to host", "off or unplugged"),
        (255, "No ED25519 host key is known for node1 and you have requested strict checking.\n"
              "Host key verification failed.", "log in once by hand to accept it: ssh ann@node1"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         "ssh-keygen -R node1"),
        (255, "ann@node1: Permission denied (publickey,password).", "ssh-copy-id ann@node1"),
        (255, "kex_exchange_identification: something new", "cannot reach node1 by ssh: kex_exchange"),
        (127, "bash: line 1: /opt/py: No such file or directory", "node1 has no Python at /opt/py"),
        (1, "/opt/py: No module named poseidon", "/opt/py on node1 has no Poseidon"),
        (3, "", "ended with status 3"),
    ],
)  # fmt: skip
def test_failures_are_explained(status: int, stderr: str, match: str) -> None:
    text = explain(Host("node1", user="ann", python="/opt/py"), status, stderr)
    assert match in text
    assert "node1" in text
    assert "\n" not in text
