"""Bytes from every worker to every worker: roll calls, flags, and whatever else all must agree on.

They travel over a mesh of their own (``wire/mesh.py``), which costs a fraction of a collective. Before there is one,
the workers meet in the job's store, which anybody may read and change: what they put there is public, and somebody who
changes it keeps them apart but gets nothing else.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from poseidon.errors import ConfigError, MismatchError, PoseidonError, WireError, WorkerLostError
from poseidon.job.limits import reach_limit
from poseidon.job.secret import find_secret
from poseidon.job.settings import SECRET, SECRET_FILE
from poseidon.team.life import BEAT_S
from poseidon.team.membership import Membership
from poseidon.team.watch import HopelessError, elders, first_line
from poseidon.wire.address import default_place, listening_ip
from poseidon.wire.handshake import Credentials
from poseidon.wire.mesh import Mesh, MeshError
from poseidon.wire.secret import JobSecret
from poseidon.wire.settings import WireSettings

if TYPE_CHECKING:
    from poseidon.team.team import Team


_ASK_S = 0.01
"""Between two looks into the store."""


class PendingGather:
    """Integers on their way from every worker to every worker."""

    def __init__(self, team: Team, values: Sequence[int]) -> None:
        self._count = len(values)
        self._receive = start_gather_bytes(team, struct.pack(f"<{self._count}q", *values))

    def __call__(self, what: str) -> list[list[int]]:
        """Wait for and return the integers, by rank."""
        rows = self._receive(what)
        for rank, data in enumerate(rows):
            if len(data) != 8 * self._count:
                raise MismatchError(
                    f"worker {rank} is elsewhere in the script: this worker waits for {what} ({self._count} numbers), "
                    f"and worker {rank} sent {len(data) // 8}. Do the workers decide by numbers of their own, such as "
                    "the loss of their part of the data? With --auto, --same-loss lets them read the same loss"
                )
        return [list(struct.unpack(f"<{self._count}q", data)) for data in rows]


def start_gather_bytes(team: Team, data: bytes) -> Callable[[str], list[bytes]]:
    """Start to collect every worker's bytes; call the result, with what is awaited, to get them by rank."""
    number = team.mesh.send(data)

    def receive(what: str) -> list[bytes]:
        clock = team.watch.clock
        began = 0.0 if clock is None else clock.begin_wait(what)
        try:
            return team.mesh.receive(number, data, math.inf, lambda: team.watch.waiting(what))
        except MeshError as error:
            raise team.watch.lost(what, error.rank, error) from error
        finally:
            if clock is not None:
                clock.end_wait(what, began)

    return receive


