"""The two ends of a link, joined by loopback inside one process."""

import contextlib
import socket
import threading

import pytest

from poseidon.doctor import reaching
from poseidon.doctor.facts import BUSY, OPEN
from poseidon.doctor.listening import ProbeListener
from poseidon.doctor.reaching import Target

TOKEN = bytes(range(16))
HERE = "127.0.0.1"


@pytest.fixture
def listener():
    one = ProbeListener(HERE, [], TOKEN)
    yield one
    one.close()


@pytest.fixture
def target(listener):
    return Target(HERE, TOKEN, listener.listening.bulk_port)


@contextlib.contextmanager
def held_port():
    """Yield a port on which nobody listens, and which the system gives nobody who does not ask for it."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((HERE, 0))
        yield one.getsockname()[1]


def test_ports_are_open_refused_or_answered_by_others(target):
    with socket.create_server((HERE, 0)) as other, held_port() as closed:
        answering = threading.Thread(target=lambda: other.accept()[0].close())
        answering.start()
        port = other.getsockname()[1]
        outcomes = reaching.try_ports(target, [target.bulk_port, port, closed])
        answering.join()
    assert outcomes[target.bulk_port] == OPEN
    assert outcomes[closed] == "connection refused"
    assert outcomes[port] == "closed by the program that answers there"


def test_a_port_in_use_is_told_and_the_others_are_listened_on():
    with socket.create_server((HERE, 0)) as other, held_port() as free:
        taken = other.getsockname()[1]
        listener = ProbeListener(HERE, [taken, free], TOKEN)
        listener.close()
    assert listener.listening.failed == {taken: BUSY}
    assert set(listener.listening.ports) == {listener.listening.bulk_port, free}


def test_a_closed_listener_is_gone(listener, target):
    listener.close()
    assert reaching.try_ports(target, [target.bulk_port]) == {target.bulk_port: "connection refused"}


def test_nobody_without_the_token_is_answered(target):
    stranger = Target(HERE, b"x" * 16, target.bulk_port)
    assert reaching.try_ports(stranger, [target.bulk_port])[target.bulk_port] != OPEN
    assert reaching.try_packets(stranger, [1000]) == {1000: False}
    with pytest.raises(OSError):  # noqa: PT011 the system decides which of several
        reaching.measure_rate(stranger, 1, 0.05)


def test_packets_up_to_the_interface_s_size_arrive(target):
    assert reaching.try_packets(target, [576, 1500, 9000]) == {576: True, 1500: True, 9000: True}
    assert reaching.try_packets(target, [65600]) == {65600: False}


def test_latency_and_rates_are_measured(target):
    assert 0 < reaching.measure_latency(target) < 1
    assert reaching.measure_rate(target, 1, 0.05) > 1e6
    assert reaching.measure_rate(target, 3, 0.05) > 1e6


def test_a_stream_of_which_nothing_was_counted_in_its_time_lasts_until_something_is(target):
    assert reaching.measure_rate(target, 1, 0.0) > 0
