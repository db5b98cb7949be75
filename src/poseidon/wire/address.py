"""Where a rank listens: an IP address, a port, and whether what is said there is encrypted."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from poseidon.errors import WireError
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
        return f"{self.ip}:{self.port}{_ENCRYPTED if self.is_encrypted else ''}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ``text``, or raise ``WireError``."""
        try:
            ip, port = text.removesuffix(_ENCRYPTED).rsplit(":", 1)
            return cls(socket.inet_ntoa(socket.inet_aton(ip)), int(port), text.endswith(_ENCRYPTED))
        except (ValueError, OSError):
            raise WireError(f"{text!r} is not an address; expected IP:PORT or IP:PORT{_ENCRYPTED}") from None


def listening_ip(settings: WireSettings) -> str:
    """Return the IPv4 address to listen on."""
    if settings.ip:
        return settings.ip
    if not settings.interface:
        return "127.0.0.1"
    return address_of(settings.interface)


def default_place() -> dict[str, str]:
    """Return where to listen by default: on the interface that gloo uses, or the address that leads to worker 0."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return {"interface": interface}
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing; the kernel only looks up the route
            return {"ip": probe.getsockname()[0]}
        except OSError:
            return {"ip": "127.0.0.1"}
