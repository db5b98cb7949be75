"""LevelDB's table files: sorted entries in blocks, an index of the blocks, and a footer that locates the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from poseidon import files
from poseidon.caffe.io.leveldb.checksum import masked
from poseidon.caffe.io.leveldb.coding import InternalKey
from poseidon.caffe.io.leveldb.snappy import decompress
from poseidon.caffe.schema.varint import read_varint, varint
from poseidon.errors import ConfigError

_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_TRAILER = 5
_RAW, _SNAPPY = 0, 1
BLOCK_BYTES = 65536
"""A block is closed at this size (Caffe's setting)."""

Entry = tuple[InternalKey, bytes]


class Handle(NamedTuple):
    """The location of a block in its file."""

    offset: int
    size: int

    def pack(self) -> bytes:
        """Return the stored form."""
        return varint(self.offset) + varint(self.size)

    @classmethod
    def unpack(cls, content: bytes, position: int = 0) -> tuple[Handle, int]:
        """Return the handle at ``position`` and the position after it."""
        offset, position = read_varint(content, position)
        size, position = read_varint(content, position)
        return cls(offset, size), position


class BlockCache:
    """Results of earlier passes: which blocks passed their checksum, and as many decompressed blocks as fit.

    The first blocks stay: every pass goes through all blocks in the same order, so evicting the oldest would never hit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._blocks: dict[tuple[Path, int], bytes] = {}
        self._sound: set[tuple[Path, int]] = set()

    def get(self, path: Path, offset: int) -> bytes | None:
        """Return a cached block."""
        return self._blocks.get((path, offset))

    def offer(self, path: Path, offset: int, block: bytes) -> None:
        """Cache a block if it fits."""
        if self._left >= len(block):
            self._left -= len(block)
            self._blocks[path, offset] = block

    def is_sound(self, path: Path, offset: int, stored: bytes) -> bool:
        """Return whether a block matches the checksum at its end; computed only the first time."""
        if (path, offset) not in self._sound:
            if masked(stored[:-4]) != int.from_bytes(stored[-4:], "little"):
                return False
            self._sound.add((path, offset))
        return True


class SSTable:
    """One table file, opened for reading."""

    def __init__(self, path: Path, cache: BlockCache) -> None:
        self.path = path
        self._cache = cache
        self._file = files.BoundedFile(path, "LevelDB table")
        try:
            footer = self._file.read(self._file.size - _FOOTER, _FOOTER)
            if footer[-8:] != _MAGIC:
                raise ValueError("it does not end with a table's")
            _, position = Handle.unpack(footer)
            self._index, _ = Handle.unpack(footer, position)
        except (ValueError, IndexError) as error:
            raise self._damaged(f"its footer cannot be decoded: {error}") from None

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in order."""
        for _, packed in self._block_entries(self._index):
            try:
                handle, _ = Handle.unpack(packed)
            except (ValueError, IndexError) as error:
                raise self._damaged(f"its index cannot be decoded: {error}") from None
            for key, value in self._block_entries(handle):
                try:
                    internal = InternalKey.unpack(key)
                except ValueError as error:
                    raise self._damaged(f"the block at byte {handle.offset} cannot be decoded: {error}") from None
                yield internal, value

    def _block_entries(self, handle: Handle) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from _block_entries(self._block(handle))
        except (ValueError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._damaged(f"the block at byte {handle.offset} cannot be decoded: {error}") from None

    def _block(self, handle: Handle) -> bytes:
        kept = self._cache.get(self.path, handle.offset)
        if kept is not None:
            return kept
        stored = self._file.read(handle.offset, handle.size + _TRAILER)
        if not self._cache.is_sound(self.path, handle.offset, stored):
            raise self._damaged(f"the block at byte {handle.offset} does not match its checksum")
        kind = stored[-_TRAILER]
        if kind == _RAW:
            return stored[:-_TRAILER]
        if kind != _SNAPPY:
            raise self._damaged(f"the block at byte {handle.offset} uses unknown compression {kind}")
        block = decompress(stored[:-_TRAILER])
        self._cache.offer(self.path, handle.offset, block)
        return block

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: damaged or truncated LevelDB table: {what}")


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values; each key is stored as its difference from the previous one."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise ValueError(f"it states {restarts} restart points in {len(block)} bytes")
    key, position = b"", 0
    while position < end:
        shared, position = read_varint(block, position)
        unshared, position = read_varint(block, position)
        length, position = read_varint(block, position)
        middle, stop = position + unshared, position + unshared + length
        if shared > len(key) or stop > end:
            raise ValueError("an entry extends beyond its end")
        key = key[:shared] + block[position:middle]
        yield key, block[middle:stop]
        position = stop


class _BlockBuilder:
    """Collects the entries of a block; keys are stored in full, as readers accept and large values make cheap."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._restarts: list[int] = []
        self.last_key = b""

    def add(self, key: bytes, value: bytes) -> None:
        self._restarts.append(len(self._out))
        self._out += varint(0) + varint(len(key)) + varint(len(value)) + key + value
        self.last_key = key

    @property
    def size(self) -> int:
        return len(self._out)

    def finish(self) -> bytes:
        restarts = self._restarts or [0]
        for number in (*restarts, len(restarts)):
            self._out += number.to_bytes(4, "little")
        return bytes(self._out)


def write_table(path: Path, entries: Iterable[Entry]) -> int:
    """Write sorted entries as a table, uncompressed, and return the file's size."""
    index, block = _BlockBuilder(), _BlockBuilder()
    with path.open("wb") as stream:

        def store(content: bytes) -> Handle:
            handle = Handle(stream.tell(), len(content))
            kind = bytes([_RAW])
            stream.write(content + kind + masked(content + kind).to_bytes(4, "little"))
            return handle

        for key, value in entries:
            block.add(key.pack(), value)
            if block.size >= BLOCK_BYTES:
                index.add(block.last_key, store(block.finish()).pack())
                block = _BlockBuilder()
        if block.size:
            index.add(block.last_key, store(block.finish()).pack())
        handles = store(_BlockBuilder().finish()).pack() + store(index.finish()).pack()
        stream.write(handles.ljust(_FOOTER - len(_MAGIC), b"\0") + _MAGIC)
        return stream.tell()
