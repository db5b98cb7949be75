"""Makes the transport that the settings ask for."""

from __future__ import annotations

from poseidon.wire.network import NetworkTransport
from poseidon.wire.settings import WireSettings


def open_transport(rank: int, size: int, secret: bytes, settings: WireSettings | None = None) -> NetworkTransport:
    """Return a transport that listens; encrypted ones are carried by ZeroMQ whatever ``carrier`` says.

    All ranks of a job must choose the same.
    """
    settings = settings or WireSettings()
    if settings.carrier == "zeromq" or settings.encrypt:
        from poseidon.wire.zeromq import ZeroMQTransport

        return ZeroMQTransport(rank, size, secret, settings)
    from poseidon.wire.tcp import TcpTransport

    return TcpTransport(rank, size, secret, settings)
