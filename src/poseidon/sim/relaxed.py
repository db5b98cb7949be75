"""Steps without lockstep: bounded or unbounded staleness, with the parameter server's own clocks.

A worker sends a step's updates as backward produces them; its clock ticks once the servers have them all. It may begin
the next step when the clocks allow it. The servers send fresh values in the background, so a worker within the bound
need not wait for them; in lockstep (bound 0) it must.
"""

from __future__ import annotations

from collections.abc import Callable

from poseidon.errors import ConfigError
from poseidon.sim.agenda import Agenda
from poseidon.sim.lanes import Freight, Lane
from poseidon.sim.outcome import Outcome
from poseidon.sim.setting import Setting
from poseidon.sim.workload import make_workload
from poseidon.tables.clocks import Clocks

GROUPS = 6
"""Number of pushes per backward: enough for overlap, few enough for many machines and steps."""


def simulate_relaxed(setting: Setting, bound: int | None) -> Outcome:
    """Return the average step when workers may be ``bound`` clocks apart; None: no bound."""
    if not setting.system.has_server:
        raise ConfigError(f"{setting.system.name} works in lockstep; staleness needs a system with a parameter server")
    return _Relaxed(setting, bound).outcome()


class _Relaxed:
    def __init__(self, setting: Setting, bound: int | None) -> None:
        self.setting, self.bound = setting, bound
        self.agenda = Agenda()
        self.clocks = Clocks(range(setting.cluster.machines), bound)
        self.workload = make_workload(setting)
        # Full gradients go up and values come down; everything else goes one way.
        self.share_bytes = sum(each.out_bytes * (0.5 if each.is_whole else 1.0) for each in self.workload.transfers)
        """Bytes on the wire of one worker's updates, and of the values that come back."""
        self.workers = [_Worker(self, rank) for rank in range(setting.cluster.machines)]

    def outcome(self) -> Outcome:
        for worker in self.workers:
            worker.try_begin()
        self.agenda.run()
        setting, workers = self.setting, self.workers
        # Workers may differ in speed, so the sum of their rates counts.
        rate = sum(setting.steps / worker.end_s for worker in workers)
        return Outcome(
            step_s=len(workers) / rate,
            compute_s=setting.profile.step_s,
            busy_s=max(worker.out.busy_s for worker in workers) / setting.steps,
            sent_bytes=max(worker.out.sent_bytes for worker in workers) / setting.steps,
            machines=setting.cluster.machines,
            workers=setting.cluster.workers,
            batch=setting.profile.batch,
            plan=self.workload.plan,
            waits=tuple(worker.waited_s / worker.end_s for worker in workers),
            events=self.agenda.count,
        )

    def delivered(self, rank: int) -> None:
        """Record that a worker's updates of a step have reached the servers; send any values this releases."""
        if self.clocks.tick(rank):
            for worker in self.workers:
                worker.refresh()
        for worker in self.workers:
            worker.try_begin()


class _Worker:
    """A device, and a card whose sending direction carries updates up and values down.

    Every card serves its shard to all workers, so it sends as many bytes as it receives.
    """

    def __init__(self, run: _Relaxed, rank: int) -> None:
        self._run, self._rank = run, rank
        self._factors = run.setting.factors_of(rank)
        self.out = Lane(run.agenda, run.setting.in_flight_bytes)
        self.end_s = 0.0
        self.waited_s = 0.0
        self._idle_since = 0.0
        self._is_idle = True
        self._begun = 0
        """Steps begun so far."""
        self._fresh = 0
        """Clock of the slowest worker, as of the last values received."""
        self._pending: dict[int, int] = {}
        """By step: pushes still on their way."""

    def try_begin(self) -> None:
        """Begin the next step if the clocks allow it and, in lockstep, the fresh values have arrived."""
        run = self._run
        if not self._is_idle or self._begun == run.setting.steps:
            return
        is_stale = run.bound == 0 and self._fresh < self._begun
        # Memory limits workers even without a bound: a step's updates must leave before the step after next begins.
        is_behind = run.bound is None and len(self._pending) > 1
        if is_stale or is_behind or not run.clocks.may_read(self._rank, self._begun):
            return
        self._is_idle = False
        self.waited_s += run.agenda.now - self._idle_since
        self._compute()

    def refresh(self) -> None:
        """Fetch the servers' fresh values."""
        self._submit(self._run.share_bytes, self._refreshed, "values")

    def _refreshed(self) -> None:
        self._fresh += 1
        self.try_begin()

    def _compute(self) -> None:
        step, profile = self._begun, self._run.setting.profile
        self._begun += 1
        self._pending[step] = GROUPS
        factor = self._factors[step]
        for group in range(GROUPS):
            share = (group + 1) / GROUPS if self._run.setting.system.is_wait_free else 1.0
            at = profile.forward_s + profile.backward_s * share
            self._run.agenda.after(at * factor, lambda: self._push(step))
        self._run.agenda.after(profile.step_s * factor, self._computed)

    def _computed(self) -> None:
        self._is_idle = True
        self._idle_since = self.end_s = self._run.agenda.now
        self.try_begin()

    def _push(self, step: int) -> None:
        self._submit(self._run.share_bytes / GROUPS, lambda: self._pushed(step), "updates")

    def _pushed(self, step: int) -> None:
        self._pending[step] -= 1
        if self._pending[step] == 0:
            del self._pending[step]
            self.end_s = max(self.end_s, self._run.agenda.now)
            self._run.delivered(self._rank)

    def _submit(self, size_bytes: float, done: Callable[[], None], stream: str) -> None:
        run, setting = self._run, self._run.setting
        if size_bytes <= 0:
            run.agenda.after(0.0, done)
            return
        per_byte = setting.messages.seconds_per_byte(setting.wire_bytes_per_s(self._rank))
        self.out.submit(Freight(stream, size_bytes, per_byte, lambda: run.agenda.after(setting.latency_s, done)))
