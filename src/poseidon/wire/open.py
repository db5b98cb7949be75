"""Opens the transport that the settings ask for."""

from __future__ import annotations

from poseidon.errors import ConfigError
from poseidon.wire.network import NetworkTransport
from poseidon.wire.settings import WireSettings


def open_transport(rank: int, size: int, secret: bytes, settings: WireSettings | None = None) -> NetworkTransport:
    """Return a listening transport; ZeroMQ carries encrypted ones whatever ``carrier`` says.

    All ranks of a job must choose the same.
    """
    settings = settings or WireSettings()
    if settings.carrier == "zeromq" or settings.encrypt:
        try:
            from poseidon.wire.zeromq import ZeroMQTransport
        except ModuleNotFoundError as error:
            raise ConfigError(f"the zeromq carrier needs {error.name}: pip install pyzmq") from None
        return ZeroMQTransport(rank, size, secret, settings)
    from poseidon.wire.tcp import TcpTransport

    return TcpTransport(rank, size, secret, settings)
