"""The worker side of a rank: its copies of all tables, and waiting for rows, even if they do not arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from poseidon.errors import ConfigError
from poseidon.tables.cache import TableCache
from poseidon.tables.doubts import COMPLAINTS
from poseidon.tables.holder import EARLY_BYTES, PIECE_BYTES
from poseidon.tables.post import Post
from poseidon.tables.rows import Index, Patch
from poseidon.tables.table_messages import NO_ROWS, TableFlag, read_patch, read_rows, write_patch, write_rows
from poseidon.tables.tables import Reply, TableSpec
from poseidon.wire.formats import Array
from poseidon.wire.message import Header, Kind


class Worker:
    """The tables of one worker; ``holders`` lists the rank that holds each place, and changes when one dies.

    Thread-safe. ``doubt`` is called with a rank that does not answer, and the reason.
    """

    def __init__(self, post: Post, holders: list[int], timeout_s: float, doubt: Callable[[int, str], None]) -> None:
        self._post = post
        self._doubt = doubt
        self._holders = holders
        self._servers = list(holders)
        """Who held each place at first."""
        self._timeout_s = timeout_s
        self._caches: dict[int, TableCache] = {}
        self._saved: dict[int, list[Patch]] = {}
        """Rows of tables that are being saved."""
        self._saved_clock: dict[int, dict[int, int]] = {}
        """Clocks by place, for the places of such a table that have sent all rows."""
        self._settled: dict[int, set[int]] = {}
        """Places of each table whose initial rows have arrived."""
        post.listen(Kind.ROW, self._receive_rows)
        post.listen_idle(self._send_early)

    def open(self, spec: TableSpec) -> TableCache:
        """Announce a table to all ranks and return this worker's copy of it."""
        with self._post.news:
            self._post.check()
            known = self._caches.get(spec.ident)
            if known is not None:
                raise ConfigError(f"table {spec.name!r} (number {spec.ident:#x}) is open as {known.spec.name!r}")
            self._caches[spec.ident] = TableCache(spec, len(self._holders))
            for rank in self._all_ranks():
                # To every rank: any may have to take over a place.
                self._post.send(rank, Kind.HELLO, spec.ident, 0, spec.to_json())
            for place, rank in enumerate(self._holders):
                # A server died before this table was opened; who took its place waits for every worker's copies.
                if rank != self._servers[place]:
                    self._hand_over(self._caches[spec.ident], place)
            return self._caches[spec.ident]

    def get(self, cache: TableCache, rows: Index) -> Patch:
        """Return ``rows`` as fresh as the table's consistency demands; blocks if necessary."""
        with self._post.news:
            if len(cache.stale(rows)):
                self._wait(lambda: self._ask(cache, rows), cache, lambda: self._holders_of(cache.stale(rows)))
            self._post.check()
            return cache.read(rows)

    def limit(self, cache: TableCache, staleness: int) -> None:
        """Let reads miss at most so many clocks from now on."""
        with self._post.news:
            cache.limit(staleness)

    def inc(self, cache: TableCache, patch: Patch) -> None:
        """Add changes to the worker's copy, to be sent at the clock or, if managed, over idle bandwidth."""
        with self._post.news:
            self._post.check()
            cache.inc(patch)
            if cache.spec.managed:
                for peer in set(self._holders) - {self._post.rank}:
                    self._send_early(peer)

    def clock(self, cache: TableCache) -> int:
        """Send all changes, finish the step and return the new clock."""
        with self._post.news:
            self._post.check()
            for place, patch in cache.take_updates(PIECE_BYTES):
                self._send(cache, place, Kind.INC, write_patch(place, 0, patch))
            cache.tick()
            for place in range(len(self._holders)):
                self._send(cache, place, Kind.CLOCK, write_rows(place, NO_ROWS))
            return cache.clock

    def leave(self) -> None:
        """Tell all ranks that this worker is done."""
        with self._post.news:
            for rank in self._all_ranks():
                self._post.send(rank, Kind.CLOCK, 0, 0, b"", TableFlag.LEAVE)

    def save(self, cache: TableCache) -> tuple[int, list[Patch]]:
        """Return the servers' rows of a table, and the clock up to which all are fresh."""
        table = cache.spec.ident
        with self._post.news:
            self._saved[table], self._saved_clock[table] = [], {}
            for place in range(len(self._holders)):
                self._send(cache, place, Kind.STATE, write_rows(place, NO_ROWS))
            clocks = self._saved_clock[table]
            self._wait(lambda: len(clocks) == len(self._holders), cache, lambda: self._others(clocks))
            return min(self._saved_clock.pop(table).values()), self._saved.pop(table)

    def start_from(self, cache: TableCache, patch: Patch | None) -> None:
        """Wait until the initial rows, which one worker passes as ``patch``, have arrived; all workers must call it."""
        table = cache.spec.ident
        with self._post.news:
            settled = self._settled[table] = set()
            for place in range(len(self._holders)):
                if patch is not None:
                    self._put(cache, place, patch.select(np.flatnonzero(patch.rows % len(self._holders) == place)))
                self._send(cache, place, Kind.STATE, write_rows(place, NO_ROWS), TableFlag.SETTLED)
            self._wait(lambda: len(settled) == len(self._holders), cache, lambda: self._others(settled))

    def hand_over(self, place: int) -> None:
        """Send this worker's copies of ``place`` to its new holder."""
        for cache in self._caches.values():
            self._hand_over(cache, place)

    def receive_state(self, header: Header, payload: memoryview) -> None:
        """Handle a server's answer to :meth:`save` or :meth:`start_from`."""
        if header.detail & TableFlag.SETTLED:
            self._settled[header.subject].add(read_rows(payload)[0])
            return
        content = read_patch(self._caches[header.subject].spec, payload)
        self._saved[header.subject].append(content.patch)
        if header.detail & TableFlag.LAST:
            self._saved_clock[header.subject][content.place] = header.clock

    # Inside.

    def _hand_over(self, cache: TableCache, place: int) -> None:
        flags = TableFlag.ADOPT | TableFlag.PUT
        for fresh, patch in cache.hand_over(place):
            for piece in patch.split(PIECE_BYTES):
                content = write_patch(place, 0, piece)
                self._post.send(self._holders[place], Kind.STATE, cache.spec.ident, fresh, content, flags)
        nothing = write_patch(place, 0, cache.spec.make_rows().take(NO_ROWS))
        self._send(cache, place, Kind.STATE, nothing, TableFlag.ADOPT | TableFlag.LAST)

    def _all_ranks(self) -> Iterable[int]:
        return range(self._post.size)

    def _send(self, cache: TableCache, place: int, kind: Kind, payload: Array, flags: int = 0) -> None:
        self._post.send(self._holders[place], kind, cache.spec.ident, cache.clock, payload, flags)

    def _put(self, cache: TableCache, place: int, patch: Patch) -> None:
        pieces = list(patch.split(PIECE_BYTES))
        for number, piece in enumerate(pieces):
            flags = TableFlag.PUT | (TableFlag.LAST if number == len(pieces) - 1 else 0)
            self._send(cache, place, Kind.STATE, write_patch(place, 0, piece), flags)

    def _ask(self, cache: TableCache, rows: Index) -> bool:
        """Request stale rows that were not requested yet; return whether all may be read."""
        stale = cache.stale(rows)
        for place, wanted in cache.ask(stale):
            self._send(cache, place, Kind.GET, write_rows(place, wanted))
        # The answer of this rank itself has already arrived.
        return not len(cache.stale(rows))

    def _wait(self, is_done: Callable[[], bool], cache: TableCache, silent: Callable[[], set[int]]) -> None:
        """Wait until ``is_done``; ``silent`` returns the ranks that have not answered yet.

        After half the timeout this worker starts to complain to the servers. They reply that they are alive, and doubt
        the workers for which they wait themselves.
        """

        def is_over() -> bool:
            return self._post.failure is not None or is_done()

        if not self._post.news.wait_for(is_over, self._timeout_s / 2):
            while not is_over():
                for rank in set(self._holders):
                    self._post.send(rank, Kind.LOST, cache.spec.ident, cache.awaited_clock)
                if not self._post.news.wait_for(is_over, self._timeout_s / 2 / (COMPLAINTS - 1)):
                    for rank in silent():
                        self._doubt(rank, f"no answer about table {cache.spec.name!r} at clock {cache.clock}")
        self._post.check()

    def _receive_rows(self, header: Header, payload: memoryview) -> None:
        cache = self._caches[header.subject]
        content = read_patch(cache.spec, payload)
        is_push = bool(header.detail & TableFlag.PUSH)
        reply = Reply(self._post.rank, content.patch, header.clock, content.included, is_push)
        cache.receive(content.place, reply)

    def _send_early(self, peer: int) -> None:
        for cache in self._caches.values():
            if not cache.spec.managed:
                continue
            for place in self._places_of(peer):
                if self._post.is_idle(peer):
                    patch = cache.take_early(place, EARLY_BYTES)
                    if patch is not None:
                        self._send(cache, place, Kind.INC, write_patch(place, 0, patch))

    def _holders_of(self, rows: Index) -> set[int]:
        return {self._holders[place] for place in np.unique(rows % len(self._holders))}

    def _others(self, places: Iterable[int]) -> set[int]:
        """Return the ranks that hold the other places."""
        return {rank for place, rank in enumerate(self._holders) if place not in set(places)}

    def _places_of(self, peer: int) -> Sequence[int]:
        return [place for place, rank in enumerate(self._holders) if rank == peer]