class MeetingStore(Protocol):
    """The part of torch's key-value stores in which workers meet."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Read a key, waiting until it exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""


@dataclass(frozen=True)
class Greeting:
    """What a worker tells the others before they know each other; public."""

    host: str
    address: tuple[str, int] | None
    fingerprint: str
    """Equal for equal secrets."""
    encrypts: bool
    nonce: str
    """Drawn by this worker; rank 0's makes the team's secret differ from that of other teams."""
    problem: str = ""
    """Why this worker cannot take part."""


class Expecting:
    """How long a worker waits for the others at the start of a team, and what it says if one does not come.

    Without an older team nothing is known of the others, and the limit counts. Otherwise heartbeats decide.
    """

    def __init__(self, membership: Membership, rank: int, timeout_s: float) -> None:
        self.membership = membership
        self._rank = rank
        self._timeout_s = timeout_s
        self._since = time.monotonic()

    def look(self, missing: Sequence[int]) -> None:
        """Raise :class:`WorkerLostError` if there is no hope that these workers come."""
        waited_s = time.monotonic() - self._since
        for elder in elders(self.membership.members[self._rank].global_rank):
            for rank in missing:
                peer = elder.membership.find(self.membership.members[rank].global_rank)
                if peer is not None:
                    if elder.is_hopeless(peer, self._since):
                        what = f"all workers to wrap a model (rank {rank} did not come)"
                        raise elder.lost(what, peer, HopelessError(waited_s))
                    return
        if missing and waited_s > self._timeout_s:
            names = "; ".join(f"{self._name(rank)} never reported" for rank in missing)
            raise self._error("all workers to start", f"{names} (POSEIDON_TIMEOUT or timeout_s= gives them more time)")

    def no_store(self, error: BaseException) -> WorkerLostError:
        """Return the error for a store that does not answer."""
        why = f"the job's store does not answer, so {self._name(0)} is probably gone ({first_line(error)})"
        return self._error("all workers to start", why)

    def not_connected(self, greetings: Sequence[Greeting], error: WireError) -> WorkerLostError:
        """Return the error for a worker that has come and cannot be reached."""
        who = "" if error.peer is None else f"rank {error.peer} ({greetings[error.peer].host}) is dead or cut off; "
        return self._error("the connections of all workers", f"{who}{error}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.membership.hosts[rank]})"

    def _error(self, what: str, why: str) -> WorkerLostError:
        return WorkerLostError(f"{self._name(self._rank)} gave up waiting at step 0 for {what}: {why}")


class Entrance:
    """One worker at the start of a team: what it has, and how it meets the others."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self._rank = rank
        self._mesh: Mesh | None = None
        self._secret = JobSecret(secrets.token_bytes(32))
        problem, encrypts, fingerprint = "", False, ""
        try:
            settings = WireSettings.from_environment(os.environ, **default_place())
            encrypts = settings.encrypt
            if size > 1:
                self._secret = JobSecret(find_secret())
            fingerprint = self._secret.derive("fingerprint").hex()[:16]
            self._mesh = Mesh(rank, size, listening_ip(settings), settings.lost_after_s)
        except (OSError, PoseidonError) as error:
            problem = str(error)
        address = None if self._mesh is None else self._mesh.address
        self.greeting = Greeting(host, address, fingerprint, encrypts, secrets.token_hex(16), problem)

    def meet(self, store: MeetingStore, prefix: str, expecting: Expecting) -> list[Greeting]:
        """Return the greetings of all workers, by rank; ``WorkerLostError`` if one does not come."""
        keys = [f"{prefix}/{rank}" for rank in range(expecting.membership.size)]
        try:
            store.set(keys[self._rank], json.dumps(asdict(self.greeting)))
            looks_at = time.monotonic() + BEAT_S
            # Asked again and again: torch logs a warning whenever a wait in its store is in vain.
            while not store.check(keys):
                if time.monotonic() > looks_at:
                    looks_at += BEAT_S
                    expecting.look([rank for rank, key in enumerate(keys) if not store.check([key])])
                time.sleep(_ASK_S)
            return [_parse(store.get(key)) for key in keys]
        except RuntimeError as error:
            if isinstance(error, PoseidonError):
                raise
            raise expecting.no_store(error) from error

    def connect(self, greetings: Sequence[Greeting], timeout_s: float) -> tuple[Mesh, bytes]:
        """Return the connected mesh and the team's secret.

        ``ConfigError`` if the workers do not fit together; ``WireError`` if they cannot reach each other.
        """
        try:
            check_greetings(greetings)
            assert self._mesh is not None
            secret = self._secret.derive("team", greetings[0].nonce)
            credentials = Credentials(secret, self.greeting.encrypts)
            addresses = [greeting.address for greeting in greetings if greeting.address is not None]
            self._mesh.connect(addresses, credentials, reach_limit(timeout_s))
        except BaseException:
            if self._mesh is not None:
                self._mesh.close()
            raise
        return self._mesh, secret


def _parse(data: bytes) -> Greeting:
    try:
        fields: dict[str, Any] = json.loads(data)
        if fields["address"] is not None:
            ip, port = fields["address"]
            fields["address"] = (str(ip), int(port))
        return Greeting(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"what a worker left in the job's store is no greeting: {error!r}") from None


def check_greetings(greetings: Sequence[Greeting]) -> None:
    """Refuse workers that cannot be a team, all with the same words: who differs, and what to do. Pure."""
    first = greetings[0]
    for rank, greeting in enumerate(greetings):
        if greeting.problem or greeting.address is None:
            raise ConfigError(f"rank {rank} ({greeting.host}) cannot join: {greeting.problem}")
    for rank, greeting in enumerate(greetings):
        both = f"rank {rank} ({greeting.host})", f"rank 0 ({first.host})"
        if greeting.fingerprint != first.fingerprint:
            raise ConfigError(
                f"{both[0]} has another secret than {both[1]}; give all workers the same {SECRET.name} or "
                f"{SECRET_FILE.name} (without one, each user has a secret in the home folder, which may differ "
                "between machines)"
            )
        if greeting.encrypts != first.encrypts:
            one, other = both if greeting.encrypts else reversed(both)
            raise ConfigError(f"{one} encrypts and {other} does not; set POSEIDON_WIRE_ENCRYPT alike on all workers")
