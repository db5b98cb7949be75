"""What transports between processes share, whatever carries the bytes."""

from __future__ import annotations

import secrets
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence

from poseidon.errors import WireError
from poseidon.wire.message import CHECKED, Header, pack
from poseidon.wire.outbox import Outgoing
from poseidon.wire.secret import JobSecret
from poseidon.wire.settings import WireSettings
from poseidon.wire.transport import Transport

LAST = 1 << 62
"""Priority of a goodbye: after everything else."""


class NetworkTransport(Transport):
    """A transport that listens at ``address`` from construction on, and can send after ``connect``."""

    address: str

    def __init__(self, rank: int, size: int, secret: bytes, settings: WireSettings) -> None:
        super().__init__(rank, size)
        self.settings = settings
        self._secret = JobSecret(secret)
        self._nonce = secrets.token_hex(8)
        self._departed: set[int] = set()
        """Ranks that said goodbye or were reported lost."""
        self._is_connected = False
        self._is_closed = False

    @abstractmethod
    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks, given their addresses by rank; blocks until every connection is open."""

    def _send(
        self, peer: int, header: Header, payload: memoryview, priority: int, on_sent: Callable[[], None] | None
    ) -> None:
        self._queue(peer, Outgoing(self._head(header, payload), payload, priority, on_sent))

    @abstractmethod
    def _queue(self, peer: int, message: Outgoing) -> None:
        """Queue a message that was checked."""

    def _check_sendable(self, peer: int, header: Header) -> None:
        if header.length > self.settings.max_message_bytes:
            raise WireError(
                f"{header.kind.name} payload has {header.length} bytes; the wire's limit is "
                f"{self.settings.max_message_bytes} (setting max_message_bytes): send it in pieces"
            )
        if self._is_closed or not self._is_connected:
            state = "is closed" if self._is_closed else "is not connected yet"
            raise WireError(f"rank {self.rank} cannot send {header.kind.name} to rank {peer}: its transport {state}")

    def _head(self, header: Header, payload: memoryview) -> bytes:
        """Return the packed header, with the payload's checksum if the settings ask for it."""
        if self.settings.payload_checksum and payload.nbytes:
            header = header._replace(flags=header.flags | CHECKED, checksum=zlib.crc32(payload))
        return pack(header)
