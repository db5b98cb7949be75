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
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from poseidon import files
from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

_FIRST_MAP_BYTES = 1 << 20
_TRANSACTION_BYTES = 16 << 20

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE = struct.Struct("<QHHHH")
"""Number, padding, kind, and where free space begins and ends; a long value has its number of pages in their place."""
_HEAD = np.dtype([("number", "<u8"), ("padding", "<u2"), ("kind", "<u2"), ("lower", "<u2"), ("upper", "<u2")])
"""The same for NumPy."""
_META = struct.Struct("<IIQQ" + 2 * "IHHQQQQQ" + "QQ")
"""Magic, version, address, size; the trees of free pages and of records; the last page and the transaction."""
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG = 1
"""Flag of a node: its value has pages of its own."""
_NONE = 2**64 - 1
_LEAVES_AT_ONCE = 256
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


class _Page(NamedTuple):
    """A page of the tree that was found to be what it should be, or only its beginning."""

    number: int
    content: bytes
    lower: int
    """Where its free space begins: before it are the places of its nodes, after it the nodes."""
    upper: int

    def node_count(self) -> int:
        """Return the number of nodes."""
        return (self.lower - _PAGE.size) // 2

    def nodes(self) -> Iterator[tuple[int, int, int, bytes, int]]:
        """Yield each node: its three numbers, its key, and where its value begins."""
        content = self.content
        size = len(content)
        for (offset,) in struct.iter_unpack("<H", content[_PAGE.size : self.lower]):
            if not self.upper <= offset <= size - _NODE.size:
                raise ValueError(f"page {self.number} has a node at byte {offset} of {size}")
            low, high, flags, length = _NODE.unpack_from(content, offset)
            start = offset + _NODE.size
            if start + length > size:
                raise ValueError(f"page {self.number} has a key of {length} bytes at byte {offset} of {size}")
            yield low, high, flags, content[start : start + length], start + length

    def children(self) -> NDArray[np.int64]:
        """Return the pages that a branch names: the lower 48 bits of each node."""
        offsets = np.frombuffer(self.content, "<u2", self.node_count(), _PAGE.size).astype(np.int64)
        if not self.node_count() or offsets.min() < self.upper or offsets.max() > len(self.content) - _NODE.size:
            raise ValueError(f"page {self.number} has nodes outside of it, or none")
        parts = np.frombuffer(self.content, np.uint8)[offsets[:, None] + np.arange(6)].astype(np.int64)
        numbers: NDArray[np.int64] = (parts << np.arange(0, 48, 8)).sum(axis=1)
        return numbers


