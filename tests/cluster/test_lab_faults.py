"""What the lab's faults of links and connections do to plain TCP, seen from both ends."""

import contextlib
import subprocess
import sys
import time

import pytest

from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.lab import Lab, bpf, connections

pytestmark = pytest.mark.cluster

LISTENER = """
import socket
connection = socket.create_server(("0.0.0.0", 5000)).accept()[0]
print("in", flush=True)
try:
    while True:
        data = b""
        while len(data) < 20000:
            more = connection.recv(20000 - len(data))
            if not more:
                raise ConnectionError("ended")
            data += more
        print("ones", sum(byte.bit_count() for byte in data), flush=True)
except OSError as error:
    print("error", error, flush=True)
"""
CALLER = """
import socket, sys
while True:
    try:
        connection = socket.create_connection(("10.77.0.1", 5000))
        break
    except ConnectionRefusedError:
        pass
try:
    for _ in sys.stdin:
        connection.sendall(bytes(20000))
        print("sent", flush=True)
except OSError as error:
    print("error", error, flush=True)
"""

DATAGRAMS = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
    for _ in range(500):
        caller.sendto(bytes(1000), ("10.77.0.1", 6000))
"""


class Pair:
    """Machine 1 sends zeros to machine 0."""

    def __init__(self, lab):
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.listener = lab.spawn(0, [sys.executable, "-c", LISTENER], **options)
        self.caller = lab.spawn(1, [sys.executable, "-c", CALLER], **options)
        assert self.heard() == "in"

    def heard(self):
        return self.listener.stdout.readline().strip()

    def send(self):
        print(file=self.caller.stdin)
        return self.caller.stdout.readline().strip()

    def close(self):
        for process in (self.listener, self.caller):
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


@pytest.fixture
def lab():
    with Lab(machines=2, rate="1gbit") as lab:
        yield lab


@pytest.fixture
def pair(lab):
    with contextlib.closing(Pair(lab)) as pair:
        assert pair.send() == "sent"
        assert pair.heard() == "ones 0"
        yield pair


def test_a_flip_changes_one_bit_unnoticed_by_tcp(lab, pair):
    heard = []
    # TCP sends some packets twice; the copy that comes second is thrown away, and a flip with it.
    while len(heard) < 10 and "ones 1" not in heard:
        with contextlib.closing(lab.flip(1, peer=0, port=5000)) as counter:
            pair.send()
            heard.append(pair.heard())
            assert counter.value == 0
    assert set(heard) <= {"ones 0", "ones 1"}
    assert heard[-1] == "ones 1"
    pair.send()
    assert pair.heard() == "ones 0"


def test_a_flip_spares_other_connections(lab, pair):
    for other in ({"port": 5001}, {"peer": 1}):
        with contextlib.closing(lab.flip(1, **other)) as counter:
            pair.send()
            assert pair.heard() == "ones 0"
            assert counter.value == 1


def test_a_reset_reaches_both_ends(lab, pair):
    assert lab.reset(1, port=5001) == 0
    assert lab.reset(1, peer=0, port=5000) == 1
    assert "reset" in pair.heard()
    assert "abort" in pair.send()
    assert lab.connections(0) == []


def test_what_a_half_open_machine_sends_comes_when_it_is_healed(lab, pair):
    lab.half_open(1)
    before = lab.traffic()[0].received
    assert pair.send() == "sent"
    deadline = time.monotonic() + 10
    while lab.traffic()[1].sent < before + 20000 and time.monotonic() < deadline:
        pass
    assert lab.traffic()[0].received < before + 1000
    assert lab.state.tampered == (1,)
    lab.heal(1)
    assert pair.heard() == "ones 0"
    assert lab.state.tampered == ()


def test_a_slow_link_is_slow_until_it_is_healed(lab, pair):
    def seconds():
        began = time.monotonic()
        for _ in range(25):
            pair.send()
        for _ in range(25):
            assert pair.heard() == "ones 0"
        return time.monotonic() - began

    lab.slow(1)
    # Half a megabyte at 10 Mbit/s, less what a port lets through at once.
    slow = seconds()
    assert slow > 0.2
    lab.heal(1)
    # The best of many: whatever else runs on the machine, some of them get through at full speed.
    assert min(seconds() for _ in range(20)) < slow / 2


def test_a_lossy_machine_loses_the_share_of_its_packets_until_it_is_healed(lab, pair):
    def arriving():
        before = lab.traffic()
        lab.spawn(1, [sys.executable, "-c", DATAGRAMS]).wait()
        # It comes last, in the same queues.
        pair.send()
        assert pair.heard() == "ones 0"
        sent, received = (lab.traffic()[1] - before[1]).sent, (lab.traffic()[0] - before[0]).received
        assert sent > 500_000
        return received / sent

    lab.lossy(1, 0.3)
    assert lab.state.tampered == (1,)
    assert 0.6 < arriving() < 0.8
    lab.heal(1)
    assert lab.state.tampered == ()
    assert arriving() > 0.99


def test_the_command_breaks_and_heals(lab, pair, capsys):
    assert main(["lab", "fault", "flip", "1", "--port", "5000", "--times", "5"]) == 0
    ones = 0
    for _ in range(10):
        pair.send()
        ones += int(pair.heard().split()[1])
    assert 1 <= ones <= 5
    assert main(["lab", "fault", "slow", "1", "--factor", "10"]) == 0
    assert main(["lab", "status"]) == 0
    assert "slowed tampered" in capsys.readouterr().out
    assert main(["lab", "fault", "heal", "1"]) == 0
    assert main(["lab", "fault", "reset", "0"]) == 0
    assert "reset machine0: 1 connections" in capsys.readouterr().out
    assert main(["lab", "fault", "lossy", "1", "--share", "0.01"]) == 0
    assert lab.state.tampered == (1,)
    assert main(["lab", "fault", "heal", "1", "--share", "0.01"]) != 0
    assert "--share goes with lossy, not with heal" in capsys.readouterr().err
    assert main(["lab", "fault", "cut", "1", "--port", "5000"]) != 0
    assert "--port goes with reset, half-open, flip, not with cut" in capsys.readouterr().err
    assert main(["lab", "fault", "reset", "1", "--port", "0"]) != 0
    assert "--port is 0, expected a port from 1 to 65535" in capsys.readouterr().err


def test_what_the_kernel_lacks_is_named(lab, monkeypatch):
    monkeypatch.setitem(bpf._SYSCALL, bpf.platform.machine(), 999999)
    with pytest.raises(ConfigError, match=r"half-open, lossy and flip need CONFIG_BPF_SYSCALL"):
        lab.half_open(1)
    monkeypatch.setattr(connections, "_BY_FAMILY", 99)
    with pytest.raises(ConfigError, match=r"does not list connections .* tcp_diag"):
        lab.reset(1)


def test_a_link_without_a_rate_cannot_become_slower():
    with Lab(machines=1, rate="none") as lab, pytest.raises(ConfigError, match="has no rate"):
        lab.slow(0)
