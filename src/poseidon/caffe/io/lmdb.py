"""LMDB databases: read without LMDB, page by page with every number checked; written with the lmdb package.

LMDB maps the whole file into memory and follows the page numbers in it. In a damaged file they lead out of the file,
and the system ends the process with a bus error. A database of Caffe's is a plain tree, so reading it takes little:
pages of 4 KiB or so, of which branches name other pages, leaves hold keys with values, and long values have pages of
their own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from poseidon import files
from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

_FIRST_MAP_BYTES = 1 << 20
_TRANSACTION_BYTES = 16 << 20

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE = struct.Struct("<QHHHH")
"""Number, padding, kind, and where free space begins and ends; a long value has its number of pages in their place."""
_META = struct.Struct("<IIQQ" + 2 * "IHHQQQQQ" + "QQ")
"""Magic, version, address, size; the trees of free pages and of records; the last page and the transaction."""
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG = 1
"""Flag of a node: its value has pages of its own."""
_NONE = 2**64 - 1
_PAGE_SIZES = tuple(1 << bits for bits in range(9, 17))


class _Tree(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Meta(NamedTuple):
    free: _Tree
    records: _Tree
    last_page: int
    transaction: int


@dataclass
class _Page:
    """A page of the tree that was found to be what it should be."""

    number: int
    content: bytes
    is_leaf: bool

    def nodes(self) -> Iterator[tuple[int, int, int, bytes, int]]:
        """Yield each node: its three numbers, its key, and where its value begins."""
        lower, upper = _PAGE.unpack_from(self.content)[3:]
        size = len(self.content)
        if not _PAGE.size <= lower <= upper <= size or lower % 2:
            raise ValueError(f"page {self.number} states free space from {lower} to {upper} of {size} bytes")
        for (offset,) in struct.iter_unpack("<H", self.content[_PAGE.size : lower]):
            if not upper <= offset <= size - _NODE.size:
                raise ValueError(f"page {self.number} has a node at byte {offset} of {size}")
            low, high, flags, length = _NODE.unpack_from(self.content, offset)
            start = offset + _NODE.size
            if start + length > size:
                raise ValueError(f"page {self.number} has a key of {length} bytes at byte {offset} of {size}")
            yield low, high, flags, self.content[start : start + length], start + length


class LMDB:
    """A database opened for reading; later writes are not seen."""

    def __init__(self, path: str) -> None:
        self.path = path
        file = Path(path) / "data.mdb" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ConfigError(f"{path}: no LMDB database (there is no such folder, or it holds no data.mdb)")
        self._file = files.BoundedFile(file, "LMDB database")
        try:
            self._meta = self._read_meta()
        except ValueError as error:
            raise self._damaged(error) from None

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values, sorted by key; each call starts from the first."""
        tree = self._meta.records
        last: bytes | None = None
        count = 0
        try:
            for leaf in self._leaves():
                for low, high, flags, key, at in leaf.nodes():
                    if last is not None and key <= last:
                        raise ValueError(f"keys are out of order in page {leaf.number}")
                    if flags & ~_BIG:
                        raise ValueError(f"page {leaf.number} holds something other than plain records ({flags:#x})")
                    last = key
                    count += 1
                    yield key, self._value(leaf, low | high << 16, bool(flags & _BIG), at)
            if count != tree.entries:
                raise ValueError(f"it states {tree.entries} records and holds {count}")
        except ValueError as error:
            raise self._damaged(error) from None

    def _read_meta(self) -> _Meta:
        """Return the newer of the two descriptions of the database."""
        first = self._parse_meta(self._file.read(0, _PAGE.size + _META.size))
        page_bytes = first.free.page_bytes
        if page_bytes not in _PAGE_SIZES:
            raise ValueError(f"it states pages of {page_bytes} bytes")
        self._page_bytes = page_bytes
        second = self._parse_meta(self._file.read(page_bytes, _PAGE.size + _META.size))
        meta = max(first, second, key=lambda one: one.transaction)
        needed = (meta.last_page + 1) * page_bytes
        if needed > self._file.size:
            raise ConfigError(
                f"{self.path}: truncated LMDB database: data.mdb has {self._file.size} bytes and should have {needed}"
            )
        tree = meta.records
        if tree.flags:
            raise ValueError(f"it is not a plain list of records (flags {tree.flags:#x}), so Caffe did not write it")
        # A record takes at least a node and its pointer.
        most = tree.leaf_pages * (page_bytes // (_NODE.size + 2))
        if tree.leaf_pages + tree.branch_pages > meta.last_page or tree.entries > most:
            raise ValueError(f"it states {tree.entries} records in {tree.leaf_pages} of {meta.last_page + 1} pages")
        if (tree.root == _NONE) != (tree.entries == 0):
            raise ValueError(f"it states {tree.entries} records and the root {tree.root:#x}")
        return meta

    def _parse_meta(self, content: bytes) -> _Meta:
        kind = _PAGE.unpack_from(content)[2]
        magic, version, _, _, *rest = _META.unpack_from(content, _PAGE.size)
        if magic != _MAGIC or not kind & _META_PAGE:
            raise ValueError("it does not begin as one")
        if version != _VERSION:
            raise ValueError(f"it is of version {version}, expected {_VERSION}")
        return _Meta(_Tree(*rest[:8]), _Tree(*rest[8:16]), *rest[16:])

    def _leaves(self) -> Iterator[_Page]:
        tree = self._meta.records
        if tree.root == _NONE:
            return
        left = tree.leaf_pages + tree.branch_pages
        # Pages to visit, the next one last, each with its depth: damaged pages may name each other in a circle.
        waiting = [(tree.root, 1)]
        while waiting:
            number, depth = waiting.pop()
            left -= 1
            if left < 0 or depth > tree.depth:
                raise ValueError(f"page {number} is beyond the tree of {tree.depth} levels that it states")
            page = self._page(number)
            if page.is_leaf:
                yield page
            else:
                children = [low | high << 16 | flags << 32 for low, high, flags, _, _ in page.nodes()]
                waiting += [(child, depth + 1) for child in reversed(children)]

    def _page(self, number: int) -> _Page:
        content = self._read(number, 0, self._page_bytes)
        seen, _, kind, _, _ = _PAGE.unpack_from(content)
        if seen != number or kind not in (_BRANCH, _LEAF):
            raise ValueError(f"page {number} is not a page of the tree: it states number {seen} and kind {kind:#x}")
        return _Page(number, content, kind == _LEAF)

    def _value(self, leaf: _Page, length: int, is_big: bool, at: int) -> bytes:
        end = at + (_NUMBER.size if is_big else length)
        if end > len(leaf.content):
            raise ValueError(f"page {leaf.number} has a value of {length} bytes at byte {at} of {len(leaf.content)}")
        if not is_big:
            return leaf.content[at:end]
        (number,) = _NUMBER.unpack_from(leaf.content, at)
        seen, _, kind, low, high = _PAGE.unpack(self._read(number, 0, _PAGE.size))
        if seen != number or kind != _OVERFLOW or _PAGE.size + length > (low | high << 16) * self._page_bytes:
            raise ValueError(f"page {number} does not hold the value of {length} bytes that page {leaf.number} states")
        return self._read(number, _PAGE.size, length)

    def _read(self, number: int, offset: int, count: int) -> bytes:
        """Return bytes of a page and those that follow it; nothing is read or allocated beyond the last page."""
        start = number * self._page_bytes + offset
        if number < 2 or start + count > (self._meta.last_page + 1) * self._page_bytes:
            raise ValueError(f"page {number} is named, but the database ends with page {self._meta.last_page}")
        return self._file.read(start, count)

    def _damaged(self, error: ValueError) -> ConfigError:
        if isinstance(error, ConfigError):
            return error
        return ConfigError(f"{self.path}: damaged or truncated LMDB database, or none: {error}")


class LMDBWriter:
    """Fills an existing, empty folder with a database; a full disk is an :class:`OSError`."""

    def __init__(self, folder: Path) -> None:
        self._lmdb: Any = require("lmdb")
        self._map_bytes = _FIRST_MAP_BYTES
        with self._explained():
            self._environment = self._lmdb.open(str(folder), map_size=self._map_bytes, lock=False)
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record; a later one with the same key replaces it."""
        self._pending[key] = value
        self._pending_bytes += len(key) + len(value)
        if self._pending_bytes >= _TRANSACTION_BYTES:
            self._commit()

    def finish(self) -> None:
        """Write what is pending and close the database."""
        try:
            self._commit()
            with self._explained():
                self._environment.sync(True)
        finally:
            self._environment.close()

    def _commit(self) -> None:
        while True:
            try:
                with self._explained(), self._environment.begin(write=True) as transaction:
                    for key, value in self._pending.items():
                        transaction.put(key, value)
                break
            except self._lmdb.MapFullError:
                self._map_bytes *= 2
                self._environment.set_mapsize(self._map_bytes)
        self._pending = {}
        self._pending_bytes = 0

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._lmdb.MapFullError:
            raise
        except self._lmdb.DiskError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        except self._lmdb.Error as error:
            raise ConfigError(f"cannot write LMDB database: {error}") from error
