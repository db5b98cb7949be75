"""LevelDB's log format: records split into fragments that never cross a 32 KiB boundary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from poseidon import files
from poseidon.caffe.io.leveldb.checksum import masked
from poseidon.errors import ConfigError

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_KINDS = {(True, True): _FULL, (True, False): _FIRST, (False, False): _MIDDLE, (False, True): _LAST}
"""By whether a fragment is its record's first, and whether it is the last."""


def read_log(path: Path) -> Iterator[bytes]:
    """Yield the records of a log file; a damaged or truncated record raises an error that names file and position."""
    content = files.read_bytes(path, "LevelDB log")
    position = 0
    parts: list[bytes] | None = None
    while position < len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        kind, fragment, size = _read_fragment(path, content, position)
        position += size
        if kind == 0:
            continue
        if (kind in (_FULL, _FIRST)) != (parts is None):
            raise _damaged(path, position - size, "fragments of records in the wrong order")
        parts = [*(parts or ()), fragment]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = None
    if parts is not None:
        raise _damaged(path, len(content), "the last record is incomplete")


def _read_fragment(path: Path, content: bytes, position: int) -> tuple[int, bytes, int]:
    """Return kind, payload and size on disk; kind 0 is space that was preallocated but never written."""
    header = content[position : position + _HEADER]
    if len(header) < _HEADER:
        raise _damaged(path, position, "the file ends in the middle of a record's header")
    length, kind = int.from_bytes(header[4:6], "little"), header[6]
    if kind == 0 and length == 0:
        return 0, b"", _BLOCK - position % _BLOCK
    start = position + _HEADER
    fragment = content[start : start + length]
    if len(fragment) < length:
        raise _damaged(path, position, f"the file ends after {len(fragment)} of a record's {length} bytes")
    if kind > _LAST or masked(header[6:7] + fragment) != int.from_bytes(header[:4], "little"):
        raise _damaged(path, position, "a record does not match its checksum")
    return kind, fragment, _HEADER + length


def format_log(records: Iterable[bytes]) -> bytes:
    """Return the content of a log file that holds ``records``."""
    out = bytearray()
    for record in records:
        rest, is_first = record, True
        while rest or is_first:
            left = _BLOCK - len(out) % _BLOCK
            if left < _HEADER:
                out += bytes(left)
                left = _BLOCK
            fragment, rest = rest[: left - _HEADER], rest[left - _HEADER :]
            kind = _KINDS[is_first, not rest]
            out += masked(bytes([kind]) + fragment).to_bytes(4, "little")
            out += len(fragment).to_bytes(2, "little") + bytes([kind]) + fragment
            is_first = False
    return bytes(out)


def _damaged(path: Path, position: int, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: damaged or truncated LevelDB log: {what} (at byte {position} of {path.stat().st_size})"
    )
