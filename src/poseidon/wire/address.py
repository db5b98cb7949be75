"""Where a rank listens: one IP address, a port for each receive thread, and the nonce of its listener."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from poseidon.errors import WireError
from poseidon.job.interfaces import address_of
from poseidon.wire.settings import WireSettings


@dataclass(frozen=True)
class Address:
    """What others must know to send to a rank; ``str()`` of it is what they are told."""

    ip: str
    ports: tuple[int, ...]
    nonce: str

    def __str__(self) -> str:
        return f"{self.ip}:{','.join(map(str, self.ports))}#{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that ``text`` says, or raise ``WireError``."""
        try:
            place, nonce = text.split("#")
            ip, ports = place.rsplit(":", 1)
            return cls(socket.inet_ntoa(socket.inet_aton(ip)), tuple(map(int, ports.split(","))), nonce)
        except (ValueError, OSError):
            raise WireError(f"{text!r} is no address; expected IP:PORT[,PORT]#NONCE, as transports state it") from None

    def endpoint(self, sender: int, stream: int) -> str:
        """Return where rank ``sender`` connects its ``stream``: senders are spread over the receive threads."""
        return f"tcp://{self.ip}:{self.ports[(sender + stream) % len(self.ports)]}"


def listening_ip(settings: WireSettings) -> str:
    """Return the one IPv4 address the settings say to listen on."""
    if settings.ip:
        return settings.ip
    if not settings.interface:
        return "127.0.0.1"
    return address_of(settings.interface)
