"""The TCP connections of a machine, as its kernel knows them, and their reset; by netlink alone, without ``ss``."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from poseidon.errors import ConfigError

_SOCK_DIAG = 4
_BY_FAMILY, _DESTROY = 20, 21
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ESTABLISHED = 1
_HEAD = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBBI")
_FOUND = struct.Struct("=BBBB48s5I")
_PLACE = struct.Struct(">HH16s16s")
_MAPPED = bytes(10) + b"\xff\xff"
"""Before an IPv4 address that an IPv6 socket uses."""


@dataclass(frozen=True)
class TcpConnection:
    """An established connection with another machine."""

    local_port: int
    remote_ip: str
    remote_port: int
    inode: int
    """As in ``/proc/PID/fd``: which process holds it."""
    family: int = field(repr=False)
    identity: bytes = field(repr=False)

    @property
    def ports(self) -> tuple[int, int]:
        """At this end and at the other."""
        return self.local_port, self.remote_port


def established() -> list[TcpConnection]:
    """Return the connections with other machines in the calling thread's network namespace."""
    return [each for family in (socket.AF_INET, socket.AF_INET6) for each in _dump(family)]


def reset(connections: list[TcpConnection]) -> int:
    """Reset connections of the calling thread's namespace: both ends get an error. Return how many there still were."""
    count = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        for connection in connections:
            asked = _ASKED.pack(connection.family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
            _ask(netlink, _DESTROY, _REQUEST | _ACK, asked + connection.identity)
            number = next(code for kind, code in _answers(netlink) if kind == _ERROR)
            assert isinstance(number, int)
            if number == errno.EOPNOTSUPP:
                raise ConfigError("this kernel cannot reset connections: it needs CONFIG_INET_DIAG_DESTROY")
            if number in (errno.EPERM, errno.EACCES):
                raise ConfigError("not permitted to reset connections; this needs CAP_NET_ADMIN")
            if number not in (0, errno.ENOENT):
                raise ConfigError(f"the kernel refused to reset {connection}: {os.strerror(number)}")
            count += number == 0
    return count


def _dump(family: int) -> Iterator[TcpConnection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
        _ask(netlink, _BY_FAMILY, _REQUEST | _DUMP, asked + bytes(48))
        for kind, found in _answers(netlink):
            if kind == _ERROR:
                assert isinstance(found, int)
                raise ConfigError(
                    f"the kernel does not list connections ({os.strerror(found)}): it needs CONFIG_INET_TCP_DIAG "
                    "(`modprobe tcp_diag`)"
                )
            assert isinstance(found, bytes)
            _, _, _, _, identity, _, _, _, _, inode = _FOUND.unpack_from(found)
            local_port, remote_port, source, target = _PLACE.unpack_from(identity)
            local_ip, remote_ip = (_address(family, each) for each in (source, target))
            if local_ip != remote_ip:
                yield TcpConnection(local_port, remote_ip, remote_port, inode, family, identity)


def _address(family: int, data: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(family, data[:4])
    return socket.inet_ntop(socket.AF_INET, data[12:]) if data[:12] == _MAPPED else socket.inet_ntop(family, data)


def _ask(netlink: socket.socket, kind: int, flags: int, body: bytes) -> None:
    netlink.sendto(_HEAD.pack(_HEAD.size + len(body), kind, flags, 1, 0) + body, (0, 0))


def _answers(netlink: socket.socket) -> Iterator[tuple[int, bytes | int]]:
    """Yield the kernel's messages until the last: kind, and body or error number."""
    while True:
        data = netlink.recv(1 << 16)
        while data:
            size, kind, _, _, _ = _HEAD.unpack_from(data)
            body, data = data[_HEAD.size : size], data[(size + 3) & ~3 :]
            if kind == _DONE:
                return
            if kind == _ERROR:
                yield kind, -struct.unpack_from("=i", body)[0]
                return
            yield kind, body
