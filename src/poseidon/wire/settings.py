"""How a transport behaves: validated on construction, readable from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from poseidon.errors import ConfigError, unknown_name
from poseidon.job.limits import reach_limit
from poseidon.job.settings import NUMBER, SWITCH, TEXT, TIMEOUT, WHOLE, Notation, Variable, check_least

_NOTATIONS: Mapping[type, Notation[Any]] = {str: TEXT, int: WHOLE, float: NUMBER, bool: SWITCH}
PREFIX = "POSEIDON_WIRE_"
BUFFERED_S = 0.75e-3
"""Bytes buffered in the kernel for all peers delay an urgent message by about this much (the kernel doubles it) ..."""
SMALLEST_BUFFER_BYTES, LARGEST_BUFFER_BYTES = 16 << 10, 64 << 10
"""... as far as a thread can keep up with such a small buffer; larger ones do not fill a link any better."""
BALANCED_BELOW = 2e8
"""Bytes per second: on faster links packets are as large as these buffers, and unequal buffers gained nothing."""


@dataclass(frozen=True)
class WireSettings:
    """How one rank's transport uses the network."""

    ip: str = ""
    """The address to listen on; empty: that of ``interface``."""
    interface: str = ""
    """The interface to listen on; empty, without ``ip``: this machine only (127.0.0.1)."""
    streams_per_peer: int = 1
    """Connections to each peer; more where one does not fill the link."""
    send_buffer_bytes: int = LARGEST_BUFFER_BYTES
    """The kernel's buffer per connection (SO_SNDBUF); bytes in it cannot be overtaken."""
    balance: bool = False
    """Give connections with more left to send larger buffers, and so more of the link."""
    compact: bool = True
    """Compress float32 and bf16 gradients on CUDA devices, without loss."""
    congestion: str = "cubic"
    """Congestion control of connections, if the kernel has it; empty: the system's default. BBR sends at the rate
    it saw before, and is slow to notice that a link is free again when urgent messages go to ever different peers."""
    max_message_bytes: int = 64 << 20
    """Larger payloads are neither sent nor received."""
    cap_mbit: float = 0.0
    """The most that this rank sends, in Mbit/s at the interface; 0: no limit."""
    encrypt: bool = False
    """Encrypt the wire's traffic (TLS 1.3, AES-256-GCM), with keys that only the job's workers can make."""
    payload_checksum: bool = False
    """Send the CRC-32 of every payload, for the receiver to check."""
    connect_timeout_s: float = 30.0
    """How long ``connect`` waits for the other ranks; from the environment: a tenth of ``POSEIDON_TIMEOUT``."""
    lost_after_s: float = 30.0
    """A peer whose machine does not answer for this long is lost; from the environment: the same."""
    close_timeout_s: float = 10.0
    """How long ``close`` tries to send queued messages; from the environment: a third of that."""

    def __post_init__(self) -> None:
        for name, least in (
            ("streams_per_peer", 1),
            ("send_buffer_bytes", 4096),
            ("max_message_bytes", 1024),
            ("cap_mbit", 0),
            ("connect_timeout_s", 0),
            ("lost_after_s", 1),
            ("close_timeout_s", 0),
        ):
            check_least(getattr(self, name), least, f"wire setting {name}")
        if self.ip in ("0.0.0.0", "*", "::"):
            raise ConfigError(f"wire setting ip is {self.ip!r}, every interface; name the one address to listen on")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **defaults: Any) -> WireSettings:
        """Return the settings from ``POSEIDON_WIRE_*`` (``POSEIDON_WIRE_CAP_MBIT=200``), else from ``defaults``."""
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        reach_s = reach_limit(TIMEOUT.read(environment))
        values = {"connect_timeout_s": reach_s, "lost_after_s": reach_s, "close_timeout_s": reach_s / 3, **defaults}
        for variable in environment:
            if variable.startswith(PREFIX):
                if variable not in known:
                    raise unknown_name("wire setting in the environment:", variable, tuple(known))
                values[known[variable].name] = variable_of(known[variable]).read(environment)
        return cls(**values)


def variable_of(field: Field[Any]) -> Variable[Any]:
    """Return the environment variable of one of the settings; its purpose is written beneath the field."""
    return Variable(PREFIX + field.name.upper(), _NOTATIONS[type(field.default)], field.default, "wire/settings.py", "")


def suited_to(bytes_per_s: float, peers: int) -> dict[str, Any]:
    """Return the settings that suit a link of this speed to this many peers."""
    each_bytes = bytes_per_s * BUFFERED_S / max(1, peers)
    return {
        "send_buffer_bytes": int(min(max(each_bytes, SMALLEST_BUFFER_BYTES), LARGEST_BUFFER_BYTES)),
        "balance": bytes_per_s < BALANCED_BELOW,
    }
