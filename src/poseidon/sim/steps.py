"""Steps in lockstep: machines compute, transfer what is ready, and wait for what they need.

If all machines do the same at the same time, one is simulated and represents all: every leg of a transfer then ends
everywhere at once. Otherwise each has its own device and card, and a leg ends when the last machine finishes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from poseidon.planning.transfers import Leg, Transfer
from poseidon.sim.agenda import Agenda
from poseidon.sim.lanes import Freight, Lane
from poseidon.sim.media import ADD_S, COMPACT_S, RESTORE_S
from poseidon.sim.outcome import Outcome, Span
from poseidon.sim.setting import Setting
from poseidon.sim.workload import Workload, count_transfers, make_workload


def simulate(setting: Setting, keep_spans: bool = False, workload: Workload | None = None) -> Outcome:
    """Return the steady-state step; ``keep_spans`` adds the first machine's timeline.

    ``workload`` defaults to what the setting's system would send.
    """
    return _Run(setting, keep_spans, workload or make_workload(setting)).outcome()


_FIRST = -1
"""Priority of what the main thread does over messages."""


class _Run:
    """One simulation: machines, the transfers under way, and the agenda that drives them."""

    def __init__(self, setting: Setting, keep_spans: bool, workload: Workload) -> None:
        self.setting = setting
        self.agenda = Agenda()
        self.workload = workload
        self.spans: list[Span] | None = [] if keep_spans else None
        self.machines = [_Machine(self, index) for index in range(setting.simulated_machines)]
        self._travelling: dict[tuple[int, int], _Journey] = {}
        collectives = [number for number, transfer in enumerate(self.workload.transfers) if transfer.is_collective]
        self._turns = ((step, number) for step in range(setting.steps) for number in collectives)
        """Collectives, in the order that all machines keep."""
        self._turn = next(self._turns, None)
        self._calls = [0] * setting.steps
        self._held: dict[int, list[_Journey]] = {}
        """By step: transfers that wait for the optimizer's step."""
        self._users: dict[int, list[int]] = {}
        for number, transfer in enumerate(self.workload.transfers):
            for unit in self.awaited(transfer):
                self._users.setdefault(unit, []).append(number)

    def awaited(self, transfer: Transfer) -> tuple[int, ...]:
        """Return the units whose gradients a transfer waits for."""
        return self.setting.profile.ready_order[:1] if transfer.is_early else transfer.units

    def outcome(self) -> Outcome:
        setting = self.setting
        for machine in self.machines:
            machine.begin_step()
        self.agenda.run()
        assert all(len(machine.ends) == setting.steps for machine in self.machines), "a machine waits forever"
        ends = [max(machine.ends[step] for machine in self.machines) for step in range(setting.steps)]
        # With random delays the mean counts; otherwise the last step, which the initially idle wire no longer affects.
        is_random = setting.straggle > 0
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1) if is_random else ends[-1] - ends[-2]
        return Outcome(
            step_s=step_s,
            compute_s=setting.profile.step_s,
            busy_s=max(max(m.out.busy_s, m.into.busy_s) for m in self.machines) / setting.steps,
            sent_bytes=max(machine.out.sent_bytes for machine in self.machines) / setting.steps,
            machines=setting.cluster.machines,
            workers=setting.cluster.workers,
            batch=setting.profile.batch,
            plan=self.workload.plan,
            spans=tuple(self.spans or ()),
            events=self.agenda.count,
        )

    def ready(self, machine: _Machine, step: int, unit: int) -> None:
        """Record that a machine has a unit's gradient of a step."""
        for number in self._users.get(unit, ()):
            journey = self._travelling.get((step, number))
            if journey is None:
                journey = self._travelling[step, number] = _Journey(self, number, step)
            journey.unit_ready(machine)

    def try_collectives(self) -> None:
        """Start the collective whose turn it is, if all machines are ready for it."""
        journey = None if self._turn is None else self._travelling.get(self._turn)
        if journey is not None and journey.is_complete and not journey.has_begun:
            journey.begin()

    def collective_over(self) -> None:
        """Start the next collective."""
        self._turn = next(self._turns, None)
        self.try_collectives()

    def stepped(self, step: int) -> None:
        """Record that a machine has called the optimizer's step; the last one sets free what waits for all calls."""
        self._calls[step] += 1
        if self.has_stepped(step):
            for journey in self._held.pop(step, []):
                journey.send_leg()

    def has_stepped(self, step: int) -> bool:
        """Return whether all machines have called the optimizer's step."""
        return self._calls[step] == len(self.machines)

    def hold(self, journey: _Journey) -> None:
        """Let a transfer's next leg wait for the optimizer's step."""
        self._held.setdefault(journey.step, []).append(journey)

    def forget(self, journey: _Journey) -> None:
        """Drop a finished transfer."""
        del self._travelling[journey.step, journey.number]


