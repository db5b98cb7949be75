"""The connecting end of a link: tries ports, times round trips and streams, finds which packets get through."""

from __future__ import annotations

import contextlib
import select
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from poseidon.doctor.facts import OPEN, TIMED_OUT
from poseidon.doctor.listening import DATAGRAM, ECHO, HEADER, REPORT, SINK, receive_exactly

CONNECT_S = 1.8
"""Long enough for one lost packet, which the system sends again after a second."""
_PINGS = 40
_GRACE_S = 5.0
_CHUNK = bytes(1 << 18)
_DATAGRAM_WAITS_S = (0.1, 0.2, 0.4, 0.8)
"""How long to wait for answers after each try; the retries are for datagrams that got lost."""
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_PMTUDISC_PROBE = 3
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Bytes of the IP and UDP headers."""


@dataclass(frozen=True)
class Target:
    """A listener at another host."""

    address: str
    token: bytes
    bulk_port: int


def try_ports(target: Target, ports: Sequence[int]) -> dict[int, str]:
    """Return the outcome for each port; all are tried at once."""
    with ThreadPoolExecutor(max(1, len(ports)), "doctor-port") as pool:
        return dict(zip(ports, pool.map(lambda port: _try_port(target, port), ports), strict=True))


def measure_latency(target: Target) -> float:
    """Return half the median round trip of one byte, in seconds."""
    times = []
    with _connect(target, target.bulk_port, ECHO) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            began = time.perf_counter()
            link.sendall(b"x")
            receive_exactly(link, 1)
            times.append(time.perf_counter() - began)
    # The first ones meet cold caches on both sides.
    return statistics.median(times[_PINGS // 4 :]) / 2


def measure_rate(target: Target, streams: int, seconds: float) -> float:
    """Return the bits per second that arrive at the target over this many connections."""
    with ThreadPoolExecutor(streams, "doctor-stream") as pool:
        reports = list(pool.map(lambda _: _stream(target, seconds), range(streams)))
    first, last = min(report[0] for report in reports), max(report[1] for report in reports)
    count = sum(report[2] for report in reports)
    if last <= first or not count:
        raise TimeoutError("hardly anything arrived")
    return 8 * count / (last - first)


def try_packets(target: Target, sizes: Sequence[int]) -> dict[int, bool]:
    """Return for each size whether an IP packet arrived that must not be fragmented."""
    arrived = dict.fromkeys(sizes, False)
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as link:
        level, option = (41, _IPV6_MTU_DISCOVER) if family == socket.AF_INET6 else (0, _IP_MTU_DISCOVER)
        link.setsockopt(level, option, _PMTUDISC_PROBE)
        link.connect((target.address, target.bulk_port))
        for wait_s in _DATAGRAM_WAITS_S:
            missing = [size for size, is_there in arrived.items() if not is_there]
            for size in missing:
                _send_datagram(link, target.token, size - _HEADERS[family])
            _collect_answers(link, target.token, arrived, _HEADERS[family], wait_s)
            if all(arrived.values()):
                break
    return arrived


def _try_port(target: Target, port: int) -> str:
    try:
        with _connect(target, port, ECHO) as link:
            link.sendall(target.token)
            is_ours = receive_exactly(link, len(target.token)) == target.token
    except TimeoutError:
        return TIMED_OUT
    except (ConnectionResetError, BrokenPipeError):
        return "closed by the program that answers there"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return OPEN if is_ours else "answered by another program"


def _connect(target: Target, port: int, request: bytes, seconds: float = 0.0) -> socket.socket:
    link = socket.create_connection((target.address, port), timeout=CONNECT_S)
    try:
        link.sendall(HEADER.pack(target.token, request, seconds))
    except BaseException:
        link.close()
        raise
    return link


def _stream(target: Target, seconds: float) -> tuple[float, float, int]:
    """Send until the other end reports how much it received."""
    with _connect(target, target.bulk_port, SINK, seconds) as link:
        link.setblocking(False)
        deadline = time.monotonic() + seconds + _GRACE_S
        while (left := deadline - time.monotonic()) > 0:
            readable, writable, _ = select.select([link], [link], [], left)
            if readable:
                link.settimeout(_GRACE_S)
                report: tuple[float, float, int] = REPORT.unpack(receive_exactly(link, REPORT.size))
                return report
            if writable:
                with contextlib.suppress(BlockingIOError):
                    link.send(_CHUNK)
    raise TimeoutError(f"a stream of {seconds:g} s was not finished {_GRACE_S:g} s later")


def _send_datagram(link: socket.socket, token: bytes, size: int) -> None:
    # A packet too large for this interface is refused, which is an answer too.
    with contextlib.suppress(OSError):
        link.send(DATAGRAM.pack(token, size).ljust(size, b"\0"))


def _collect_answers(link: socket.socket, token: bytes, arrived: dict[int, bool], headers: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while not all(arrived.values()) and (left := deadline - time.monotonic()) > 0:
        link.settimeout(left)
        # "Refused" means that datagrams arrive and nothing listens; for the sizes that is the same as no answer.
        with contextlib.suppress(OSError):
            answer: Any = DATAGRAM.unpack(link.recv(DATAGRAM.size))
            if answer[0] == token and answer[1] + headers in arrived:
                arrived[answer[1] + headers] = True
