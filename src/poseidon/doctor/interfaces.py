"""The network interfaces of this host, asked from the kernel.

By ioctl and /proc rather than /sys/class/net: that folder shows the network of whoever mounted it, which inside a
container or a namespace is another one.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from poseidon.doctor.facts import Interface

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_SIOCGIFMTU = 0x8921
_SIOCETHTOOL = 0x8946
_SIOCGIWNAME = 0x8B01
_ETHTOOL_GSET = 0x1
_ETHTOOL_GDRVINFO = 0x3
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_LINK_LOCAL = 0x20
_UNKNOWN_SPEEDS = (0, 0xFFFF, 0xFFFFFFFF)
_VIRTUAL_DRIVERS = ("veth", "tun", "bridge", "dummy", "macvlan", "ipvlan", "vxlan")
"""Drivers that answer the question for their speed with a constant."""


def read_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up, once for each address they have."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            flags = _number(asking, name, _SIOCGIFFLAGS, "H") or 0
            if flags & _IFF_UP:
                found += [_read(asking, name, address, flags) for address in _addresses(asking, name)]
    return tuple(found)


def _read(asking: socket.socket, name: str, address: str, flags: int) -> Interface:
    return Interface(
        name=name,
        address=address,
        mtu=_number(asking, name, _SIOCGIFMTU, "i") or 0,
        speed_mbit=_speed(asking, name),
        is_loopback=bool(flags & _IFF_LOOPBACK),
        is_wireless=_ask(asking, name, _SIOCGIWNAME) is not None,
    )


def _addresses(asking: socket.socket, name: str) -> list[str]:
    answer = _ask(asking, name, _SIOCGIFADDR)
    return ([] if answer is None else [socket.inet_ntoa(answer[20:24])]) + _inet6_addresses(name)


def _inet6_addresses(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        own = [row[0] for row in rows if row[5] == name and int(row[3], 16) != _LINK_LOCAL]
        return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)) for address in own]
    return []


def _speed(asking: socket.socket, name: str) -> int | None:
    driver = _ethtool(asking, name, _ETHTOOL_GDRVINFO, 196)
    if driver is not None and driver[4:36].rstrip(b"\0").decode(errors="replace") in _VIRTUAL_DRIVERS:
        return None
    link = _ethtool(asking, name, _ETHTOOL_GSET, 44)
    if link is None:
        return None
    low, high = struct.unpack_from("H", link, 12)[0], struct.unpack_from("H", link, 28)[0]
    speed = low | high << 16
    return None if speed in _UNKNOWN_SPEEDS else speed


def _ethtool(asking: socket.socket, name: str, command: int, size: int) -> bytes | None:
    # The request holds a pointer to the answer's room, so the room must be memory that stays where it is.
    room = array.array("B", struct.pack("I", command) + bytes(size - 4))
    request = struct.pack("16sP", name.encode(), room.buffer_info()[0]) + bytes(16)
    try:
        fcntl.ioctl(asking.fileno(), _SIOCETHTOOL, request)
    except OSError:
        return None
    return room.tobytes()


def _number(asking: socket.socket, name: str, request: int, form: str) -> int | None:
    answer = _ask(asking, name, request)
    return None if answer is None else int(struct.unpack_from(form, answer, 16)[0])


def _ask(asking: socket.socket, name: str, request: int) -> bytes | None:
    try:
        return fcntl.ioctl(asking.fileno(), request, struct.pack("16s", name.encode()) + bytes(24))
    except OSError:
        return None
