"""The one process that keeps a lab alive: it holds the namespaces and cleans up when the lab's owner dies.

Started by :mod:`poseidon.lab.cluster` with a pipe as standard input. If the pipe closes without the word ``keep``, the
owner is gone, however it died: this process kills every process of the lab, removes the state file and exits. The last
references to the namespaces go with it, so the kernel removes them and their links. It also slows down slow machines,
because it has nothing else to do and wakes up on time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from poseidon.errors import PoseidonError
from poseidon.job import members
from poseidon.lab import namespace, state
from poseidon.lab.spec import machine_address, machine_name

BEGIN = b"begin\n"
KEEP = b"keep\n"
PACE_PERIOD_S = 0.04
RESCAN_S = 0.1


def main(name: str, machines: int) -> None:
    """Create the namespaces, report them, and hold them until told to exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        mounts = _make_mounts(machines)
        places = [_make_place(host, mounts) for host in ["switch", *map(machine_name, range(machines))]]
    except PoseidonError as error:
        _tell({"error": str(error)})
        return
    _tell({"places": [vars(place) for place in places]})
    for word in sys.stdin.buffer:
        if word == BEGIN:
            _start_slowing(name)
        elif word == KEEP:
            _let_go_of(sys.stderr)
            threading.Event().wait()
    _clean_up(name, {place.inode for place in places})


def _make_place(hostname: str, mounts: int) -> state.Namespace:
    net, uts = namespace.make_namespace(hostname)
    return state.Namespace(net, uts, namespace.inode(net), mounts)


def _make_mounts(machines: int) -> int:
    """Return a namespace in which the machines know each other by name; -1 where a sandbox forbids it."""
    rows = [f"{machine_address(number)} {machine_name(number)}\n" for number in range(machines)]
    try:
        own = Path(namespace.HOSTS).read_text(errors="replace")
    except OSError:
        own = "127.0.0.1 localhost\n"
    try:
        return namespace.make_mounts("".join([*rows, own]))
    except (PoseidonError, OSError):
        return -1


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)
    _let_go_of(sys.stdout)


def _let_go_of(stream: TextIO) -> None:
    """Close a stream for its reader; its number stays in use, so that no namespace gets it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _clean_up(name: str, inodes: set[int]) -> None:
    members.kill_all(lambda: {*members.pids_in(inodes), *members.pids_marked(members.LAB_MARK, name)})
    state.forget(name)


def _start_slowing(name: str) -> None:
    lab = state.load(name)
    if lab is None:
        return
    for machine, factor in lab.spec.slow.items():
        threading.Thread(target=_slow, args=(name, machine, factor), daemon=True).start()


def _slow(name: str, machine: int, factor: float) -> None:
    """Let a machine's processes run only 1/factor of the time.

    A CPU quota would need cgroups, which many containers lack, and would not slow a process that waits.
    """
    running_s = PACE_PERIOD_S / factor
    pids: list[int] = []
    rescan_at = 0.0
    while True:
        if time.monotonic() >= rescan_at:
            lab = state.load(name)
            pids = [] if lab is None or machine in lab.paused else lab.processes(machine)
            rescan_at = time.monotonic() + RESCAN_S
        members.send_signal(pids, signal.SIGCONT)
        time.sleep(running_s)
        members.send_signal(pids, signal.SIGSTOP)
        time.sleep(PACE_PERIOD_S - running_s)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
