"""Where a rank listens: an IP address, a port per receive thread, and the nonce of its listener."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from poseidon.errors import WireError
from poseidon.job.interfaces import address_of
from poseidon.wire.settings import WireSettings


@dataclass(frozen=True)
class Address:
    """What other ranks need to connect to a rank; they get it as ``str()``."""

    ip: str
    ports: tuple[int, ...]
    nonce: str

    def __str__(self) -> str:
        return f"{self.ip}:{','.join(map(str, self.ports))}#{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ``text``, or raise ``WireError``."""
        try:
            place, nonce = text.split("#")
            ip, ports = place.rsplit(":", 1)
            return cls(socket.inet_ntoa(socket.inet_aton(ip)), tuple(map(int, ports.split(","))), nonce)
        except (ValueError, OSError):
            raise WireError(f"{text!r} is not an address; expected IP:PORT[,PORT]#NONCE") from None

    def endpoint(self, sender: int, stream: int) -> str:
        """Return the endpoint for a ``stream`` of rank ``sender``; senders are spread over the receive threads."""
        return f"tcp://{self.ip}:{self.ports[(sender + stream) % len(self.ports)]}"


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
