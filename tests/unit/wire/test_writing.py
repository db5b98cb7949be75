"""Messages that the kernel takes in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.wire.writing import write_message


class Stingy:
    """A connection whose first call takes only so many bytes, as after a stop and a continue."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.data = b""

    def sendmsg(self, parts: list[Any], *_: object) -> int:
        self.data += b"".join(map(bytes, parts))[: self._first]
        return self._first

    def sendall(self, data: Any) -> None:
        self.data += bytes(data)


@pytest.mark.parametrize("first", [0, 3, 8, 9, 12])
def test_a_message_is_whole_wherever_the_first_call_ended(first: int) -> None:
    connection = Stingy(first)
    write_message(connection, b"eight by", memoryview(b"body"))  # type: ignore[arg-type]
    assert connection.data == b"eight bybody"
