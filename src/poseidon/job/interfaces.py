"""The network interfaces of this machine, in the network namespace of this process.

psutil asks the kernel for them. It does not read ``/sys/class/net``, which shows the network of whoever mounted it:
inside a container or a network namespace that is the wrong one.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

from poseidon.errors import ConfigError

_SIOCETHTOOL = 0x8946
_SIOCGIWNAME = 0x8B01
_ETHTOOL_GDRVINFO = 0x3
_DRVINFO_BYTES = 196
_UNKNOWN_SPEEDS = (0, 0xFFFF, 0xFFFFFFFF)
_VIRTUAL_DRIVERS = ("veth", "tun", "bridge", "dummy", "macvlan", "ipvlan", "vxlan")
"""Drivers that report a constant as their speed."""


@dataclass(frozen=True)
class Interface:
    """One address of a network interface."""

    name: str
    address: str
    mtu: int = 0
    speed_mbit: int | None = None
    """The negotiated speed; None for virtual interfaces and drivers that do not report one."""
    is_loopback: bool = False
    is_wireless: bool = False


def read_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up, once per address; link-local IPv6 addresses are left out."""
    import psutil

    found = []
    stats = psutil.net_if_stats()
    for name, address in _addresses():
        if name not in stats or (":" in address and _is_local(address)):
            continue
        flags = stats[name].flags.split(",")
        if "up" in flags:
            speed = stats[name].speed
            is_unknown = speed in _UNKNOWN_SPEEDS or _driver(name) in _VIRTUAL_DRIVERS
            found.append(
                Interface(
                    name=name,
                    address=address,
                    mtu=stats[name].mtu,
                    speed_mbit=None if is_unknown else speed,
                    is_loopback="loopback" in flags,
                    is_wireless=_is_wireless(name),
                )
            )
    return tuple(found)


def address_of(interface: str) -> str:
    """Return the first IPv4 address of an interface or, if it has none, its first IPv6 address that others can use."""
    own = [address for name, address in _addresses() if name == interface]
    found = [address for address in own if ":" not in address] or [address for address in own if not _is_local(address)]
    if not found:
        raise ConfigError(f"interface {interface!r} has no address here; this machine has {_describe_addresses()}")
    return found[0]


def interface_with(address: str) -> str:
    """Return the name of the interface that has this address; empty if none has."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    return next((name for name, own in _addresses() if ipaddress.ip_address(own) == wanted), "")


def reserve_port(address: str, wanted: int | None = None) -> socket.socket:
    """Return a socket bound to a free port at this address of this machine: the wanted one, or any.

    It does not listen. While it is open the system gives the port to nobody who asks for any, for connections neither;
    but whoever names it, as worker 0 does, may listen there.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, wanted or 0))
        return holder
    except OSError as error:
        holder.close()
        what = f"port {wanted} at {address}" if wanted else f"address {address}"
        raise ConfigError(
            f"{what} cannot be used here ({error.strerror}); this machine has {_describe_addresses()}: "
            "name one with --interface, or another port with --master-port"
        ) from None


def _addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs, IPv4 and IPv6, in the kernel's order."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        # A labelled address is listed under its label, such as eth0:1.
        (name.partition(":")[0], str(entry.address))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    ]


def _is_local(address: str) -> bool:
    """Return whether an address means something on one link only: others need to say which."""
    return ipaddress.ip_address(address).is_link_local


def _describe_addresses() -> str:
    usable = [(name, address) for name, address in _addresses() if ":" not in address or not _is_local(address)]
    return ", ".join(f"{name} ({address})" for name, address in usable)


# psutil reports neither the driver nor whether an interface is wireless.


def _driver(name: str) -> str:
    # The request holds a pointer to the answer, so the answer must be memory that does not move.
    answer = array.array("B", struct.pack("I", _ETHTOOL_GDRVINFO) + bytes(_DRVINFO_BYTES - 4))
    request = struct.pack("16sP", name.encode(), answer.buffer_info()[0]) + bytes(16)
    return answer[4:36].tobytes().rstrip(b"\0").decode(errors="replace") if _ask(_SIOCETHTOOL, request) else ""


def _is_wireless(name: str) -> bool:
    return _ask(_SIOCGIWNAME, struct.pack("16s", name.encode()) + bytes(24))


def _ask(number: int, request: bytes) -> bool:
    """Return whether the kernel answers a request about an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), number, request)
        except OSError:
            return False
    return True
