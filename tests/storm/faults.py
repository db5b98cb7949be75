"""The faults of a seed: what happens to whom, and when; and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from poseidon.wire.door import HANDSHAKE_S
from storm.jobs import HANG_S, Launcher, Plan
from storm.network import Connection, network_of

AGAIN_MOVES = 40
"""A fault that finds nothing to break yet tries again after so many moves."""
END_S = 15.0
"""From the moment at which a fault can be known to the end of the job."""
NEVER = float("inf")


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    limit_s: float
    """How long the job may go on after it; infinite: it must survive."""
    is_between: bool = False
    """It happens to a connection, and either end may be named."""

    @property
    def is_survived(self) -> bool:
        return self.limit_s == NEVER


KINDS = {
    kind.name: kind
    for kind in (
        Kind("nothing", NEVER),
        Kind("slow", NEVER, is_between=True),
        Kind("nap", NEVER),
        Kind("blink", NEVER, is_between=True),
        Kind("death", END_S),
        Kind("freeze", HANG_S + END_S),
        Kind("cut", 8.0 + END_S),
        Kind("reset", END_S, is_between=True),
        Kind("silent reset", HANDSHAKE_S + END_S, is_between=True),
        Kind("half-open", HANDSHAKE_S + END_S, is_between=True),
        Kind("flip", END_S, is_between=True),
        Kind("descriptors", NEVER),
    )
}


class Fault:
    """One fault of one job."""

    def __init__(self, chance: Any, plan: Plan, kinds: list[str], most_moves: int) -> None:
        self.kind = KINDS[chance.choice(kinds)]
        self.rank, self.other = chance.sample(range(plan.workers), 2)
        self.move = chance.randrange(1, most_moves)
        self.struck_at: float | None = None
        """When it happened; None if the job ended before."""

    @property
    def culprits(self) -> set[int]:
        """Who may be named for it."""
        return {self.rank, self.other} if self.kind.is_between else {self.rank}

    def __str__(self) -> str:
        whom = f"between {self.rank} and {self.other}" if self.kind.is_between else f"to worker {self.rank}"
        when = "never came" if self.struck_at is None else f"came at {self.struck_at - 1000:.6f} s"
        return f"{self.kind.name} {whom} (move {self.move}, {when})"

    def arm(self, launcher: Launcher) -> None:
        """Let it happen when its move comes."""
        if self.kind.name != "nothing":
            launcher.world.at_move(self.move, lambda: self._strike(launcher))

    def _strike(self, launcher: Launcher) -> None:
        world = launcher.world
        process = launcher.workers[self.rank]
        if process.is_dead:
            return
        if self.kind.is_between:
            network = network_of(world)
            ends = network.between(process.ip, launcher.workers[self.other].ip)
            ends = [end for end in ends if not end.error and not end.other.is_gone]
            if self.kind.name == "flip":
                # Only what has checksums: messages, not handshakes, whose sockets have a time limit.
                ends = [end for end in ends if not end.timeout and not end.other.timeout]
            if not ends:
                world.at_move(world.moves + AGAIN_MOVES, lambda: self._strike(launcher))
                return
            self._mark(launcher)
            self._break(world.random.choice(ends))
            return
        self._mark(launcher)
        acts: dict[str, Callable[[], None]] = {
            "death": process.kill,
            "freeze": process.pause,
            "nap": lambda: self._nap(launcher),
            "cut": lambda: network_of(world).cut(process.ip),
            "descriptors": lambda: network_of(world).exhausted.update({process: world.now + 2.0}),
        }
        acts[self.kind.name]()

    def _mark(self, launcher: Launcher) -> None:
        self.struck_at = launcher.world.now
        launcher.world.note(str(self))

    def _nap(self, launcher: Launcher) -> None:
        process = launcher.workers[self.rank]
        process.pause()
        launcher.world.at(launcher.world.now + launcher.world.random.uniform(0.1, 5.0), process.resume)

    def _break(self, end: Connection) -> None:
        world = end.world
        if self.kind.name == "reset":
            end.reset(is_told=True)
        elif self.kind.name == "silent reset":
            end.reset(is_told=False)
        elif self.kind.name == "half-open":
            end.darken()
        elif self.kind.name == "flip":
            end.out.flips += 1
        elif self.kind.name == "blink":
            end.darken()
            world.at(world.now + world.random.uniform(0.1, 2.0), end.lighten)
        else:
            before = end.out.latency_s
            end.out.latency_s = world.random.uniform(0.05, 0.5)

            def recover() -> None:
                end.out.latency_s = before

            world.at(world.now + 3.0, recover)
