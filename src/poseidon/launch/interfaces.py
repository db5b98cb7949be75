"""The network interfaces of this machine: which one has an address, and a free port on it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from poseidon.errors import ConfigError

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(f"{name} ({ip})" for name, ip in addresses().items())
            raise ConfigError(
                f"interface {interface!r} has no IPv4 address ({error.strerror}); this machine has: {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def addresses() -> dict[str, str]:
    """Return the IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_with(address: str) -> str:
    """Return the interface that has this address; empty if none says so (IPv6, or a second address of one)."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for name, ip in addresses().items() if ip == address), "")


def free_port(address: str, wanted: int | None = None) -> int:
    """Return a port that nobody uses at this address of this machine: the wanted one, or any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, wanted or 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        what = f"port {wanted} at {address}" if wanted else f"address {address}"
        known = ", ".join(f"{name} ({ip})" for name, ip in addresses().items())
        raise ConfigError(
            f"{what} cannot be used here ({error.strerror}); this machine has {known}: "
            "name one with --interface, or another port with --master-port"
        ) from None
