"""What the kernel knows of this process's TCP connections: bytes by peer, how long they took, what was sent twice.

It counts for every connection how long data were waiting to be sent or acknowledged. Bytes over that time is what a
link carried while it was in use, whoever uses the connection: Poseidon's wire, gloo or NCCL. So nothing on the way of
a gradient has to count.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_INFO_BYTES = 216
_ESTABLISHED = 1


@dataclass(frozen=True)
class LinkUse:
    """Traffic of one process to one peer address: totals, or their growth."""

    sent_bytes: int = 0
    received_bytes: int = 0
    busy_s: float = 0.0
    """How long the busiest of its connections had data to send or to be acknowledged."""
    resent_bytes: int = 0
    rtt_s: float = 0.0
    """The longest round trip of its connections now, queues included."""
    waiting_bytes: int = 0
    """In the kernel's buffers now, not sent yet."""

    def since(self, earlier: LinkUse) -> LinkUse:
        """Return the growth since an earlier look."""
        return LinkUse(
            max(0, self.sent_bytes - earlier.sent_bytes),
            max(0, self.received_bytes - earlier.received_bytes),
            max(0.0, self.busy_s - earlier.busy_s),
            max(0, self.resent_bytes - earlier.resent_bytes),
            self.rtt_s,
            self.waiting_bytes,
        )


@dataclass(frozen=True)
class _Connection:
    peer: str
    use: LinkUse


def parse_info(info: bytes) -> LinkUse | None:
    """Return the counts in a ``struct tcp_info`` of Linux; None if the connection is not open, or the kernel old."""
    if len(info) < _INFO_BYTES or info[0] != _ESTABLISHED:
        return None
    (rtt_us,) = struct.unpack_from("I", info, 68)
    acked, received = struct.unpack_from("QQ", info, 120)
    (unsent,) = struct.unpack_from("I", info, 144)
    (busy_us,) = struct.unpack_from("Q", info, 168)
    (resent,) = struct.unpack_from("Q", info, 208)
    return LinkUse(acked, received, busy_us / 1e6, resent, rtt_us / 1e6, unsent)


class LinkMeter:
    """Looks at this process's connections; each look returns what happened on them since the one before."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], LinkUse] = {}

    def look(self) -> dict[str, LinkUse]:
        """Return the growth by the peer's IP address; connections to this machine itself are left out."""
        now = _connections()
        grown: dict[str, LinkUse] = {}
        for key, one in now.items():
            change = one.use.since(self._before.get(key, LinkUse()))
            sum_ = grown.get(one.peer, LinkUse())
            grown[one.peer] = LinkUse(
                sum_.sent_bytes + change.sent_bytes,
                sum_.received_bytes + change.received_bytes,
                # Connections to one peer share its link: the busiest shows how long that was in use.
                max(sum_.busy_s, change.busy_s),
                sum_.resent_bytes + change.resent_bytes,
                max(sum_.rtt_s, change.rtt_s),
                sum_.waiting_bytes + change.waiting_bytes,
            )
        self._before = {key: one.use for key, one in now.items()}
        return grown


def _connections() -> dict[tuple[int, str], _Connection]:
    """Return the open connections to other machines, by inode and peer: a descriptor may be used again."""
    found: dict[tuple[int, str], _Connection] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - a hundred of them, often
    except OSError:
        return found
    for number in numbers:
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # A copy of the descriptor, closed again: the connection itself is not touched.
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                here, there = copy.getsockname()[0], copy.getpeername()
                use = (
                    None if here == there[0] else parse_info(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
                )
            if use is not None:
                peer = there[0].removeprefix("::ffff:")
                found[status.st_ino, f"{peer}:{there[1]}"] = _Connection(peer, use)
    return found


def pack_links(links: Mapping[str, LinkUse], most: int = 16) -> dict[str, list[float]]:
    """Return the busiest links as plain data."""
    first = sorted(links, key=lambda peer: -(links[peer].sent_bytes + links[peer].received_bytes))[:most]
    return {
        peer: [
            use.sent_bytes,
            use.received_bytes,
            round(use.busy_s, 4),
            use.resent_bytes,
            round(use.rtt_s, 5),
            use.waiting_bytes,
        ]
        for peer in first
        for use in (links[peer],)
    }


def unpack_links(data: object) -> dict[str, LinkUse]:
    """Return the links in plain data; nothing of what is not such data."""
    links: dict[str, LinkUse] = {}
    if isinstance(data, dict):
        for peer, row in data.items():
            if isinstance(row, list) and len(row) == 6 and all(map(_is_number, row)):
                links[str(peer)] = LinkUse(
                    int(row[0]), int(row[1]), float(row[2]), int(row[3]), float(row[4]), int(row[5])
                )
    return links


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def thread_delay_s(thread: int) -> float:
    """Return how long a thread, by its number in the kernel, has waited for a processor since it began."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