class _Machine:
    """A device that computes unit after unit, and a card with two directions."""

    def __init__(self, run: _Run, index: int) -> None:
        setting, profile = run.setting, run.setting.profile
        self._run, self.index = run, index
        self.factors = setting.factors_of(index)
        self.ends: list[float] = []
        record = run.spans is not None and index == 0
        self._record = record
        piece = setting.in_flight_bytes
        self.out = Lane(run.agenda, piece, self._recorder("out") if record else None, self.work, self.is_computing)
        self.into = Lane(run.agenda, piece, is_crowded=self.is_computing)
        self.inside = Lane(run.agenda, float("inf"))
        self.interpreter = Lane(run.agenda, float("inf"))
        """What a worker does in Python: one thing at a time."""
        self._step = -1
        self._missing = count_transfers(run.workload.transfers, len(profile.units))
        self._absent: dict[int, list[int]] = {}
        """By step: how many transfers each unit still waits for."""
        self._rebuilds: list[int] = []
        self._blocked: Callable[[], None] | None = None
        self._owed_s = 0.0
        """Time that exchanges took from the computation under way."""

    # Forward.

    def begin_step(self) -> None:
        self._step += 1
        if self._step == self._run.setting.steps:
            return
        self._absent[self._step] = list(self._missing)
        self._forward(0)

    def _forward(self, place: int) -> None:
        run, profile = self._run, self._run.setting.profile
        if place == len(profile.units):
            self._backward(0)
            return
        unit = profile.forward_order[place]
        seconds = profile.units[unit].forward_s * self.factors[self._step]
        issue_s = 0.0
        if run.setting.system.overlaps_forward and self._step > 0:
            if self._absent[self._step - 1][unit]:
                self._blocked = lambda: self._forward(place)
                return
            seconds += self._update_s(unit) + run.workload.rebuild_s[unit]
            # Where forward need not wait, the host is far ahead of the device.
            issue_s = run.setting.issue_s
        name = profile.units[unit].unit.name
        if issue_s <= 0:
            self._compute(name, seconds, lambda: self._forward(place + 1), "forward")
            return
        began_s = run.agenda.now

        def issued() -> None:
            left_s = max(0.0, began_s + seconds - run.agenda.now)
            self._compute(name, left_s, lambda: self._forward(place + 1), "forward")

        self.interpreter.submit(Freight("issue", 1.0, issue_s, issued, _FIRST))

    def _update_s(self, unit: int) -> float:
        setting, profile = self._run.setting, self._run.setting.profile
        share = profile.units[unit].unit.size_bytes / profile.size_bytes
        # The owners of the server's chunks step a part each.
        return profile.update_s * share / (setting.cluster.workers if setting.system.dense == "served" else 1)

    # Backward.

    def _backward(self, place: int) -> None:
        run, profile = self._run, self._run.setting.profile
        order, step = profile.ready_order, self._step
        if place == len(order):
            self._after_backward()
        else:
            one = profile.units[order[place]]
            # At most half of a linear layer's backward computes the weight's gradient.
            seconds = max(one.backward_s - run.workload.saved_s[order[place]], one.backward_s / 2)
            seconds *= self.factors[step]
            self._compute(one.unit.name, seconds, lambda: self._backward(place + 1), "backward")
        # Last, because it matters to an exchange whether the device computes.
        if place > 0 and run.setting.system.is_wait_free:
            run.ready(self, step, order[place - 1])

    def _after_backward(self) -> None:
        run = self._run
        if not run.setting.system.is_wait_free:
            for unit in run.setting.profile.ready_order:
                run.ready(self, self._step, unit)
        if run.setting.system.overlaps_forward:
            self.ends.append(run.agenda.now)
            run.stepped(self._step)
            self.begin_step()
            return
        self._rebuilds = [unit for unit, seconds in enumerate(run.workload.rebuild_s) if seconds > 0]
        self._finish()

    def _finish(self) -> None:
        """Rebuild what has arrived, wait for the rest, then update."""
        run, absent = self._run, self._absent[self._step]
        for unit in self._rebuilds:
            if not absent[unit]:
                self._rebuilds.remove(unit)
                name = run.setting.profile.units[unit].unit.name
                self._compute(name, run.workload.rebuild_s[unit], self._finish, "rebuild")
                return
        if any(absent):
            self._blocked = self._finish
            return
        self._compute("update", run.setting.profile.update_s * self.factors[self._step], self._end_step, "update")

    def _end_step(self) -> None:
        self.ends.append(self._run.agenda.now)
        self._absent.pop(self._step)
        self.begin_step()

    # Both.

    def arrived(self, step: int, transfer: Transfer) -> None:
        """Record that a transfer has finished."""
        if step in self._absent:
            for unit in transfer.units:
                self._absent[step][unit] -= 1
        if self._blocked is not None:
            go_on, self._blocked = self._blocked, None
            go_on()

    def _compute(self, name: str, seconds: float, then: Callable[[], None], phase: str) -> None:
        if self._record and self._run.spans is not None and seconds > 0:
            now = self._run.agenda.now
            self._run.spans.append(Span("device", f"{phase} {name}", now, now + seconds, self._step, phase))
        self._run.agenda.after(seconds, lambda: self._computed(then))

    def _computed(self, then: Callable[[], None]) -> None:
        """Go on, once what exchanges took from the computation is made up for."""
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s > 0:
            self._run.agenda.after(owed_s, lambda: self._computed(then))
            return
        then()

    def is_computing(self) -> bool:
        """Return whether the device computes, and does not wait for an exchange."""
        return self._blocked is None

    def work(self, seconds: float) -> None:
        """Use processor time for an exchange, which delays the computation under way if cores are short."""
        if self.is_computing():
            self._owed_s += seconds * self._run.setting.contention

    def compact(self, values: float, s_per_value: float) -> None:
        """Use the device for an exchange, which delays the computation under way; it may be shared."""
        if self.is_computing():
            self._owed_s += values * s_per_value * self._run.setting.sharing

    def message(self, seconds: float) -> None:
        """Handle direct messages, a time that accounts for the shortage of cores already."""
        if self.is_computing():
            self._owed_s += seconds * min(1.0, self._run.setting.contention)

    def _recorder(self, place: str) -> Callable[[Freight, float], None]:
        spans = self._run.spans
        assert spans is not None

        def record(freight: Freight, end_s: float) -> None:
            spans.append(Span(place, freight.name, freight.began_s, end_s, -1, freight.stream))

        return record


