"""A lab: one Linux machine turned into several, joined by Ethernet of a chosen speed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar, cast

import poseidon
from poseidon.errors import ConfigError
from poseidon.job import members
from poseidon.lab import bpf, connections, namespace, network, state, warden
from poseidon.lab.connections import TcpConnection
from poseidon.lab.network import Traffic
from poseidon.lab.spec import LabSpec, LinkShape, check_machine, machine_address, make_spec

T = TypeVar("T")


class Lab:
    """Several emulated machines; a context manager that creates them and removes them with all their processes.

    ``Lab(machines=4, rate="1gbit", delay="0.1ms")`` takes the options of ``poseidon lab``; :meth:`from_spec`
    takes a checked spec, :meth:`attach` finds another process's lab. The lab ends with ``with``, or with this
    process however it dies, unless :meth:`keep` was called. Needs root or equivalent capabilities; otherwise
    :class:`ConfigError` says which are missing.
    """

    def __init__(
        self,
        machines: int = 4,
        rate: str = "1gbit",
        *,
        delay: str = "",
        loss: str = "",
        queue: str = "5ms",
        slow: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        self.spec = make_spec(machines, rate, delay, loss, queue, slow)
        self.name = name or secrets.token_hex(3)
        self._warden: subprocess.Popen[bytes] | None = None
        self._is_attached = False
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"a lab's name is letters, digits, - and _, not {self.name!r}")

    @classmethod
    def from_spec(cls, spec: LabSpec, name: str | None = None) -> Lab:
        """Return a lab, not yet up, for a checked spec."""
        lab = cls(name=name)
        lab.spec = spec
        return lab

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """Return the running lab of this name (or the only one), which another process owns."""
        found = state.choose(name, state.load_all())
        lab = cls.from_spec(found.spec, found.name)
        lab._is_attached = True
        return lab

    def __enter__(self) -> Lab:
        if not self._is_attached:
            self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_attached:
            self.down()

    @property
    def machines(self) -> int:
        """How many machines the lab has."""
        return self.spec.machines

    @property
    def state(self) -> state.LabState:
        """The lab's current record."""
        found = state.load(self.name)
        if found is None:
            raise ConfigError(f"lab {self.name!r} is not running")
        return found

    def address(self, machine: int) -> str:
        """Return a machine's address inside the lab."""
        check_machine(machine, self.machines)
        return machine_address(machine)

    def up(self) -> None:
        """Create the machines and their links."""
        existing = state.load(self.name)
        if existing is not None and not existing.is_abandoned:
            raise ConfigError(f"a lab named {self.name!r} is already running; choose another name or take it down")
        if existing is not None:
            remove(existing)
        network.open_netlink().close()
        self._warden = _start_warden(self.name, self.machines)
        try:
            switch_place, *machine_places = _read_places(self._warden)
            here = state.LabState(
                name=self.name,
                spec=self.spec,
                warden=state.ProcessId.of(self._warden.pid),
                owner=state.ProcessId.of(os.getpid()),
                switch=switch_place,
                machines=tuple(machine_places),
            )
            state.save(here)
            self._in_switch(lambda switch: _wire(here, switch))
            self._tell_warden(warden.BEGIN)
        except BaseException:
            self.down()
            raise

    def keep(self) -> None:
        """Keep the lab beyond this process, until ``poseidon lab down``."""
        state.save(replace(self.state, owner=None))
        self._tell_warden(warden.KEEP)
        assert self._warden is not None
        _lifeline(self._warden).close()
        # Popen would warn about a child that is still running, which is intended here.
        self._warden.returncode = 0
        self._is_attached = True

    def down(self) -> None:
        """Kill every process of the lab and remove it; a no-op if it is already gone."""
        found = state.load(self.name)
        if found is not None:
            remove(found)
        if self._warden is not None:
            _lifeline(self._warden).close()
            self._warden.kill()
            self._warden.wait()
            self._warden = None

    def spawn(
        self, machine: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process on a machine, in its own session; options go to :class:`subprocess.Popen`."""
        check_machine(machine, self.machines)
        marked = {**(os.environ if env is None else env), members.LAB_MARK: self.name}
        here = self.state.machines[machine]
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options

        def start() -> subprocess.Popen[bytes]:
            return cast("subprocess.Popen[bytes]", subprocess.Popen(list(argv), env=marked, **options))

        mounts = [] if here.mounts_fd < 0 else [here.mounts_fd]
        with _Opened(self.state.warden.pid, [here.net_fd, here.uts_fd, *mounts]) as opened:
            return namespace.call_inside(opened[:2], start, opened[2] if mounts else None)

    def connect(self, machine: int, address: tuple[str, int], timeout_s: float) -> socket.socket:
        """Return a connection that is made from a machine."""
        check_machine(machine, self.machines)
        with _Opened(self.state.warden.pid, [self.state.machines[machine].net_fd]) as opened:
            return namespace.call_inside(opened, lambda: socket.create_connection(address, timeout_s))

    @property
    def has_names(self) -> bool:
        """Whether the machines know each other by name; some sandboxes forbid it."""
        return self.state.machines[0].mounts_fd >= 0

    def bind(self, source: Path, target: Path) -> None:
        """Let a file stand in the place of another for everything that is started on the machines from now on."""
        now = self.state
        if not self.has_names:
            raise ConfigError(f"the lab has no mounts of its own; {namespace.HOW_TO_GET_PERMISSION}")
        with _Opened(now.warden.pid, [now.machines[0].mounts_fd]) as (mounts,):
            namespace.bind(mounts, str(source), str(target))

    def processes(self, machine: int | None = None) -> list[int]:
        """Return the processes on a machine, or of the whole lab."""
        return self.state.processes(machine)

    def traffic(self) -> list[Traffic]:
        """Return the bytes each machine has sent and received since the lab started."""
        return self._in_switch(lambda switch: network.read_traffic(switch, self.machines))

    def connections(self, machine: int, peer: int | None = None, port: int = 0) -> list[TcpConnection]:
        """Return a machine's TCP connections with other machines, or with one; with one port at either end."""
        found = self._in_machine(machine, connections.established)
        ip = "" if peer is None else self.address(peer)
        return [each for each in found if (not ip or each.remote_ip == ip) and (not port or port in each.ports)]

    def cut(self, machine: int) -> None:
        """Unplug a machine's cable."""
        check_machine(machine, self.machines)
        self._in_switch(lambda switch: network.set_link(switch, machine, is_up=False))
        self._note(machine, "cut")

    def pause(self, machine: int) -> None:
        """Stop a machine's processes, as on a hung or swapping machine."""
        check_machine(machine, self.machines)
        self._note(machine, "paused")
        members.send_signal(self.processes(machine), signal.SIGSTOP)

    def slow(self, machine: int, factor: float = 100.0) -> None:
        """Make a machine's link slower, in both directions."""
        check_machine(machine, self.machines)
        self._reshape(machine, self.spec.slower_shape(machine, factor))
        self._note(machine, "slowed")

    def reset(self, machine: int, peer: int | None = None, port: int = 0) -> int:
        """Reset a machine's TCP connections, as a firewall that restarts does; return how many there were.

        Choose as in :meth:`connections`.
        """
        chosen = self.connections(machine, peer, port)
        return self._in_machine(machine, lambda: connections.reset(chosen))

    def half_open(self, machine: int, peer: int | None = None, port: int = 0) -> None:
        """Let vanish what a machine sends on established TCP connections; it still hears the others.

        Choose as in :meth:`connections`. There is one such fault per machine, this, :meth:`lossy` or
        :meth:`flip`: the last one.
        """
        self._tamper(machine, bpf.dropping(self._flow(machine, peer, port)))

    def lossy(self, machine: int, share: float = 0.02) -> None:
        """Lose a share of the packets that a machine sends, each by chance, as a bad cable or a dirty plug does.

        It takes the place of :meth:`half_open` and :meth:`flip`, and they take its place.
        """
        check_machine(machine, self.machines)
        self._tamper(machine, bpf.losing(share))

    def flip(self, machine: int, peer: int | None = None, port: int = 0, times: int = 1) -> bpf.Counter:
        """Flip a bit in the next packets that a machine sends, in a way that no checksum of TCP notices.

        Choose as in :meth:`connections`. The counter says how many flips are still to come; close it at last.
        """
        counter = bpf.Counter(times)
        try:
            self._tamper(machine, bpf.flipping(self._flow(machine, peer, port), counter))
        except BaseException:
            counter.close()
            raise
        return counter

    def heal(self, machine: int) -> None:
        """Undo whatever was done to a machine's link, and resume its processes."""
        check_machine(machine, self.machines)
        now = self.state
        if machine in now.tampered:
            self._in_switch(lambda switch: network.remove_program(switch, machine))
        shape = self.spec.shape(machine)
        if machine in now.slowed and shape is not None:
            self._reshape(machine, shape)
        self._in_switch(lambda switch: network.set_link(switch, machine, is_up=True))
        state.save(now.healed(machine))
        members.send_signal(self.processes(machine), signal.SIGCONT)

    def kill(self, machine: int) -> None:
        """Power a machine off: the link goes first, so that no connection is closed cleanly."""
        self.cut(machine)
        members.kill_all(lambda: self.processes(machine))

    def _note(self, machine: int, kind: str) -> None:
        state.save(self.state.with_fault(kind, machine))

    def _flow(self, machine: int, peer: int | None, port: int) -> bpf.Flow:
        check_machine(machine, self.machines)
        return bpf.Flow("" if peer is None else self.address(peer), port)

    def _tamper(self, machine: int, instructions: list[Any]) -> None:
        program = bpf.load(instructions)
        try:
            self._in_switch(lambda switch: network.hang_program(switch, machine, program))
        finally:
            os.close(program)
        self._note(machine, "tampered")

    def _reshape(self, machine: int, shape: LinkShape) -> None:
        now = self.state
        with _Opened(now.warden.pid, [now.switch.net_fd, now.machines[machine].net_fd]) as (switch, here):
            network.reshape(shape, bool(self.spec.delay_s or self.spec.loss), switch, here, machine)

    def _in_machine(self, machine: int, use: Callable[[], T]) -> T:
        check_machine(machine, self.machines)
        now = self.state
        with _Opened(now.warden.pid, [now.machines[machine].net_fd]) as namespaces:
            return namespace.call_inside(namespaces, use)

    def _in_switch(self, use: Callable[[int], T]) -> T:
        now = self.state
        with _Opened(now.warden.pid, [now.switch.net_fd]) as (switch,):
            return use(switch)

    def _tell_warden(self, word: bytes) -> None:
        lifeline = _lifeline(self._warden)
        lifeline.write(word)
        lifeline.flush()


def remove(lab: state.LabState) -> None:
    """Remove whatever is left of a lab: processes, warden (and with it namespaces and links), state file."""
    members.kill_all(lab.processes)
    if lab.warden.is_alive:
        members.kill_all(lambda: [lab.warden.pid] if lab.warden.is_alive else [])
    state.forget(lab.name)


def own_environment() -> dict[str, str]:
    """Return this process's environment, with Poseidon on the path of any Python started with it."""
    source = str(Path(poseidon.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _lifeline(process: subprocess.Popen[bytes] | None) -> IO[bytes]:
    assert process is not None, "only the process that created a lab may talk to its warden"
    assert process.stdin is not None
    return process.stdin


class _Opened:
    """The warden's namespaces as file descriptors of this process, closed at the end."""

    def __init__(self, warden_pid: int, fds: Sequence[int]) -> None:
        self._paths = [f"/proc/{warden_pid}/fd/{fd}" for fd in fds]
        self._opened: list[int] = []

    def __enter__(self) -> list[int]:
        try:
            for path in self._paths:
                self._opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.__exit__()
            raise ConfigError(f"the lab is gone or belongs to another user ({error})") from None
        return self._opened

    def __exit__(self, *_: object) -> None:
        for fd in self._opened:
            os.close(fd)


def _wire(lab: state.LabState, switch: int) -> None:
    with _Opened(lab.warden.pid, [machine.net_fd for machine in lab.machines]) as machines:
        network.wire(lab.spec, switch, machines)


def _start_warden(name: str, machines: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "poseidon.lab.warden", name, str(machines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=own_environment(),
        start_new_session=True,
    )


def _read_places(process: subprocess.Popen[bytes]) -> list[state.Namespace]:
    assert process.stdout is not None
    with process.stdout as pipe:
        answer = pipe.read()
    if not answer:
        raise ConfigError(f"the lab's warden ended with status {process.wait()} before it created any machine")
    message = json.loads(answer)
    if "error" in message:
        raise ConfigError(message["error"])
    return [state.Namespace(**place) for place in message["places"]]
