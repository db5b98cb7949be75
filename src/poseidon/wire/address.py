"""Where a rank listens: an IP address, a port, and whether what is said there is encrypted."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass

from poseidon.errors import ConfigError, WireError
from poseidon.job.interfaces import address_of
from poseidon.wire.settings import WireSettings

_ENCRYPTED = "/tls"


@dataclass(frozen=True)
class Address:
    """What other ranks need to connect to a rank; they get it as ``str()``."""

    ip: str
    port: int
    is_encrypted: bool = False

    def __str__(self) -> str:
        return f"{place_text((self.ip, self.port))}{_ENCRYPTED if self.is_encrypted else ''}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ``text``, or raise ``WireError``."""
        try:
            ip, port = text.removesuffix(_ENCRYPTED).rsplit(":", 1)
            plain = ipaddress.ip_address(ip[1:-1] if ip.startswith("[") and ip.endswith("]") else ip)
            if (plain.version == 6) != ip.startswith("["):
                raise ValueError("IPv6 addresses have brackets, others none")
            return cls(str(plain), int(port), text.endswith(_ENCRYPTED))
        except ValueError:
            raise WireError(
                f"{text!r} is not an address; expected IP:PORT or IP:PORT{_ENCRYPTED}, with an IPv6 address in brackets"
            ) from None


def place_text(place: tuple[str, int]) -> str:
    """Return an address and its port as people write them."""
    ip, port = place
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def listening_ip(settings: WireSettings) -> str:
    """Return the address to listen on, as the kernel will show it to others."""
    if settings.ip:
        try:
            return str(ipaddress.ip_address(settings.ip))
        except ValueError:
            raise ConfigError(f"wire setting ip is {settings.ip!r}, expected an IPv4 or IPv6 address") from None
    if not settings.interface:
        return "127.0.0.1"
    return address_of(settings.interface)


def default_place() -> dict[str, str]:
    """Return where to listen by default: on the interface that gloo uses, or the address that leads to worker 0."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return {"interface": interface}
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((master, 9))  # sends nothing; the kernel only looks up the route
            return {"ip": probe.getsockname()[0]}
    return {"ip": "127.0.0.1"}
