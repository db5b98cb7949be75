"""Break a training job in every way at every time, again and again: never a hang, never an orphan, the right cause.

::

    python benchmarks/kill_rounds.py --rounds 200                # on this machine
    python benchmarks/kill_rounds.py --rounds 400 --pretend      # without PyTorch: the launcher alone
    python benchmarks/kill_rounds.py --rounds 1000 --lab         # emulated machines and faults of the network; root
    python benchmarks/kill_rounds.py --rounds 100 --lab --faults reset,flip --seed 7 --parallel 4
    python benchmarks/kill_rounds.py --rounds 1000 --lab --minutes 60 --kept rounds    # again: goes on where it ended

A round is one job with one fault. On this machine it trains on 2 workers, in a lab on 3 machines; jobs run side by side
where the cores allow. The seed decides which fault comes when, to whom, and how the job exchanges gradients; the cases
come in a shuffled order, each once before any comes again.

A round is wrong when the job hangs, leaves a process anywhere, names another cause (worker, machine, or neither end of
the connection that was struck), or ends well with the wrong numbers. A fault of the network on a connection that the
job no longer uses may end well: then the replicas are compared at the end.

With ``--kept FOLDER`` results are added to ``FOLDER/rounds.jsonl``, rounds that are in it are not played again, and
what a wrong round said is in a file of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

from launched import MODES  # noqa: E402
from run_jobs import PROGRAM, Ended, Started, check  # noqa: E402

WHENS = ("start", "middle", "end")
DEATHS = ("exit", "raise", "kill", "segv", "orphan", "hang", "stop")
MACHINES = ("cut", "agent")
NETWORK = ("reset", "half-open", "flip", "slow", "power")
LIMIT_S = 15.0
"""From the failure to the end of the job..."""
START_S = 60.0
"""... longer by this for a hang at the start: the others' start is progress, and slow on a busy machine..."""
SILENCE_S = 6
"""... and how long a machine may be silent, where a fault can only be noticed so."""
STEPS, PAUSE_S = 400, 0.01
FLIPPED_STEPS = 1200
"""Where bits flip. It takes seconds to find a connection on which the victim sends, and one for heartbeats is read once
a second: a job that ended meanwhile would not have passed anything in silence."""
FLIP_S = 0.5
"""For a packet to come by whose bit can be flipped..."""
SENDING_S = 15.0
"""... on any of its connections; a busy host may let a job rest for seconds..."""
FLIPS = 3
"""... in so many packets: TCP sends some twice, and what is wrong with the second copy nobody sees."""


@dataclass(frozen=True)
class Case:
    """One round: what goes wrong when, and with whom."""

    fault: str
    when: str
    mode: str
    encrypts: bool = False
    rank: int = 0

    def __str__(self) -> str:
        where = f"{self.mode}{' encrypted' if self.encrypts else ''}"
        return f"{self.fault:>9} {self.when:>6} worker {self.rank} ({where})"


@dataclass
class Verdict:
    """How a round ended: what was wrong, by kind; nothing if all is as it should be."""

    seconds: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)
    note: str = ""


