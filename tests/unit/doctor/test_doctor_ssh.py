import pytest

from poseidon.doctor.findings import Severity
from poseidon.doctor.ssh_checks import check_start
from poseidon.launch.hosts import Host

HOST = Host("node1", address="10.0.0.1", user="ann", port=2222, python="/venv/bin/python")
CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("stderr", "check", "fix"),
    [
        ("ssh: Could not resolve hostname node1: Name or service not known", "ssh-name", "/etc/hosts"),
        ("ssh: connect to host 10.0.0.1 port 2222: Connection refused", "ssh-refused", "openssh-server"),
        (
            "No ED25519 host key is known.\nHost key verification failed.",
            "ssh-host-key",
            "ssh-keyscan -p 2222 10.0.0.1",
        ),
        (CHANGED, "ssh-host-key", "ssh-keygen -R '[10.0.0.1]:2222'"),
        ("ann@10.0.0.1: Permission denied (publickey).", "ssh-permission", "ssh-copy-id -p 2222 ann@10.0.0.1"),
        ("WARNING: UNPROTECTED PRIVATE KEY FILE!\nann@10.0.0.1: Permission denied", "ssh-permission", "chmod 600"),
        ("Received disconnect: 2: Too many authentication failures", "ssh-permission", "identity="),
        ("ssh: connect to host 10.0.0.1 port 2222: Connection timed out", "ssh-unreachable", "ping"),
        ("ssh: connect to host 10.0.0.1 port 2222: No route to host", "ssh-unreachable", "ping"),
        ("connect: Network is unreachable", "ssh-unreachable", "ip route get 10.0.0.1"),
        ("no answer within 60 s", "ssh-unreachable", "ssh -p 2222 ann@10.0.0.1 true"),
        ("kex_exchange_identification: banner line contains invalid characters", "ssh", "ssh -v"),
        ("", "ssh", "ssh -v"),
    ],
)
def test_every_refusal_of_ssh_has_a_message_of_its_own(stderr, check, fix):
    finding = check_start(HOST, 255, stderr)
    assert (finding.severity, finding.hosts, finding.check) == (Severity.ERROR, ("node1",), check)
    assert fix in finding.fix
    assert "{" not in finding.fix + finding.seen


@pytest.mark.parametrize(
    ("status", "stderr", "check", "seen"),
    [
        (127, "sh: 1: /venv/bin/python: not found", "python", "no Python at /venv/bin/python"),
        (126, "sh: 1: /venv/bin/python: Permission denied", "python", "no Python at /venv/bin/python"),
        (1, "/venv/bin/python: No module named poseidon", "poseidon", "has no Poseidon"),
        (1, "ModuleNotFoundError: No module named 'poseidon.doctor'", "poseidon", "or an older one"),
        (1, "Traceback\nSyntaxError: invalid syntax", "probe", "SyntaxError"),
        (-9, "", "probe", "status -9"),
    ],
)
def test_what_is_wrong_with_the_python_there(status, stderr, check, seen):
    finding = check_start(HOST, status, stderr)
    assert (finding.severity, finding.hosts, finding.check) == (Severity.ERROR, ("node1",), check)
    assert seen in finding.seen
    assert "/venv" in finding.fix


def test_an_ordinary_host_is_called_by_its_name_and_port_22():
    assert check_start(Host("node1"), 255, "Permission denied (publickey)").fix == "ssh-copy-id -p 22 node1"
