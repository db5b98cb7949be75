"""The record of each running lab, by which other processes can find, use and remove it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.job.members import LAB_MARK, pids_in, pids_marked, start_time
from poseidon.lab.spec import LabSpec

FOLDER_VARIABLE = "POSEIDON_LAB_FOLDER"
FAULTS = ("cut", "paused", "slowed", "tampered")
"""What may be wrong with a machine: fields of :class:`LabState`."""


@dataclass(frozen=True)
class ProcessId:
    """A process identified such that a reused pid is not mistaken for it."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a live process."""
        start = start_time(pid)
        assert start is not None, f"process {pid} is gone"
        return cls(pid, start)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return start_time(self.pid) == self.start


@dataclass(frozen=True)
class Namespace:
    """One machine (or the switch): file descriptors in the warden that keep it alive, and its number."""

    net_fd: int
    uts_fd: int
    inode: int
    mounts_fd: int = -1
    """Of all machines of a lab; -1: none could be made."""


@dataclass(frozen=True)
class LabState:
    """One lab, as stored in its state file."""

    name: str
    spec: LabSpec
    warden: ProcessId
    """The process that holds the namespaces."""
    owner: ProcessId | None
    """The process that the lab ends with; None for a lab that stays until ``poseidon lab down``."""
    switch: Namespace
    machines: tuple[Namespace, ...]
    cut: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    slowed: tuple[int, ...] = ()
    """Machines whose links are slower than they should be."""
    tampered: tuple[int, ...] = ()
    """Machines whose packets a program drops or damages."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the process that should have removed this lab is gone."""
        return not self.warden.is_alive or (self.owner is not None and not self.owner.is_alive)

    def with_fault(self, kind: str, machine: int) -> LabState:
        """Return the record with one more fault, such as ``cut``."""
        changed: dict[str, Any] = {kind: tuple(sorted({*getattr(self, kind), machine}))}
        return replace(self, **changed)

    def healed(self, machine: int) -> LabState:
        """Return the record without a machine's faults."""
        changed: dict[str, Any] = {
            kind: tuple(each for each in getattr(self, kind) if each != machine) for kind in FAULTS
        }
        return replace(self, **changed)

    def processes(self, machine: int | None = None) -> list[int]:
        """Return the processes on one machine, or everything that belongs to the lab.

        Once the warden is gone, the namespaces' numbers may be reused, and only the mark is trusted.
        """
        chosen = self.machines if machine is None else (self.machines[machine],)
        inside = pids_in({place.inode for place in chosen}) if self.warden.is_alive else []
        marked = pids_marked(LAB_MARK, self.name) if machine is None else []
        return sorted({*inside, *marked})


def state_folder() -> Path:
    """Return the folder of state files.

    In order: ``POSEIDON_LAB_FOLDER``, /run if it is writable, the user's runtime folder, the temp folder.
    """
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for folder in ("/run", runtime):
        if folder and os.access(folder, os.W_OK):
            return Path(folder) / "poseidon-lab"
    return Path(tempfile.gettempdir()) / f"poseidon-lab-{os.getuid()}"


def state_file(name: str) -> Path:
    """Return the state file of a lab."""
    return state_folder() / f"{name}.json"


def ssh_folder(name: str) -> Path:
    """Return the folder of the keys and settings of a lab's ssh servers."""
    return state_file(name).with_suffix(".ssh")


def save(state: LabState) -> None:
    """Write a lab's record atomically."""
    path = state_file(state.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = asdict(replace(state, spec=LabSpec((0,)))) | {"spec": state.spec.to_json()}
    files.write_json(path, data, "record of the lab", indent=None)


def load(name: str) -> LabState | None:
    """Return the lab of this name, or None."""
    path = state_file(name)
    try:
        return _from_json(files.read_json(path, "record of the lab"))
    except ConfigError:
        if not path.exists():
            return None
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the record of a lab ({type(error).__name__}: {error}); remove it, and end its processes"
        ) from None


def forget(name: str) -> None:
    """Remove a lab's state file and the keys of its ssh servers, if they exist."""
    state_file(name).unlink(missing_ok=True)
    shutil.rmtree(ssh_folder(name), ignore_errors=True)


def load_all() -> list[LabState]:
    """Return every recorded lab, by name."""
    names = sorted(path.stem for path in state_folder().glob("*.json"))
    return [state for state in map(load, names) if state is not None]


def choose(name: str | None, states: Collection[LabState]) -> LabState:
    """Return the lab a user means: the named one, or the only one."""
    known = ", ".join(state.name for state in states) or "none"
    if name is not None:
        for state in states:
            if state.name == name:
                return state
        raise ConfigError(f"no lab named {name!r}; running: {known}")
    if len(states) != 1:
        problem = "several labs are running" if states else "no lab is running"
        hint = f"name one with --lab: {known}" if states else "start one with `poseidon lab up` or `poseidon lab run`"
        raise ConfigError(f"{problem}; {hint}")
    return next(iter(states))


def _from_json(data: dict[str, Any]) -> LabState:
    owner = data["owner"]
    return LabState(
        name=data["name"],
        spec=LabSpec.from_json(data["spec"]),
        warden=ProcessId(**data["warden"]),
        owner=None if owner is None else ProcessId(**owner),
        switch=Namespace(**data["switch"]),
        machines=tuple(Namespace(**machine) for machine in data["machines"]),
        cut=tuple(data["cut"]),
        paused=tuple(data["paused"]),
        slowed=tuple(data["slowed"]),
        tampered=tuple(data["tampered"]),
    )