class Place:
    """Where jobs run: this machine, or a lab of its own."""

    def __init__(self, folder: Path, lab: Any = None, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.lab = lab
        self.env = env or {}
        self.workers = 2 if lab is None else lab.machines

    def start(self, words: Sequence[str | Path], env: dict[str, str]) -> Started:
        """Start a job."""
        # The jobs compile nothing; to import torch's compiler would take longer than all the rest.
        path = os.pathsep.join(filter(None, [str(TESTS / "startup"), os.environ.get("PYTHONPATH", "")]))
        env = {**env, "PYTHONPATH": path}
        where = ["--nproc", "2"] if self.lab is None else ["--hosts", ",".join(map(self.host, range(self.workers)))]
        passed = [word for name in env for word in ("--env", name)] if self.lab is not None else []
        spawn = None if self.lab is None else (lambda command, **options: self.lab.spawn(0, command, **options))
        options = ["--quiet", "--log-dir", "none", *where, *passed]
        return Started([*options, *words], self.folder, {**self.env, **env}, spawn)

    def host(self, rank: int) -> str:
        """Return the name of the machine a worker is on."""
        return "localhost" if self.lab is None else f"machine{rank}"


def die(place: Place, case: Case, hang_s: float, pretend: bool) -> Verdict:
    """Run a job in which a worker or a machine dies."""
    acted = "machine" if case.fault in MACHINES else case.fault
    hang = hang_s if case.fault in ("hang", "stop") else 0.0
    limit_s = LIMIT_S + hang + (START_S if hang and case.when == "start" else 0.0)
    words = ["--hang-timeout", str(hang), PROGRAM, "--fault", acted, "--rank", str(case.rank), "--when", case.when]
    words += ["--pretend"] if pretend else ["--mode", case.mode]
    job = place.start(words, {})
    try:
        job.wait_for(f"now: {acted}", limit_s=120)
        began = time.monotonic()
        if case.fault == "cut":
            place.lab.cut(case.rank)
        elif case.fault == "agent":
            _kill_agent(place, case.rank)
        ended, seconds = _end(job, began, limit_s + 45)
    except AssertionError as error:
        return _hung(error, job)
    finally:
        if case.fault == "cut":
            place.lab.heal(case.rank)
    if case.fault == "cut":
        # Nobody can ask a machine that is cut off; its agent ends its workers by itself, a little later.
        ended = _forget_left(job, ended)
    verdict = Verdict(seconds)
    for problem in check(ended, acted, case.rank, place.host(case.rank)):
        kind = "orphans" if problem.startswith("left behind") else "wrong cause"
        verdict.wrong[kind] = f"{verdict.wrong.get(kind, '')} {problem}"
    return _judge(verdict, ended, limit_s)


def disturb(place: Place, case: Case, chance: random.Random, timeout_s: float) -> Verdict:
    """Run a job whose network fails on a connection, or whose machine loses power, while it trains."""
    env = {"POSEIDON_WIRE_LOST_AFTER_S": str(SILENCE_S), "POSEIDON_WIRE_PAYLOAD_CHECKSUM": "1", "POSEIDON_TRIALS": "0"}
    env |= {"POSEIDON_WIRE_ENCRYPT": "1"} if case.encrypts else {}
    words = [PROGRAM, "--fault", "network", "--rank", str(case.rank), "--mode", case.mode]
    steps = FLIPPED_STEPS if case.fault == "flip" else STEPS
    words += ["--steps", str(steps), "--middle", str(STEPS // 2), "--pause", str(PAUSE_S), "--timeout", str(timeout_s)]
    lab, victim = place.lab, case.rank
    job = place.start(words, env)
    blamed = {victim}
    note = ""
    with contextlib.ExitStack() as undo:
        undo.callback(lab.heal, victim)
        try:
            job.wait_for("now: network", limit_s=120)
            # Where gloo exchanges gradients, its connections are struck too; but nobody notices a bit flipped there.
            ports = {int(port) for port in re.findall(r"own ports:([ \d]*)", job.out)[0].split()}
            found = [each for each in lab.connections(victim) if 22 not in each.ports]
            own = [each for each in found if each.local_port in ports]
            struck = chance.choice(found if case.mode == "wrapper" and case.fault != "flip" else own)
            began = time.monotonic()
            if case.fault == "flip":
                struck, counter = _flip(lab, victim, chance.sample(own, len(own)))
                undo.callback(counter.close)
            peer = _peer(struck)
            note = f"with machine{peer}, ports {struck.ports}"
            chosen = {"peer": peer, "port": struck.local_port}
            if case.fault == "reset":
                lab.reset(victim, **chosen)
            elif case.fault == "half-open":
                lab.half_open(victim, **chosen)
            elif case.fault == "slow":
                lab.slow(victim)
            elif case.fault == "power":
                lab.kill(victim)
                note = ""
            if case.fault != "power":
                blamed.add(peer)
            ended, seconds = _end(job, began, 120)
        except AssertionError as error:
            return _hung(error, job, note)
    if case.fault == "power":
        _serve_again(place, victim)
        ended = _forget_left(job, ended)
    verdict = Verdict(seconds, note=note)
    if ended.left:
        verdict.wrong["orphans"] = str(ended.left)
    if ended.status == 0:
        is_trained = ended.out.count(f"trained {steps} steps") == place.workers
        if case.fault in ("power", "flip") or not is_trained:
            verdict.wrong["in silence"] = "ended well"
        verdict.note += "; ended well"
    elif case.fault == "slow":
        verdict.wrong["wrong cause"] = "failed, though its network was only slow"
    elif not any(f"worker {rank} on {place.host(rank)} failed first" in ended.err for rank in blamed):
        verdict.wrong["wrong cause"] = f"none of workers {sorted(blamed)} is named"
    return _judge(verdict, ended, LIMIT_S + timeout_s if ended.status else 90.0)


def _flip(lab: Any, victim: int, connections: Sequence[Any]) -> tuple[Any, Any]:
    """Flip bits on the first of these connections on which the victim sends anything; return it and what counts."""
    last = time.monotonic() + SENDING_S
    for connection in itertools.cycle(connections):
        counter = lab.flip(victim, _peer(connection), connection.local_port, times=FLIPS)
        until = time.monotonic() + FLIP_S
        while counter.value == FLIPS and time.monotonic() < until:
            time.sleep(0.001)
        if counter.value < FLIPS:
            return connection, counter
        counter.close()
        if time.monotonic() > last:
            break
    raise AssertionError(f"machine {victim} sends nothing on any of {connections}")


def _peer(connection: Any) -> int:
    """Return the machine at the other end."""
    return int(connection.remote_ip.rpartition(".")[2]) - 1


def _end(job: Started, began: float, limit_s: float) -> tuple[Ended, float]:
    ended = job.end(limit_s)
    return ended, time.monotonic() - began


def _forget_left(job: Started, ended: Ended) -> Ended:
    job.wait_until_gone()
    return Ended(ended.status, ended.out, ended.err, ended.seconds, ())


def _hung(error: AssertionError, job: Started, note: str = "") -> Verdict:
    from poseidon.job import members

    members.kill_all(job.pids)
    kind = "no start" if "did not come" in str(error) else "hang"
    return Verdict(wrong={kind: str(error)}, note=note)


def _judge(verdict: Verdict, ended: Ended, limit_s: float) -> Verdict:
    if verdict.seconds > limit_s:
        verdict.wrong["too late"] = f"took {verdict.seconds:.1f} s"
    if verdict.wrong:
        verdict.wrong["said"] = f"\n{ended.out[-1500:]}\n{ended.err}"
    return verdict


def _kill_agent(place: Place, rank: int) -> None:
    for pid in place.lab.processes(rank):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"poseidon.launch.agent" in words and b"python" in words[0]:
            os.kill(pid, signal.SIGKILL)


def _serve_again(place: Place, machine: int) -> None:
    """Start the ssh server again on a machine that had lost power."""
    from sshd import start_server

    start_server(place.lab, machine, place.folder / "ssh")


@contextlib.contextmanager
def places(count: int, in_lab: bool) -> Iterator[list[Place]]:
    """Yield places for jobs side by side; a lab each, since a fault would harm other jobs in it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        if not in_lab:
            yield [Place(folder)] * count
            return
        from sshd import serving

        from poseidon.lab import Lab

        found = []
        for number in range(count):
            own = folder / str(number)
            own.mkdir()
            lab = stack.enter_context(Lab(machines=3, rate="1gbit"))
            found.append(Place(own, lab, stack.enter_context(serving(lab, own)).env))
        yield found


def deal(
    rounds: int, faults: Sequence[str], whens: Sequence[str], modes: Sequence[str], size: int, seed: int
) -> list[Case]:
    """Return the cases of all rounds: every combination once, in a random order, before any comes again."""
    chance = random.Random(seed)
    deck = [Case(fault, when, "wrapper") for fault in faults if fault not in NETWORK for when in whens]
    deck += [
        Case(fault, "middle", mode, encrypts)
        for fault in faults
        if fault in NETWORK
        for mode in modes
        for encrypts in ((False, True) if fault == "flip" else (False,))
    ]
    cases: list[Case] = []
    while len(cases) < rounds:
        # The machine of rank 0 is where the launcher runs: if that is cut off, it can say nothing.
        first = {fault: 1 if fault in (*MACHINES, "power") else 0 for fault in faults}
        shuffled = chance.sample(deck, len(deck))
        cases += [
            Case(each.fault, each.when, each.mode, each.encrypts, chance.randrange(first[each.fault], size))
            for each in shuffled
        ]
    return cases[:rounds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="decides everything but the moment of a fault")
    parser.add_argument("--lab", action="store_true", help="emulated machines with real ssh servers")
    parser.add_argument("--pretend", action="store_true", help="without PyTorch: the launcher alone, much faster")
    parser.add_argument(
        "--hang-timeout", type=float, help="seconds; longer than the start takes, in which workers are quiet too"
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="for faults of the network: the job's time limit")
    everything = (*DEATHS, *MACHINES, *NETWORK)
    parser.add_argument("--faults", help=f"of {', '.join(everything)}; default: all that are possible")
    parser.add_argument("--whens", default=",".join(WHENS), help="for faults that are not of the network")
    parser.add_argument("--modes", default=",".join(MODES), help="for faults of the network: how jobs exchange")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--parallel", type=int, default=max(1, cores // 2), help="jobs side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no round after that")
    parser.add_argument("--kept", type=Path, help="a folder for results, to go on with")
    arguments = parser.parse_args()
    known = everything if arguments.lab and not arguments.pretend else (*DEATHS, *(MACHINES if arguments.lab else ()))
    faults = tuple(arguments.faults.split(",")) if arguments.faults else known
    if not set(faults) <= set(known):
        parser.error(f"--faults must be of {', '.join(known)}")
    # Shorter than the workers' own patience, 60 s, after which they end the job themselves.
    hang_s = arguments.hang_timeout or (3.0 if arguments.pretend else min(15.0 * arguments.parallel, 45.0))
    last_start = time.monotonic() + 60 * arguments.minutes
    modes, whens = arguments.modes.split(","), arguments.whens.split(",")
    size = 3 if arguments.lab else 2
    cases = deal(arguments.rounds, faults, whens, modes, size, arguments.seed)
    kept = Kept(arguments.kept)
    left = [number for number, case in enumerate(cases) if kept.find(arguments.seed, number, case) is None]
    with places(arguments.parallel, arguments.lab) as found, ThreadPoolExecutor(arguments.parallel) as pool:
        free: queue.SimpleQueue[Place] = queue.SimpleQueue()
        for place in found:
            free.put(place)

        def play(number: int) -> Verdict | None:
            if time.monotonic() > last_start:
                return None
            case = cases[number]
            place = free.get()
            try:
                if case.fault in NETWORK:
                    return disturb(place, case, random.Random(f"{arguments.seed}/{number}"), arguments.timeout)
                return die(place, case, hang_s, arguments.pretend)
            except Exception:
                # The lab's or this script's own trouble must not end a long night.
                return Verdict(wrong={"no start": traceback.format_exc()})
            finally:
                free.put(place)

        pending = {pool.submit(play, number): number for number in left}
        for round_ in as_completed(pending):
            verdict = round_.result()
            if verdict is not None:
                kept.add(arguments.seed, pending[round_], cases[pending[round_]], verdict)
    return report(kept.rounds, faults, arguments.seed)


class Kept:
    """What came of the rounds; with a folder, for the next start too."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.rounds: list[dict[str, Any]] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / "rounds.jsonl"
            if self._file.exists():
                # A run that was killed may have left half a line.
                with contextlib.suppress(ValueError):
                    self.rounds += map(json.loads, self._file.read_text().splitlines())

    def find(self, seed: int, number: int, case: Case) -> dict[str, Any] | None:
        """Return what came of a round, if it was played before."""
        key = (seed, number, str(case))
        return next((each for each in self.rounds if (each["seed"], each["number"], each["case"]) == key), None)

    def add(self, seed: int, number: int, case: Case, verdict: Verdict) -> None:
        """Note what came of a round, and show it."""
        said = verdict.wrong.pop("said", "")
        kinds = list(verdict.wrong)
        result = {"seed": seed, "number": number, "case": str(case), "fault": case.fault}
        result |= {"wrong": kinds, "seconds": round(verdict.seconds, 1)}
        self.rounds.append(result)
        state = ", ".join(kinds).upper() or "ok"
        print(f"round {number:4d} {case}: {state} {verdict.seconds:.1f} s {verdict.note}", flush=True)
        text = "\n".join([f"{kind}: {what}" for kind, what in verdict.wrong.items()] + [said])
        if self._folder is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(result) + "\n")
            if kinds:
                (self._folder / f"seed-{seed}-round-{number}.txt").write_text(f"{case} {verdict.note}\n{text}\n")
        if kinds:
            print(text, flush=True)


def report(rounds: Sequence[dict[str, Any]], faults: Sequence[str], seed: int) -> int:
    """Print how many rounds of each kind there were, and what was wrong; return the exit status."""
    kinds = ("rounds", "no start", "hang", "orphans", "wrong cause", "in silence", "too late")
    print(f"\nseed {seed}\n{'fault':<10}" + "".join(f"{kind:>13}" for kind in kinds) + "  longest from fault to end")
    total: Counter[str] = Counter()
    for fault in faults:
        mine = [each for each in rounds if each["fault"] == fault]
        counted = Counter(kind for each in mine for kind in ("rounds", *each["wrong"]))
        total += counted
        longest_s = max((each["seconds"] for each in mine), default=0.0)
        print(f"{fault:<10}" + "".join(f"{counted[kind]:13d}" for kind in kinds) + f"  {longest_s:5.1f} s")
    print(f"{'all':<10}" + "".join(f"{total[kind]:13d}" for kind in kinds))
    return int(any(total[kind] for kind in kinds[1:]))


if __name__ == "__main__":
    sys.exit(main())