class LMDB:
    """A database opened for reading; later writes are not seen. Not for several threads at a time."""

    can_seek = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._known = 0
        """Of how many leaves, from the first, it is known how many records they have."""
        file = Path(path) / "data.mdb" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ConfigError(f"{path}: no LMDB database (there is no such folder, or it holds no data.mdb)")
        self._file = files.BoundedFile(file, "LMDB database")
        try:
            self._meta = self._read_meta()
        except ValueError as error:
            raise self._damaged(error) from None

    @property
    def count(self) -> int:
        """The number of records that the database states."""
        return self._meta.records.entries

    def records(self, start: int = 0) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Yield keys and values, sorted by key, from record ``start`` on."""
        last: bytes | None = None
        try:
            place, skipped = self._find(start)
            while place < len(self._leaves):
                leaf = self._page(int(self._leaves[place]), _LEAF)
                self._note(place, leaf.node_count())
                for low, high, flags, key, at in islice(leaf.nodes(), skipped, None):
                    if last is not None and key <= last:
                        raise ValueError(f"keys are out of order in page {leaf.number}")
                    if flags & ~_BIG:
                        raise ValueError(f"page {leaf.number} holds something other than plain records ({flags:#x})")
                    last = key
                    yield key, self._value(leaf, low | high << 16, bool(flags & _BIG), at)
                place, skipped = place + 1, 0
        except ValueError as error:
            raise self._damaged(error) from None

    def _find(self, start: int) -> tuple[int, int]:
        """Return the leaf that holds a record, by its place among all leaves, and how many records come before in it.

        Of the leaves before it only the beginnings are read, and only the first time.
        """
        while self._known < len(self._leaves) and (not self._known or self._ends[self._known - 1] <= start):
            self._count(self._leaves[self._known : self._known + _LEAVES_AT_ONCE])
        place = int(np.searchsorted(self._ends[: self._known], start, side="right"))
        return place, start - int(self._ends[place - 1]) if place else start

    def _count(self, leaves: NDArray[np.int64]) -> None:
        """Note how many records the next leaves have, from their beginnings; with small records they lie together."""
        first, last = int(leaves.min()), int(leaves.max())
        if last - first >= 2 * len(leaves):
            for number in leaves.tolist():
                head = self._checked(number, self._read(number, 0, _PAGE.size), _LEAF)
                self._note(self._known, head.node_count())
            return
        content = np.frombuffer(self._read(first, 0, (last - first + 1) * self._page_bytes), np.uint8)
        heads = content.reshape(-1, self._page_bytes)[leaves - first, : _PAGE.size].view(_HEAD)[:, 0]
        lower, upper = heads["lower"].astype(np.int64), heads["upper"]
        is_right = (heads["number"] == leaves) & (heads["kind"] == _LEAF) & (lower % 2 == 0)
        is_right &= (lower >= _PAGE.size) & (lower <= upper) & (upper <= self._page_bytes)
        if not is_right.all():
            wrong = int(np.argmin(is_right))
            self._checked(int(leaves[wrong]), heads[wrong].tobytes(), _LEAF)  # says what is wrong
        begin = self._ends[self._known - 1] if self._known else 0
        self._ends[self._known : self._known + len(leaves)] = begin + np.cumsum((lower - _PAGE.size) // 2)
        self._known += len(leaves)
        self._check_total()

    def _note(self, place: int, count: int) -> None:
        """Remember how many records end with a leaf, if those of all leaves before are known."""
        if place != self._known:
            return
        self._ends[place] = count + (self._ends[place - 1] if place else 0)
        self._known += 1
        self._check_total()

    def _check_total(self) -> None:
        if self._known == len(self._leaves) and self._ends[-1] != self.count:
            raise ValueError(f"it states {self.count} records and holds {self._ends[-1]}")

    @cached_property
    def _leaves(self) -> NDArray[np.int64]:
        """The numbers of all pages with records, in order; found level by level, so no page can lead back to itself."""
        tree = self._meta.records
        level = np.array([] if tree.root == _NONE else [tree.root], np.uint64).astype(np.int64)
        branches = 0
        for _ in range(1, tree.depth):
            branches += len(level)
            if branches > tree.branch_pages:
                raise ValueError(f"it states {tree.branch_pages} branches and has more")
            level = np.concatenate([self._page(number, _BRANCH).children() for number in level.tolist()])
        if len(level) != tree.leaf_pages:
            raise ValueError(f"it states {tree.leaf_pages} pages of records and has {len(level)}")
        return level

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.empty(len(self._leaves), np.int64)

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

    def _page(self, number: int, kind: int) -> _Page:
        return self._checked(number, self._read(number, 0, self._page_bytes), kind)

    def _checked(self, number: int, content: bytes, kind: int) -> _Page:
        seen, _, seen_kind, lower, upper = _PAGE.unpack_from(content)
        if seen != number or seen_kind != kind:
            raise ValueError(
                f"page {number} states number {seen} and kind {seen_kind:#x}, expected page {number} of kind {kind:#x}"
            )
        if not _PAGE.size <= lower <= upper <= self._page_bytes or lower % 2:
            raise ValueError(f"page {number} states free space from {lower} to {upper} of {self._page_bytes} bytes")
        return _Page(number, content, lower, upper)

    def _value(self, leaf: _Page, length: int, is_big: bool, at: int) -> bytes | memoryview:
        end = at + (_NUMBER.size if is_big else length)
        if end > len(leaf.content):
            raise ValueError(f"page {leaf.number} has a value of {length} bytes at byte {at} of {len(leaf.content)}")
        if not is_big:
            return leaf.content[at:end]
        (number,) = _NUMBER.unpack_from(leaf.content, at)
        stored = self._read(number, 0, _PAGE.size + length)
        seen, _, kind, low, high = _PAGE.unpack_from(stored)
        if seen != number or kind != _OVERFLOW or len(stored) > (low | high << 16) * self._page_bytes:
            raise ValueError(f"page {number} does not hold the value of {length} bytes that page {leaf.number} states")
        return memoryview(stored)[_PAGE.size :]

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
    """Fills a folder with a database, or adds to the one in it; a full disk is an :class:`OSError`.

    What was put becomes durable in steps, so most of it is there after an interruption.
    """

    def __init__(self, folder: Path) -> None:
        self._lmdb: Any = require("lmdb")
        file = folder / "data.mdb"
        self._map_bytes = max(_FIRST_MAP_BYTES, 2 * file.stat().st_size if file.exists() else 0)
        with self._explained():
            self._environment = self._lmdb.open(str(folder), map_size=self._map_bytes, lock=False)
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0

    def last(self) -> tuple[bytes | None, int]:
        """Return the last key of what is stored, if anything is, and the number of records."""
        with self._explained(), self._environment.begin() as transaction:
            cursor = transaction.cursor()
            return cursor.key() if cursor.last() else None, self._environment.stat()["entries"]

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
                    transaction.cursor().putmulti(self._pending.items())
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