class _Journey:
    """One transfer of one step, on all machines."""

    def __init__(self, run: _Run, number: int, step: int) -> None:
        self._run, self.number, self.step = run, number, step
        self.transfer = transfer = run.workload.transfers[number]
        machines = len(run.machines)
        self._units_missing = [len(run.awaited(transfer))] * machines
        self._entered = 0
        self._leg = -1
        self._open = 0
        """Directions still busy with the current leg, over all machines."""
        self.has_begun = False
        self._priority = transfer.priority if run.setting.system.overlaps_forward else 0

    @property
    def is_complete(self) -> bool:
        return self._entered == len(self._run.machines)

    def unit_ready(self, machine: _Machine) -> None:
        self._units_missing[machine.index] -= 1
        if self._units_missing[machine.index] == 0:
            self._inside(machine, lambda: self._enter(machine))

    def _inside(self, machine: _Machine, then: Callable[[], None]) -> None:
        if self.transfer.inside_s <= 0:
            then()
            return
        machine.message(self.transfer.message_s)
        machine.inside.submit(Freight("inside", 1.0, self.transfer.inside_s, then))

    def _enter(self, machine: _Machine) -> None:
        self._entered += 1
        if self.transfer.is_collective:
            self._run.try_collectives()
            return
        if not self.has_begun:
            self.has_begun = True
            self._leg = 0
            self._open = 2 * len(self._run.machines)
        # A machine's own part leaves at once; only the leg's end waits for all machines.
        self._send(machine, self.transfer.legs[0])

    def begin(self) -> None:
        """Start a collective everywhere."""
        self.has_begun = True
        self._next_leg()

    def _next_leg(self) -> None:
        self._leg += 1
        if self._leg == len(self.transfer.legs):
            self._arrive()
        elif self._leg == 1 and self.transfer.awaits_step and not self._run.has_stepped(self.step):
            self._run.hold(self)
        else:
            self.send_leg()

    def send_leg(self) -> None:
        """Start the current leg on all machines."""
        self._open = 2 * len(self._run.machines)
        for machine in self._run.machines:
            self._send(machine, self.transfer.legs[self._leg])

    @property
    def _handling_s(self) -> float:
        """Interpreter time of a leg's messages at one end."""
        messages = self._run.setting.messages
        return self.transfer.messages * (
            messages.device_handling_s if self.transfer.is_compacted else messages.handling_s
        )

    def _handle(self, machine: _Machine, then: Callable[[], None]) -> None:
        if self._handling_s <= 0:
            then()
        else:
            machine.interpreter.submit(Freight("messages", 1.0, self._handling_s, then, self._priority))

    def _compact(self, machine: _Machine, s_per_value: float) -> None:
        if self.transfer.is_compacted:
            machine.compact(self.transfer.staged_bytes / 4, s_per_value)

    def _send(self, machine: _Machine, leg: Leg) -> None:
        self._compact(machine, COMPACT_S if self._leg == 0 else ADD_S)
        self._handle(machine, lambda: self._put_on_wire(machine, leg))

    def _put_on_wire(self, machine: _Machine, leg: Leg) -> None:
        out, into = leg.out_bytes, leg.out_bytes
        if leg.owner_bytes is not None:
            is_owner = machine.index == self.transfer.owner
            out, into = leg.owner_bytes if is_owner else (leg.out_bytes, leg.others_in_bytes or 0.0)
        self._submit(machine, machine.out, out)
        self._submit(machine, machine.into, into)

    def _submit(self, machine: _Machine, lane: Lane, size_bytes: float) -> None:
        if size_bytes <= 0:
            self._run.agenda.after(0.0, self._part_done)
            return
        setting = self._run.setting
        transport = setting.collectives if self.transfer.is_collective else setting.messages
        share = setting.wire_share if self.transfer.is_whole else 1.0
        per_byte = transport.seconds_per_byte(setting.wire_bytes_per_s(machine.index), share)
        if not setting.system.is_wait_free:
            per_byte *= setting.cluster.machines**setting.incast_exponent
        if not self.transfer.is_collective:
            per_byte += self.transfer.staged_bytes / setting.staging_bytes_per_s / size_bytes
        stream = "collective" if self.transfer.is_collective else "message"
        name = f"{self.transfer.route} {self.transfer.name}"
        freight = Freight(stream, size_bytes, per_byte, self._part_done, self._priority, name)
        freight.stall_s_per_byte = transport.stall_s_per_byte
        if lane is machine.out:
            freight.work_s_per_byte = transport.work_s_per_byte
            machine.work(self.transfer.messages * transport.work_s_per_message)
        lane.submit(freight)

    def _part_done(self) -> None:
        self._open -= 1
        if self._open:
            return
        self._open = len(self._run.machines)
        latency_s = self.transfer.hops * self._run.setting.latency_s
        self._run.agenda.after(latency_s, self._receive)

    def _receive(self) -> None:
        for machine in self._run.machines:
            self._handle(machine, self._received)

    def _received(self) -> None:
        self._open -= 1
        if not self._open:
            self._next_leg()

    def _arrive(self) -> None:
        self._run.forget(self)
        if self.transfer.is_collective:
            self._run.collective_over()
        for machine in self._run.machines:
            self._compact(machine, RESTORE_S)
            self._inside(machine, partial(machine.arrived, self.step, self.transfer))
