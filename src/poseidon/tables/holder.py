"""The server side of a rank: its places of all tables, with updates and clocks in, rows out."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.errors import MismatchError, ServerError, WorkerLostError
from poseidon.tables.adoption import Adoption
from poseidon.tables.post import Post
from poseidon.tables.table_messages import NO_ROWS, TableFlag, read_patch, read_rows, write_patch, write_rows
from poseidon.tables.tables import Reply, TableServer, TableSpec
from poseidon.wire.message import Header, Kind

PIECE_BYTES = 1 << 20
"""Rows are sent in messages of about this size, so that others can pass between them."""
EARLY_BYTES = 64 << 10
"""How much to send at a time on an idle link; little, because something due may come at any moment."""


class Holder:
    """Serves the workers of a job until all have left. Every method runs under the post's lock."""

    def __init__(self, post: Post, workers: Sequence[int], servers: Sequence[int]) -> None:
        self._post = post
        self._workers = workers
        self._servers = servers
        self._specs: dict[int, TableSpec] = {}
        self._places: dict[tuple[int, int], TableServer] = {}
        self._adoptions: dict[tuple[int, int], Adoption] = {}
        self._postponed: list[tuple[Header, memoryview]] = []
        """Messages for places under adoption."""
        self._settled: set[tuple[int, int]] = set()
        """Places whose initial rows have arrived."""
        self._saves: list[tuple[Header, int]] = []
        """Requests for state, with their place, that must wait until it is fresh enough."""
        self._unsettled: list[tuple[int, int, int]] = []
        """Worker, table and place of requests to be told when initial rows have arrived."""
        self.left: set[int] = set()
        """Workers that are done or dead."""
        post.listen(Kind.INC, self._inc)
        post.listen(Kind.GET, self._get)
        post.listen_idle(self._send_early)

    @property
    def is_done(self) -> bool:
        """Whether no worker needs this rank any more."""
        return self.left >= set(self._workers)

    @property
    def survives_loss(self) -> bool:
        """Whether the workers of every open table continue when one dies."""
        return all(spec.model.survives_loss for spec in self._specs.values())

    def clock_of(self, worker: int) -> int:
        """Return the last clock of ``worker`` known here."""
        return max((server.clocks.clock_of(worker) for server in self._places.values()), default=0)

    def lose(self, worker: int) -> None:
        """Continue without a worker that died."""
        self.left.add(worker)
        for (table, place), server in list(self._places.items()):
            self._reply(table, place, server.lose(worker))
        for key, adoption in list(self._adoptions.items()):
            adoption.lose(worker)
            self._finish_adoption(key)

    def awaited_by(self, table: int, clock: int) -> list[int]:
        """Return the workers for which reads of ``table`` at ``clock`` wait here."""
        late: set[int] = set()
        for (number, _), server in self._places.items():
            late.update(server.clocks.awaited_by(clock) if number == table else ())
        for (number, _), adoption in self._adoptions.items():
            late.update(adoption.awaited if number == table else ())
        return sorted(late)

    def state(self, header: Header, payload: memoryview) -> None:
        """Handle a STATE request: save, restore, or adopt a place."""
        spec = self._spec_of(header)
        if header.detail & TableFlag.ADOPT:
            self._adopt(header, spec, payload)
        elif header.detail & TableFlag.PUT:
            self._put(header, spec, payload)
        elif header.detail & TableFlag.SETTLED:
            place, _ = read_rows(payload)
            self._unsettled.append((header.sender, header.subject, place))
            self._tell_settled()
        else:
            place, _ = read_rows(payload)
            self._server_of(header, place)
            self._saves.append((header, place))
            self._save_due()

    def open(self, header: Header, payload: memoryview) -> None:
        """Handle a HELLO: a worker has opened a table."""
        spec = TableSpec.from_json(bytes(payload))
        known = self._specs.setdefault(header.subject, spec)
        if known != spec:
            raise MismatchError(
                f"rank {header.sender} opened table {spec.name!r} as {spec}, but other workers as {known}; "
                "open it with the same arguments on all workers"
            )
        for place, rank in enumerate(self._servers):
            if rank == self._post.rank and (header.subject, place) not in self._places:
                server = TableServer(spec, self._workers, place, len(self._servers))
                self._places[header.subject, place] = server
                for worker in self.left:
                    server.lose(worker)

    def clock(self, header: Header, payload: memoryview) -> None:
        """Handle a CLOCK: a worker has finished a step, or all of its work."""
        if header.detail & TableFlag.LEAVE:
            if any(earlier.sender == header.sender for earlier, _ in self._postponed):
                # What it did before it left counts.
                self._postponed.append((header, payload))
            else:
                self._leave(header.sender)
            return
        place, _ = read_rows(payload)
        if not self._postpone(header, payload, place):
            self._reply(header.subject, place, self._server_of(header, place).clock(header.sender, header.clock))

    # Messages.

    def _inc(self, header: Header, payload: memoryview) -> None:
        content = read_patch(self._spec_of(header), payload)
        if self._postpone(header, payload, content.place):
            return
        server = self._server_of(header, content.place)
        server.inc(header.sender, content.patch)
        if server.spec.managed and server.spec.eager:
            for worker in self._workers:
                if worker != self._post.rank and self._post.is_idle(worker):
                    self._send_early(worker)

    def _get(self, header: Header, payload: memoryview) -> None:
        place, rows = read_rows(payload)
        if not self._postpone(header, payload, place):
            replies = self._server_of(header, place).get(header.sender, header.clock, rows)
            self._reply(header.subject, place, replies)

    def _leave(self, worker: int) -> None:
        self.left.add(worker)
        for (table, place), server in self._places.items():
            self._reply(table, place, server.leave(worker))
        for key, adoption in list(self._adoptions.items()):
            adoption.lose(worker)
            self._finish_adoption(key)

    def _put(self, header: Header, spec: TableSpec, payload: memoryview) -> None:
        content = read_patch(spec, payload)
        self._server_of(header, content.place).replace(content.patch)
        if header.detail & TableFlag.LAST:
            self._settled.add((header.subject, content.place))
            self._tell_settled()

    def _tell_settled(self) -> None:
        for one in [one for one in self._unsettled if one[1:] in self._settled]:
            self._unsettled.remove(one)
            worker, table, place = one
            nothing = write_rows(place, NO_ROWS)
            self._post.send(worker, Kind.STATE, table, 0, nothing, TableFlag.ANSWER | TableFlag.SETTLED)

    def _save_due(self) -> None:
        """Answer the requests for state that may be read now: under BSP all at one clock, so that places agree."""
        for save in list(self._saves):
            header, place = save
            server = self._places[header.subject, place]
            if server.clocks.may_read(header.sender, header.clock):
                self._saves.remove(save)
                self._send_state(header, place, server)

    def _send_state(self, header: Header, place: int, server: TableServer) -> None:
        pieces = list(server.state().split(PIECE_BYTES))
        for number, piece in enumerate(pieces):
            flags = TableFlag.ANSWER | (TableFlag.LAST if number == len(pieces) - 1 else 0)
            content = write_patch(place, 0, piece)
            self._post.send(header.sender, Kind.STATE, header.subject, server.clocks.slowest, content, flags)

    # Replies.

    def _reply(self, table: int, place: int, replies: list[Reply]) -> None:
        for reply in replies:
            pieces = list(reply.patch.split(PIECE_BYTES))
            for number, piece in enumerate(pieces):
                is_last = number == len(pieces) - 1
                flags = TableFlag.PUSH if reply.is_push and is_last else 0
                content = write_patch(place, reply.included, piece)
                self._post.send(reply.worker, Kind.ROW, table, reply.fresh, content, flags)
        self._save_due()

    def _send_early(self, worker: int) -> None:
        for (table, place), server in self._places.items():
            if server.spec.managed and self._post.is_idle(worker):
                early = server.early(worker, EARLY_BYTES)
                if early is not None:
                    self._reply(table, place, [early])

    # Adoption of a place whose server died.

    def _adopt(self, header: Header, spec: TableSpec, payload: memoryview) -> None:
        content = read_patch(spec, payload)
        key = (header.subject, content.place)
        if key not in self._adoptions:
            self._adoptions[key] = Adoption(spec, self._workers, self.left, content.place, len(self._servers))
        if header.detail & TableFlag.LAST:
            self._adoptions[key].report(header.sender, header.clock)
            self._finish_adoption(key)
        else:
            self._adoptions[key].offer(header.clock, content.patch)

    def _finish_adoption(self, key: tuple[int, int]) -> None:
        if self._adoptions[key].awaited:
            return
        self._places[key] = self._adoptions.pop(key).server
        postponed, self._postponed = self._postponed, []
        for header, payload in postponed:
            # A worker that was given up meanwhile cannot go on; whoever ended the adoption has no part in it.
            if header.sender not in self.left:
                {Kind.INC: self._inc, Kind.GET: self._get, Kind.CLOCK: self.clock}[header.kind](header, payload)

    def _postpone(self, header: Header, payload: memoryview, place: int) -> bool:
        if (header.subject, place) not in self._adoptions:
            return False
        self._postponed.append((header, payload))
        return True

    def _spec_of(self, header: Header) -> TableSpec:
        if header.subject not in self._specs:
            raise ServerError(f"rank {header.sender} uses table {header.subject:#x}, which it did not open")
        return self._specs[header.subject]

    def _server_of(self, header: Header, place: int) -> TableServer:
        if header.sender in self.left:
            raise WorkerLostError(f"worker {header.sender} was given up, or left, and cannot go on")
        if (header.subject, place) not in self._places:
            raise ServerError(f"rank {self._post.rank} does not hold place {place} of table {header.subject:#x}")
        return self._places[header.subject, place]
